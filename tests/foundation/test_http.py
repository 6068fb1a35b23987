"""The connection: what a user gave, checked before anything is sent."""

import subprocess
import sys
from pathlib import Path

import pytest

from foundation.errors import InputError
from foundation.http import connect_to


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("http://prom:9090", "http://prom:9090"),
        ("http://prom:9090/", "http://prom:9090"),
        ("https://host/prometheus/api/v1/query?x=1#y", "https://host/prometheus"),
        (" http://vm:8481/select/0/prometheus/ ", "http://vm:8481/select/0/prometheus"),
        ("http://[::1]:9090", "http://[::1]:9090"),
    ],
)
def test_the_address_is_brought_to_its_base(given: str, base: str) -> None:
    assert connect_to(given).url == base


@pytest.mark.parametrize(
    "given", ["prom:9090", "", "http://", "http://x:99999", "ftp://me:secret@prom", "https://me:secret@prom"]
)
def test_what_is_no_address_is_refused_without_repeating_a_password(given: str) -> None:
    with pytest.raises(InputError) as caught:
        connect_to(given)
    assert caught.value.location == "--url"
    assert "secret" not in str(caught.value)


def test_credentials_are_read_again_for_each_request(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    connection = connect_to("http://prom", bearer_token_file=file, headers=["X-Scope-OrgID=hpc=1"])
    assert connection.request_headers() == {"X-Scope-OrgID": "hpc=1", "Authorization": "Bearer first"}
    file.write_text("second")
    assert connection.request_headers()["Authorization"] == "Bearer second"
    assert "second" not in repr(connection)


@pytest.mark.parametrize("content", ["", "justme", None])
def test_a_useless_login_file_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "login"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError) as caught:
        connect_to("http://prom", basic_auth_file=file)
    assert caught.value.location == f"--basic-auth-file {file}"


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"headers": ["nothing"]}, "--header"),
        ({"headers": ["X-A=b\r\nX-C: d"]}, "--header"),
        ({"client_key": Path("k")}, "--client-key"),
        ({"bearer_token_file": Path("a"), "basic_auth_file": Path("b")}, "--bearer-token-file and --basic-auth-file"),
    ],
)
def test_contradictions_are_refused(options: dict[str, object], where: str) -> None:
    with pytest.raises(InputError) as caught:
        connect_to("http://prom", **options)
    assert caught.value.location == where


def test_tls_files_are_checked_before_anything_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("no certificate")
    with pytest.raises(InputError, match="--ca-file"):
        connect_to("https://prom", ca_file=file)
    with pytest.raises(InputError, match="--client-cert"):
        connect_to("https://prom", client_cert=file)
    context = connect_to("https://prom", insecure_skip_verify=True).tls()
    assert not context.check_hostname


def test_retries_leave_no_bare_lines_on_stderr() -> None:
    script = (
        "from foundation.http import HttpError, retry_policy\n"
        "left = 1\n"
        "for attempt in retry_policy(attempts=2, wait_max_s=0.01):\n"
        "    with attempt:\n"
        "        left -= 1\n"
        "        if left == 0: raise HttpError('later')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
