"""Bearer tokens with scopes, from a file that holds their hashes and may be changed while the service runs."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from features.errors import InputError
from serving.scores.reading import stamp_of

_LOG = logging.getLogger(__name__)

Scope = Literal["read", "write", "admin"]
SCOPES: Final[tuple[str, ...]] = get_args(Scope)
"""``read`` asks, ``write`` pushes telemetry, ``admin`` may do both and what changes the service itself."""

_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})", re.IGNORECASE | re.ASCII)
_DO: Final = (
    "Write lines of `SCOPE[,SCOPE] sha256:HEX [NAME]`: TOKEN=$(openssl rand -hex 32); "
    'printf %s "$TOKEN" | sha256sum gives HEX.'
)


@dataclass(frozen=True, slots=True)
class Grant:
    """What one token may do.

    ``name``: for the log; never the token.
    ``scopes``: of :data:`SCOPES`.
    """

    name: str
    scopes: frozenset[str]

    def covers(self, scope: str) -> bool:
        """Tell whether the token may do what asks for ``scope``."""
        return scope in self.scopes or "admin" in self.scopes


class ScopedTokens:
    """The tokens of one file.

    ``path``: one token a line: its scopes, ``sha256:`` and the hexadecimal SHA-256 of the token, and a name for the
    log. Empty lines and lines that begin with ``#`` are left out. A plain hash suffices because tokens are long and
    random, unlike passwords.
    Raises ``InputError`` if the file cannot be read, holds no token, or a line is not of that form.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = stamp_of(path)
        self._grants = _read(path)

    def grant(self, header: str | None, *, basic: bool = False) -> Grant | None:
        """Return what the token of an ``Authorization`` header may do, None if it is none of the file's.

        ``basic``: take it as the password of a browser, too (RFC 7617).
        Each hash is compared, in constant time, so that the answer's delay tells nothing of it. A file that has
        changed is read again; while it cannot be used, the tokens of before hold.
        """
        scheme, _, token = (header or "").partition(" ")
        if basic and scheme.lower() == "basic":
            try:
                token = base64.b64decode(token, validate=True).decode().partition(":")[2]
            except ValueError:
                return None
        elif scheme.lower() != "bearer":
            return None
        self._refresh()
        given = hashlib.sha256(token.strip().encode("utf-8", "surrogatepass")).digest()
        found: Grant | None = None
        for digest, grant in self._grants:
            if hmac.compare_digest(digest, given):
                found = grant
        return found

    def _refresh(self) -> None:
        stamp = stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._grants = _read(self._path)
        except InputError as error:
            _LOG.warning("the token file cannot be used, the tokens of before hold: %s", error)
        else:
            _LOG.info("the token file has changed: %d tokens", len(self._grants))


def _read(path: Path) -> list[tuple[bytes, Grant]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"the token file cannot be read: {reason}", str(path), _DO) from error
    grants = [
        _parse(line.split(), f"{path}, line {number}", number)
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not grants:
        raise InputError("the token file holds no token", str(path), _DO)
    digests = [digest for digest, _ in grants]
    if len(set(digests)) < len(digests):
        raise InputError("the token file holds a token twice", str(path), "Give each token one line with its scopes.")
    return grants


def _parse(words: list[str], where: str, number: int) -> tuple[bytes, Grant]:
    scopes = words[0].split(",")
    if not set(scopes) <= set(SCOPES):
        # The word may be a token that was written without its scope: it is not repeated.
        raise InputError("a line does not begin with scopes", where, f"Choose of {', '.join(SCOPES)}. {_DO}")
    digest = _DIGEST.fullmatch(words[1]) if len(words) > 1 else None
    if digest is None:
        raise InputError("a line holds no SHA-256 of a token", where, _DO)
    return bytes.fromhex(digest[1]), Grant(" ".join(words[2:]) or f"line {number}", frozenset(scopes))
