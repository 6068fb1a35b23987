"""TLS: who is trusted, told clearly where it fails; and a login that survives it."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from telemetry.collect.prometheus.backfill import BackfillPlan, backfill
from telemetry.collect.prometheus.client import Bounds
from telemetry.dataset.channels import CATALOGUE
from telemetry.errors import InputError
from telemetry.http import Connection, connect_to
from tests.http_server import certify
from tests.telemetry.collect.prometheus.fake_prometheus import START, START_MS, FakePrometheus, gpu_labels, serving

SOON = Bounds(first_retry_for_s=60.0)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for this machine's own address that nobody else vouches for, key and certificate in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: apt-get install openssl")
    public, key = certify(tmp_path_factory.mktemp("tls"), "server")
    file = public.with_name("both.pem")
    file.write_bytes(key.read_bytes() + public.read_bytes())
    return file


@pytest.fixture
def secure(certificate: Path) -> Iterator[FakePrometheus]:
    """A fake server that speaks TLS and wants a certificate of its clients if they have one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.load_verify_locations(certificate)
    context.verify_mode = ssl.CERT_OPTIONAL
    fake = FakePrometheus()
    fake.add("DCGM_FI_DEV_GPU_TEMP", gpu_labels(0), [(START_MS, 40.0)])
    with serving(fake, tls=context):
        yield fake


def fetch(connection: Connection, tmp_path: Path) -> dict[str, Any]:
    plan = BackfillPlan(START, START.replace(hour=1))
    return backfill(connection, plan, tmp_path / "fleet.live", channels=CATALOGUE, bounds=SOON)


def test_an_unknown_authority_is_refused_and_told(secure: FakePrometheus, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        fetch(connect_to(secure.url), tmp_path)
    assert str(caught.value).startswith("the secure connection failed: ")
    assert str(caught.value).endswith(
        "). Give the authority's certificate as --ca-file (and --client-cert where the server asks for one)."
    )


def test_a_given_authority_and_a_client_certificate_are_used(
    secure: FakePrometheus, certificate: Path, tmp_path: Path
) -> None:
    login = tmp_path / "login"
    login.write_text("me:secret")
    authority = certificate.with_name("server.pem")
    connection = connect_to(secure.url, ca_file=authority, client_cert=certificate, basic_auth_file=login)
    assert fetch(connection, tmp_path)["rows"] == 1
    assert {asked.headers["Authorization"] for asked in secure.asked} == {"Basic bWU6c2VjcmV0"}
