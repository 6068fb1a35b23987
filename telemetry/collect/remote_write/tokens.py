"""Bearer tokens from a file that may be changed while the receiver runs."""

from __future__ import annotations

import hashlib
import hmac
import logging
from pathlib import Path

from telemetry.errors import InputError

_LOG = logging.getLogger(__name__)
_SHORTEST = 16


class Tokens:
    """The tokens of one file.

    ``path``: one token a line; empty lines and lines that begin with ``#`` are left out.
    Raises ``InputError`` if the file cannot be read, holds no token, or one shorter than 16 characters.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digests = _read(path)
        self._stamp = _stamp(path)

    def allow(self, header: str | None) -> bool:
        """Tell whether an ``Authorization`` header holds one of the tokens.

        Each token is compared, in constant time, so that the answer's delay tells nothing of it. A file that has
        changed is read again; while it cannot be used, the tokens of before hold.
        """
        self._refresh()
        scheme, _, token = (header or "").partition(" ")
        given = hashlib.sha256(token.strip().encode()).digest()
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, given)
        return found and scheme.lower() == "bearer"

    def _refresh(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._digests = _read(self._path)
        except InputError as error:
            _LOG.warning("the token file cannot be used, the tokens of before hold: %s", error)
        else:
            _LOG.info("the token file has changed: %d tokens", len(self._digests))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _read(path: Path) -> list[bytes]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(
            f"the token file cannot be read: {reason}", str(path), "Give a file with one token a line."
        ) from error
    tokens = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    tokens = [(number, token) for number, token in tokens if token and not token.startswith("#")]
    if not tokens:
        raise InputError("the token file holds no token", str(path), "Write one token a line.")
    for number, token in tokens:
        if len(token) < _SHORTEST:
            raise InputError(
                f"a token of {len(token)} characters can be guessed",
                f"{path}, line {number}",
                f"Use {_SHORTEST} characters or more, for instance of `openssl rand -hex 32`.",
            )
    return [hashlib.sha256(token.encode()).digest() for _, token in tokens]
