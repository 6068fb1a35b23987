"""Bearer tokens from a file that is reloaded on change; an unsalted hash suffices because tokens are random."""

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from foundation.errors import InputError
from foundation.files import read_text, stamp_of

_LOG = logging.getLogger(__name__)
Grant = TypeVar("Grant")


def digest_of(token: str) -> bytes:
    """Return the SHA-256 of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def own_token_file(path: Path) -> Path:
    """Create a file with one random token if it is missing, readable by its owner only.

    Raises ``InputError`` if it cannot be created, or other users can read or write it.
    """
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with open(file, "w", encoding="ascii") as target:
                target.write(f"{secrets.token_hex(32)}\n")
        status = path.lstat()
    except OSError as error:
        hint = "Give --tokens FILE, a file with one token per line."
        raise InputError(f"the token file cannot be created: {error.strerror or error}", str(path), hint) from None
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid != os.geteuid():
        raise InputError("other users can read or replace the token file", str(path), "Remove it, and restart.")
    return path


class TokenFile(Generic[Grant]):
    """The tokens of a file, one per line; empty lines and lines that start with ``#`` are ignored.

    ``parse``: parses a line, given its number and location, into the digest of a token and its grant; may raise
    ``InputError``. ``advice``: hint for errors on how to write the file.
    Raises ``InputError`` if the file cannot be read, has no token, or has a token with two grants.
    """

    def __init__(self, path: Path, parse: Callable[[str, int, str], tuple[bytes, Grant]], advice: str) -> None:
        self._path, self._parse, self._advice = path, parse, advice
        self._stamp = stamp_of(path)
        self._grants = self._read(is_reload=False)

    def grant(self, token: str) -> Grant | None:
        """Return the grant of a token; None if the token is not in the file.

        If the changed file cannot be read, the previous tokens stay valid; otherwise only its own lines count, so that
        a removed token is rejected. Invalid lines are logged and ignored.

        All digests are compared in constant time, so that the response time reveals nothing about them.
        """
        stamp = stamp_of(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._grants = self._read(is_reload=True)
                _LOG.info("the token file has changed: %d tokens", len(self._grants))
            except InputError as error:
                _LOG.warning("the token file cannot be read; the previous tokens stay valid: %s", error)
        presented = digest_of(token.strip())
        matching = [grant for digest, grant in self._grants if hmac.compare_digest(digest, presented)]
        return matching[0] if matching else None

    def _lines(self) -> list[tuple[int, str]]:
        """Read the lines that are not empty or comments, with their numbers."""
        try:
            lines = [line.strip() for line in read_text(self._path).splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise InputError(f"the token file cannot be read: {reason}", str(self._path), self._advice) from error
        return [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]

    def _read(self, *, is_reload: bool) -> list[tuple[bytes, Grant]]:
        """Parse the lines; on a reload, unusable lines and tokens with two grants are ignored."""
        grants: dict[bytes, Grant | None] = {}
        for number, line in self._lines():
            location = f"{self._path}, line {number}"
            try:
                digest, grant = self._parse(line, number, location)
                if grants.setdefault(digest, grant) != grant:
                    grants[digest] = None
                    advice = "Give each token a single line with all its scopes."
                    raise InputError("the token file has a duplicate token", location, advice)
            except InputError as error:
                if not is_reload:
                    raise
                _LOG.warning("ignored a line of the token file: %s", error)
        if not grants and not is_reload:
            raise InputError("the token file contains no token", str(self._path), self._advice)
        return [(digest, grant) for digest, grant in grants.items() if grant is not None]
