"""Sessions of people with a browser: a cookie in place of a token, for the pages alone."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from starlette.requests import Request

from serving.http.tokens import Grant, ScopedTokens

LASTS: Final = timedelta(hours=12)
"""How long a session lasts: a shift."""

_LONGEST: Final = 200


class Sessions:
    """Gives out cookies for tokens, and knows them again.

    A cookie holds when it ends, which token it was given for, and a code over both under a key that only this process
    has; never the token. So it ends with the process, and with its token: one that is taken out of the file takes its
    sessions with it. Only pages take cookies, which change nothing: a foreign site gains nothing by sending one along.
    """

    def __init__(self, tokens: ScopedTokens, clock: Callable[[], datetime]) -> None:
        self._tokens = tokens
        self._clock = clock
        self._key = secrets.token_bytes(32)

    def begin(self, token: str, request: Request) -> str | None:
        """Return the ``Set-Cookie`` of a new session, None if the token may not read.

        ``Secure`` is set where the browser's own connection is encrypted, as far as a proxy on this machine tells.
        """
        found = self._tokens.identify(token)
        if found is None or not found[1].covers("read"):
            return None
        until = int((self._clock() + LASTS).timestamp())
        value = f"{until}.{found[0]}"
        return self._cookie(f"{value}.{self._code(value)}", int(LASTS.total_seconds()), request)

    def end(self, request: Request) -> str:
        """Return the ``Set-Cookie`` that ends a session."""
        return self._cookie("", 0, request)

    def grant(self, request: Request) -> Grant | None:
        """Return what a request's cookie allows, None if it has none that holds."""
        # Read by hand: other services on this host may have set cookies that the standard library gives up at.
        pairs = (part.strip().partition("=") for part in request.headers.get("cookie", "").split(";"))
        given = next((value for name, _, value in pairs if name == _name(request)), "")
        if len(given) > _LONGEST or not given.isascii():
            return None
        value, _, code = given.rpartition(".")
        if not hmac.compare_digest(self._code(value), code):
            return None
        until, _, fingerprint = value.partition(".")  # ours, or the code would not fit
        if self._clock().timestamp() >= int(until):
            return None
        grant = self._tokens.of_fingerprint(fingerprint)
        # Whatever else the token may do, its cookie reads.
        return Grant(grant.name, frozenset({"read"})) if grant is not None and grant.covers("read") else None

    def _code(self, value: str) -> str:
        return hmac.new(self._key, value.encode("ascii"), hashlib.sha256).hexdigest()

    @staticmethod
    def _cookie(value: str, seconds: int, request: Request) -> str:
        secure = "; Secure" if _secure(request) else ""
        return f"{_name(request)}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"


def _secure(request: Request) -> bool:
    """Tell whether the client's connection is encrypted, as a proxy on this machine says where there is one."""
    return request.url.scheme == "https"


def _name(request: Request) -> str:
    # The prefix makes browsers refuse such a cookie from anything but this host over an encrypted connection.
    return "__Host-predrain" if _secure(request) else "predrain"
