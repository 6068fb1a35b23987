"""The one error that a user's input can raise: what was wrong, where, and what to do about it."""

from typing import Final

_MAX_LENGTH: Final = 5_000


class InputError(Exception):
    """Input that cannot be used: a file, a row, a parameter.

    The command prints it without a traceback and exits with 1.

    ``where``: location: file, row, column, node, GPU or parameter.
    """

    def __init__(self, what: str, where: str, do: str) -> None:
        super().__init__(what, where, do)
        self.what = what
        self.where = where
        self.do = do

    def __str__(self) -> str:
        # A hostile value that is quoted must not fill the log.
        what = self.what if len(self.what) <= _MAX_LENGTH else f"{self.what[:_MAX_LENGTH]} …"
        return f"{what} ({self.where}). {self.do}"


class TooEarlyError(InputError):
    """Data without fault that do not reach far enough yet."""
