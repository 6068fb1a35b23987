"""Logging in: people with a browser get a cookie in place of a token, for the pages alone."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from datetime import datetime, timedelta
from enum import Enum
from typing import Annotated, Any, Final
from urllib.parse import parse_qs, quote, urlsplit

from fastapi import FastAPI, Query
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from serving.http.application import problems
from serving.http.bodies import media_of
from serving.http.schemas import NoQuery
from serving.http.tokens import Grant, ScopedTokens
from serving.pages.rendering import page, redirect
from telemetry.collect.remote_write.problems import Refused

LASTS: Final = timedelta(hours=12)
"""How long a session lasts: a shift."""

_LONGEST: Final = 200
_TAGS: Final[list[str | Enum]] = ["pages"]
_HTML: Final = "text/html"
_FORM: Final = "application/x-www-form-urlencoded"


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
        identified = self._tokens.identify(token)
        if identified is None or not identified[1].covers("read"):
            return None
        until = int((self._clock() + LASTS).timestamp())
        value = f"{until}.{identified[0]}"
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


class LoginQuery(BaseModel):
    """Where a browser is led after it has logged in."""

    model_config = ConfigDict(extra="forbid")

    next: str = "/"


class LoginPages:
    """Log in with a token, and log out.

    ``sessions``: None: anybody may look.
    ``frame``: gives what every page shows around its own.
    """

    def __init__(self, sessions: Sessions | None, frame: Callable[[str | None], dict[str, Any]]) -> None:
        self._sessions = sessions
        self._frame = frame

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route(
            "/login",
            self._login_form,
            summary="Ask for a token.",
            response_class=HTMLResponse,
            responses=problems(303, 400, 429, 503, media=_HTML),
            tags=_TAGS,
        )
        for path, form, summary, fields in (
            ("/login", self._login, "Begin a session of 12 hours.", ("token", "next", "user")),
            ("/logout", self._logout, "End the session.", ()),
        ):
            app.add_api_route(
                path,
                form,
                methods=["POST"],
                summary=summary,
                status_code=303,
                response_class=Response,
                responses=problems(303, 400, 403, 408, 413, 415, 422, 429, 503, media=_HTML),
                openapi_extra=_form_body(fields),
                tags=_TAGS,
            )

    async def _login_form(self, request: Request, query: Annotated[LoginQuery, Query()]) -> Response:
        after = _own(query.next)
        if self._sessions is None or self._sessions.grant(request) is not None:
            return redirect(after)
        return page(request, "login", **self._frame(None), next=after, wrong=False)

    async def _login(self, request: Request, _: Annotated[NoQuery, Query()]) -> Response:
        if self._sessions is None:
            return redirect("/")
        form = await self._form(request, ("user", "token", "next"))
        after = _own(form.get("next", "/"))
        cookie = self._sessions.begin(form.get("token", ""), request)
        if cookie is None:
            return page(request, "login", 403, **self._frame(None), next=after, wrong=True)
        return redirect(after, **{"Set-Cookie": cookie})

    async def _logout(self, request: Request, _: Annotated[NoQuery, Query()]) -> Response:
        await self._form(request, ())
        if self._sessions is None:
            return redirect("/")
        return redirect("/login", **{"Set-Cookie": self._sessions.end(request)})

    async def _form(self, request: Request, known: tuple[str, ...]) -> dict[str, str]:
        """Read a small form that a page of this service sent.

        Raises ``Refused``: 403 if another site's page sent it, 415 or 413 if it is no small form, 400 if it cannot be
        read, 422 if it has other fields than those ``known``.
        """
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        foreign = origin is not None and _host_of(origin) != request.headers.get("host")
        if foreign if site is None else site not in ("same-origin", "none"):
            raise Refused(403, "another site's page sent this form", "origin")
        body, media = await request.body(), media_of(request)
        if media not in (_FORM, "") or (body and media != _FORM):
            raise Refused(415, f"send {_FORM}", "media_type")
        try:
            fields = parse_qs(body.decode("utf-8"), keep_blank_values=True, max_num_fields=10)
        except ValueError:
            raise Refused(400, "the form cannot be read", "invalid") from None
        if not fields.keys() <= set(known):
            raise Refused(422, "the form has fields that are not known here", "invalid")
        return {name: values[-1] for name, values in fields.items()}


def _host_of(origin: str) -> str | None:
    """Return the host and port of an origin, None for what is no address."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _own(address: str) -> str:
    """Return an address of this service, ``/`` for one that leads elsewhere."""
    try:
        parts = urlsplit(address) if address.isprintable() and "\\" not in address else None
    except ValueError:  # such as //[
        parts = None
    if parts is None or parts.scheme or parts.netloc or not address.startswith("/") or address.startswith("//"):
        return "/"
    return address if address.isascii() else quote(address, safe="/?&=%")


def _form_body(fields: tuple[str, ...]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in fields},
        "additionalProperties": False,
    }
    return {"requestBody": {"required": bool(fields), "content": {_FORM: {"schema": schema}}}}


def _secure(request: Request) -> bool:
    """Tell whether the client's connection is encrypted, as a proxy on this machine says where there is one."""
    return request.url.scheme == "https"


def _name(request: Request) -> str:
    # The prefix makes browsers refuse such a cookie from anything but this host over an encrypted connection.
    return "__Host-predrain" if _secure(request) else "predrain"
