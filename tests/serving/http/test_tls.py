"""TLS: verified by a real client, renewed while the service runs, refused where it could not work."""

import http.client
import shutil
import ssl
from pathlib import Path

import pytest

from foundation.errors import InputError
from serving.server import Tls
from tests.http_server import certify
from tests.serving.http.world import running, small_fleet, write_scores
from tests.waiting import wait

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


def ask(port: int, trusted: Path) -> str:
    """Ask over TLS; returns the name in the certificate."""
    context = ssl.create_default_context(cafile=str(trusted))
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=60)
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200
    subject = connection.sock.getpeercert()["subject"][0][0][1]
    connection.close()
    return str(subject)


def test_answers_are_encrypted_and_a_renewed_certificate_is_taken_up(tmp_path: Path) -> None:
    write_scores(tmp_path / "scores", small_fleet())
    certificate, key = certify(tmp_path, "first")
    later, later_key = certify(tmp_path, "later")
    with running(tmp_path / "scores", tls=Tls(certificate, key, 0.02)) as service:
        port = service.port
        assert ask(port, certificate) == "first"
        with pytest.raises(ssl.SSLError):
            ask(port, later)
        plain = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        plain.request("GET", "/healthz")
        with pytest.raises((http.client.HTTPException, OSError)):
            plain.getresponse()
        shutil.copy(later, certificate)  # for a while the two do not belong together
        shutil.copy(later_key, key)
        wait(lambda: renewed(port, later))


def renewed(port: int, trusted: Path) -> bool:
    try:
        return ask(port, trusted) == "later"
    except ssl.SSLError:
        return False


def test_a_certificate_that_cannot_be_used_leaves_the_one_of_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = certify(tmp_path, "first")
    other, _ = certify(tmp_path, "other")
    whole = certificate.read_bytes()
    tls = Tls(certificate, key)
    assert tls.context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert not tls.look()
    for broken in (b"", b"garbage", other.read_bytes()):
        certificate.write_bytes(broken)
        assert not tls.look()
        assert "the previous one stays in use" in caplog.messages[-1]
    assert not tls.look()
    assert len(caplog.messages) == 3, "each is said once"
    certificate.unlink()
    assert not tls.look()
    certificate.write_bytes(whole)
    assert tls.look()


def test_an_unusable_certificate_or_key_is_reported_at_the_start(tmp_path: Path) -> None:
    certificate, key = certify(tmp_path, "first")
    locked, locked_key = certify(tmp_path, "locked", "-passout", "pass:secret")
    _, foreign = certify(tmp_path, "foreign")
    for pair, message in (
        ((tmp_path / "none", key), "the certificate and the key cannot be used: No such file or directory (--tls-cert"),
        (
            (certificate, tmp_path / "none"),
            "the certificate and the key cannot be used: No such file or directory (--tls-cert",
        ),
        ((certificate, foreign), "the certificate and the key cannot be used: KEY_VALUES_MISMATCH"),
        ((locked, locked_key), "the key has a password"),
    ):
        with pytest.raises(InputError) as error:
            Tls(*pair)
        assert message in str(error.value)
