"""The connection: what a user gave, checked before anything is sent; messages are pinned."""

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
    ("given", "message"),
    [
        ("prom:9090", "'prom:9090' is not the address of a server (--url). Write it with http:// or https://, such as"),
        ("", "'' is not the address of a server"),
        ("http://", "'http://' is not the address of a server"),
        ("http://x:99999", "'http://x:99999' is not the address of a server"),
        ("ftp://me:secret@prom", "'ftp://…@prom' is not the address of a server"),
        ("https://me:secret@prom", "the address holds a user or a password (--url). Put user:password into a file"),
    ],
)
def test_what_is_no_address_is_refused_without_repeating_a_password(given: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        connect_to(given)
    assert str(caught.value).startswith(message)
    assert "secret" not in str(caught.value)


def test_credentials_are_read_again_for_each_request(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    connection = connect_to("http://prom", bearer_token_file=file, headers=["X-Scope-OrgID=hpc=1"])
    assert connection.request_headers() == {"X-Scope-OrgID": "hpc=1", "Authorization": "Bearer first"}
    file.write_text("second")
    assert connection.request_headers()["Authorization"] == "Bearer second"
    assert "second" not in repr(connection)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file does not hold one line of text (--basic-auth-file {file}). Write the secret into it."),
        (
            "justme",
            "the file does not hold a user and a password (--basic-auth-file {file}). "
            "Write one line into it: user:password",
        ),
        (None, "the file cannot be read: No such file or directory (--basic-auth-file {file}). "
         "Give a file that this user may read."),
    ],
)  # fmt: skip
def test_a_useless_login_file_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "login"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError) as caught:
        connect_to("http://prom", basic_auth_file=file)
    assert str(caught.value) == message.format(file=file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"headers": ["nothing"]}, "'nothing' is not a header (--header). Write NAME=VALUE, such as X-Scope-OrgID="),
        ({"headers": ["X-A=b\r\nX-C: d"]}, "'X-A' is not a header (--header)."),
        ({"client_key": Path("k")}, "a key without its certificate (--client-key). Give --client-cert too."),
        (
            {"bearer_token_file": Path("a"), "basic_auth_file": Path("b")},
            "two ways to log in (--bearer-token-file and --basic-auth-file). Give the one that the server asks for.",
        ),
    ],
)  # fmt: skip
def test_contradictions_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        connect_to("http://prom", **options)
    assert str(caught.value).startswith(message)


def test_tls_files_are_checked_before_anything_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("no certificate")
    with pytest.raises(InputError, match=r"the certificates cannot be read: .* \(--ca-file .*Give a PEM file\."):
        connect_to("https://prom", ca_file=file)
    with pytest.raises(InputError, match=r"the client certificate cannot be used: .*--client-key as PEM files\."):
        connect_to("https://prom", client_cert=file)
    context = connect_to("https://prom", insecure_skip_verify=True).tls()
    assert context is not None
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
