"""The one error raised for user input: what is wrong, where, and how to fix it."""

from typing import Final

_MAX_LENGTH: Final = 5_000


class InputError(Exception):
    """Invalid input; the command prints the error without a traceback and exits with status 1.

    ``where``: file, row, column, node, GPU or parameter.
    """

    def __init__(self, what: str, where: str, do: str) -> None:
        super().__init__(what, where, do)
        self.what = what
        self.where = where
        self.do = do

    def __str__(self) -> str:
        # `what` may quote a hostile value, which must not fill the log.
        what = self.what if len(self.what) <= _MAX_LENGTH else f"{self.what[:_MAX_LENGTH]} …"
        return f"{what} ({self.where}). {self.do}"


class TooEarlyError(InputError):
    """The data are valid but do not cover enough time yet."""
