"""The one error raised for user input: what is wrong, where, and how to fix it."""

from typing import Final

_MAX_LENGTH: Final = 5_000


class InputError(Exception):
    """Invalid input; the command prints the error without a traceback and exits with status 1.

    ``location``: file, row, column, node, GPU or parameter.
    """

    def __init__(self, problem: str, location: str, advice: str) -> None:
        super().__init__(problem, location, advice)
        self.problem = problem
        self.location = location
        self.advice = advice

    def __str__(self) -> str:
        # `problem` may quote a hostile value, which must not fill the log.
        problem = self.problem if len(self.problem) <= _MAX_LENGTH else f"{self.problem[:_MAX_LENGTH]} …"
        return f"{problem} ({self.location}). {self.advice}"


class TooEarlyError(InputError):
    """The data are valid but do not cover enough time yet."""
