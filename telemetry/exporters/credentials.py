"""What the collector shows to exporters: a bearer token or a name and password, read from files that may change."""

from __future__ import annotations

import base64
from pathlib import Path

from telemetry.errors import InputError


class Credentials:
    """The ``Authorization`` header of scrapes.

    ``basic_auth_file``: a file with ``user:password`` on one line.
    Raises ``InputError`` if both are given, or a file cannot be used.

    Tokens are rotated while a collector runs: a file is read again when it has changed, and a file that cannot be
    read at that moment leaves the old header in force.
    """

    def __init__(self, bearer_token_file: Path | None = None, basic_auth_file: Path | None = None) -> None:
        if bearer_token_file is not None and basic_auth_file is not None:
            raise InputError("both a bearer token and a password are given", "options", "Give one of them.")
        self._bearer = bearer_token_file is not None
        self._path = bearer_token_file or basic_auth_file
        self._stamp: tuple[int, int] | None = None
        self._header: str | None = None
        if self._path is not None:
            self._stamp = self._look(self._path)
            self._header = self._read(self._path)

    def header(self) -> str | None:
        """Return the header's value, or None where there are no credentials."""
        if self._path is not None:
            try:
                stamp = self._look(self._path)
                if stamp != self._stamp:
                    self._header = self._read(self._path)
                    self._stamp = stamp
            except InputError:
                pass  # in the middle of a rotation
        return self._header

    def _look(self, path: Path) -> tuple[int, int]:
        try:
            stat = path.stat()
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", str(path), "Give a file that can be read.") from None
        return stat.st_mtime_ns, stat.st_ino

    def _read(self, path: Path) -> str:
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            what = error.strerror if isinstance(error, OSError) else "it is no text"
            raise InputError(f"cannot be read: {what}", str(path), "Give a file that can be read.") from None
        # The content never goes into a message.
        if not text or any(ord(character) < 32 or character == "\x7f" for character in text):
            raise InputError("the file does not hold one line of credentials", str(path), "Write exactly one line.")
        if self._bearer:
            return f"Bearer {text}"
        if ":" not in text:
            raise InputError("the file does not hold a name and a password", str(path), "Write user:password.")
        return "Basic " + base64.b64encode(text.encode()).decode()
