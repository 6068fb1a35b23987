"""Bearer tokens with scopes, from a file that holds their hashes and may be changed while the service runs."""

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from foundation.errors import InputError
from foundation.server.token_file import TokenFile

Scope = Literal["read", "write", "admin"]
SCOPES: Final[tuple[str, ...]] = get_args(Scope)
"""``read`` asks, ``write`` pushes telemetry, ``admin`` may do both and what changes the service itself."""

_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})", re.IGNORECASE | re.ASCII)
HOW_TO_WRITE: Final = (
    "Write lines of `SCOPE[,SCOPE] sha256:HEX [NAME]`: TOKEN=$(openssl rand -hex 32); "
    'printf %s "$TOKEN" | sha256sum gives HEX.'
)


@dataclass(frozen=True, slots=True)
class TokenGrant:
    """What one token may do.

    ``name``: for the log; never the token.
    """

    name: str
    scopes: frozenset[str]

    def covers(self, scope: str) -> bool:
        """Tell whether the token may do what asks for ``scope``."""
        return scope in self.scopes or "admin" in self.scopes


EVERYTHING: Final = TokenGrant("", frozenset({"admin"}))
"""What everybody may do where no tokens are set up."""


def scoped_token(line: str, number: int, where: str) -> tuple[bytes, TokenGrant]:
    """Read a line: scopes, ``sha256:`` with the hexadecimal SHA-256 of the token, and a name for the log."""
    written, *rest = line.split()
    scopes = frozenset(written.split(","))
    if not scopes <= set(SCOPES):
        # The word may be a token that was written without its scope: it is not repeated.
        raise InputError("a line does not begin with scopes", where, f"Choose of {', '.join(SCOPES)}. {HOW_TO_WRITE}")
    match = _DIGEST.fullmatch(rest[0]) if rest else None
    if match is None:
        raise InputError("a line holds no SHA-256 of a token", where, HOW_TO_WRITE)
    return bytes.fromhex(match[1]), TokenGrant(" ".join(rest[1:]) or f"line {number}", scopes)


class ScopedTokens:
    """The tokens of one file, see :func:`scoped_token`; raises ``InputError`` if it cannot be used."""

    def __init__(self, path: Path) -> None:
        self._file = TokenFile(path, scoped_token, HOW_TO_WRITE)

    def grant(self, header: str | None, *, basic: bool = False) -> TokenGrant | None:
        """Return what the token of an ``Authorization`` header may do, None if it is none of the file's.

        ``basic``: take it as the password of a browser, too (RFC 7617).
        """
        scheme, _, token = (header or "").partition(" ")
        if basic and scheme.lower() == "basic":
            try:
                token = base64.b64decode(token, validate=True).decode().partition(":")[2]
            except ValueError:
                return None
        elif scheme.lower() != "bearer":
            return None
        return self._file.grant(token)
