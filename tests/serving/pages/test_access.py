"""Who may look at pages: a browser sends a token with the scope read as a password (RFC 7617)."""

import base64
import hashlib
from collections.abc import Iterator

import pytest

from tests.serving.http.world import Running, running, small_fleet, write_scores

READ, WRITE = "read-token-0123456789", "write-token-0123456789"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("access")
    hashes = {scope: hashlib.sha256(token.encode()).hexdigest() for scope, token in (("read", READ), ("write", WRITE))}
    (folder / "tokens").write_text("".join(f"{scope} sha256:{digest}\n" for scope, digest in hashes.items()))
    write_scores(folder / "scores", small_fleet())
    with running(folder / "scores", tokens=folder / "tokens") as started:
        yield started


def password(token: str, user: str = "me") -> str:
    return "Basic " + base64.b64encode(f"{user}:{token}".encode()).decode()


def test_a_browser_is_asked_for_a_token_and_let_in_with_it(service: Running) -> None:
    client = service.client()
    for path in ("/", "/nodes/n1", "/gpus/GPU-n1-0", "/outcomes", "/ledger?node=n1", "/page/decision"):
        status, body, headers = client.send("GET", path)
        assert status == 401
        assert headers["WWW-Authenticate"].startswith("Basic realm=")
        assert "Send one of the service" in body.decode()
        assert client.send("GET", path, Authorization=password(READ))[0] == 200
    assert service.client(READ).send("GET", "/")[0] == 200
    assert client.send("GET", "/page/style.css")[0] == 200


def test_a_password_opens_the_pages_alone(service: Running) -> None:
    for path in ("/v1/nodes", "/metrics"):
        status, _, headers = service.client().send("GET", path, Authorization=password(READ))
        assert (status, headers["WWW-Authenticate"]) == (401, 'Bearer realm="predrain"')


@pytest.mark.parametrize(
    ("header", "status"),
    [(password("wrong"), 401), (password(""), 401), ("Basic", 401), ("Basic !", 401), ("Basic /w==", 401),
     (f"Basic {READ}", 401), (password(WRITE), 403), (password(READ, ""), 200)],
)  # fmt: skip
def test_another_password_opens_none(service: Running, header: str, status: int) -> None:
    assert service.client().send("GET", "/", Authorization=header)[0] == status
