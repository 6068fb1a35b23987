"""People log in with a token that may read, and get a cookie that opens the pages alone."""

import hashlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlencode

import pytest

from serving.pages.login import LASTS
from tests.serving.http.world import NOW, Client, Running, running, small_fleet, write_scores

READ, WRITE = "read-token-0123456789", "write-token-0123456789"
FORM = "application/x-www-form-urlencoded"


class Clock:
    now = NOW

    def __call__(self) -> object:
        return self.now


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("".join(f"{scope} sha256:{hashlib.sha256(token.encode()).hexdigest()} {scope}er\n"
                            for scope, token in (("read", READ), ("write", WRITE))))  # fmt: skip
    return path


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(tmp_path: Path, tokens: Path, clock: Clock) -> Iterator[Running]:
    write_scores(tmp_path / "scores", small_fleet())
    with running(tmp_path / "scores", tokens=tokens, clock=clock) as started:
        yield started


def log_in(client: Client, token: str, after: str = "/", **headers: str) -> tuple[int, str, str]:
    """Send the form; returns the status, where to, and the cookie as a browser would send it back."""
    body = urlencode({"token": token, "next": after}).encode()
    status, _, answer = client.send("POST", "/login", body, media=FORM, **headers)
    cookie = answer.get("Set-Cookie", "")
    assert not cookie or "HttpOnly; SameSite=Strict" in cookie
    return status, answer.get("Location", ""), cookie.split(";")[0]


def test_who_is_not_known_is_led_to_the_login_and_back(service: Running) -> None:
    client = service.client()
    for path in ("/", "/nodes/n1", "/gpus/GPU-n1-0", "/outcomes", "/ledger?node=n1"):
        status, _, headers = client.send("GET", path)
        assert status == 303
        assert headers["Location"].startswith("/login?next=%2F")
        form = client.send("GET", headers["Location"])[1].decode()
        assert f'name="next" value="{path}"' in form
        assert log_in(client, READ, path)[:2] == (303, path)


def test_the_cookie_opens_the_pages_and_nothing_else(service: Running) -> None:
    client = service.client()
    cookie = log_in(client, READ)[2]
    assert READ not in cookie
    assert client.send("GET", "/", Cookie=cookie)[0] == 200
    assert client.send("GET", "/nodes/n1", Cookie=f'other={{"a": 1}}; {cookie}')[0] == 200
    assert client.send("GET", "/page/decision", Cookie=cookie)[1] == {"decision": "20260101T060000Z"}
    for path in ("/v1/nodes", "/metrics"):
        assert client.send("GET", path, Cookie=cookie)[0] == 401
    assert service.client(READ).send("GET", "/")[0] == 200
    assert service.client(WRITE).send("GET", "/")[0] == 403


@pytest.mark.parametrize("token", ["", "wrong", WRITE, "x" * 1000])
def test_another_token_gets_no_cookie(service: Running, token: str) -> None:
    status, where, cookie = log_in(service.client(), token)
    assert (status, where, cookie) == (403, "", "")


def test_a_changed_cookie_is_none(service: Running) -> None:
    client = service.client()
    cookie = log_in(client, READ)[2]
    until, fingerprint, code = cookie.removeprefix("predrain=").split(".")
    for value in (
        f"{int(until) + 1}.{fingerprint}.{code}", f"{until}.{'0' * 32}.{code}", f"{until}.{fingerprint}.{code[:-1]}x",
        f"{until}.{fingerprint}.", "", ".", "a.b.c", "\\\"", "é.é", "x" * 5000,
    ):  # fmt: skip
        assert client.send("GET", "/", Cookie=f"predrain={value}".encode().decode("latin-1"))[0] == 303
    assert client.send("GET", "/", Cookie=cookie)[0] == 200


def test_a_session_ends_with_time_with_its_token_and_by_leaving(service: Running, clock: Clock, tokens: Path) -> None:
    client = service.client()
    cookie = log_in(client, READ)[2]
    status, _, headers = client.send("POST", "/logout", b"", media=FORM, Cookie=cookie)
    assert (status, headers["Location"]) == (303, "/login")
    assert "Max-Age=0" in headers["Set-Cookie"]
    clock.now = NOW + LASTS - timedelta(seconds=1)
    assert client.send("GET", "/", Cookie=cookie)[0] == 200
    clock.now = NOW + LASTS
    assert client.send("GET", "/", Cookie=cookie)[0] == 303
    clock.now = NOW
    tokens.write_text(f"write sha256:{hashlib.sha256(READ.encode()).hexdigest()}\n")  # it may no longer read
    assert client.send("GET", "/", Cookie=cookie)[0] == 303
    tokens.write_text(f"admin sha256:{hashlib.sha256(READ.encode()).hexdigest()}\n")
    assert client.send("GET", "/", Cookie=cookie)[0] == 200
    tokens.write_text(f"write sha256:{hashlib.sha256(WRITE.encode()).hexdigest()}\n")
    assert client.send("GET", "/", Cookie=cookie)[0] == 303


@pytest.mark.parametrize(
    "after",
    ["//evil.example/", "https://evil.example/", "/\\evil.example", "evil", "javascript:alert(1)", "/\r\nX: y", "//["],
)
def test_a_login_leads_to_this_service_only(service: Running, after: str) -> None:
    assert log_in(service.client(), READ, after)[:2] == (303, "/")


def test_a_form_of_another_site_is_refused(service: Running) -> None:
    client = service.client()
    assert log_in(client, READ, Origin="https://evil.example")[0] == 403
    assert log_in(client, READ, Origin="null")[0] == 403
    assert log_in(client, READ, Origin="http://[")[0] == 403
    assert log_in(client, READ, Sec_Fetch_Site="cross-site")[0] == 403
    assert log_in(client, READ, Origin=f"http://127.0.0.1:{service.port}")[0] == 303
    assert log_in(client, READ, Sec_Fetch_Site="same-origin")[0] == 303
    assert client.send("POST", "/login", b"{}", media="application/json")[0] == 415
    assert client.send("POST", "/login", b"x" * 5000, media=FORM)[0] == 413
    assert client.send("POST", "/login", b"colour=red", media=FORM)[0] == 422
    assert client.send("POST", "/login", b"a=1&" * 20, media=FORM)[0] == 400


def test_the_cookie_is_bound_to_an_encrypted_connection_where_there_is_one(service: Running) -> None:
    """A proxy on this machine says so; then the name itself makes browsers refuse a planted one."""
    client = service.client()
    cookie = log_in(client, READ, X_Forwarded_Proto="https")[2]
    assert cookie.startswith("__Host-predrain=")
    assert client.send("GET", "/", Cookie=cookie, X_Forwarded_Proto="https")[0] == 200
    assert client.send("GET", "/", Cookie=cookie)[0] == 303


def test_without_tokens_nobody_is_asked(tmp_path: Path) -> None:
    write_scores(tmp_path, small_fleet())
    with running(tmp_path) as started:
        client = started.client()
        assert client.send("GET", "/")[0] == 200
        assert client.send("GET", "/login")[2]["Location"] == "/"
        assert log_in(client, "x", "/nodes/n1")[:2] == (303, "/")
