"""Failures between this host and a bucket: retried, given up in time, and reported."""

import socket
import threading
from pathlib import Path

import pytest

from foundation.errors import InputError
from foundation.place import S3Place, place_of
from telemetry.dataset import files
from telemetry.dataset.files import connect
from telemetry.dataset.store import Dataset
from tests.http_server import certify
from tests.object_storage import KEYS, object_storage, proxy, upload


@pytest.mark.parametrize(
    ("written", "place"),
    [
        ("/srv/fleet", Path("/srv/fleet")),
        ("s3://fleets/a/b/", S3Place("fleets", "a/b")),
    ],
)
def test_a_place_is_read_and_written_alike(written, place):
    assert place_of(written) == place
    assert str(place) == written.rstrip("/")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        *((f"s3://{rest}", "is not a prefix in a bucket") for rest in ("", "a b/east", "fleets", "fleets/a//b")),
        ("s3://fleets/../east", r"is not a prefix in a bucket \(--dataset\)\. Write s3://BUCKET/PREFIX"),
        ("gs://fleets/east", "'gs://fleets/east' is neither a folder nor an address of S3-compatible"),
    ],
)
def test_what_names_no_prefix_in_a_bucket_is_refused(written, message):
    with pytest.raises(InputError, match=message):
        place_of(written)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "http://host/path"])
def test_an_endpoint_that_is_no_address_is_refused(endpoint):
    with pytest.raises(InputError, match=r"is not the address of a server \(AWS_ENDPOINT_URL\)"):
        connect({"AWS_ENDPOINT_URL": endpoint})


def test_a_prefix_without_a_dataset_is_distinguished_from_a_missing_bucket(place):
    with pytest.raises(InputError, match=r"there is no bucket 'no-such-bucket' .*AWS_ENDPOINT_URL, or make it"):
        Dataset.open(S3Place("no-such-bucket", "east"))
    with pytest.raises(InputError, match=f"there is no dataset here: .*{place}.*Upload the folder"):
        Dataset.open(place)


def test_wrong_credentials_are_distinguished_from_everything_else(place, tmp_path, monkeypatch):
    with object_storage(tmp_path / "guarded.log", INITIAL_NO_AUTH_ACTION_COUNT="0") as guarded:
        monkeypatch.setenv("AWS_ENDPOINT_URL", guarded.environment["AWS_ENDPOINT_URL"])
        with pytest.raises(InputError, match=r"refuses these credentials.*Check AWS_ACCESS_KEY_ID"):
            Dataset.open(place)


@pytest.mark.system
def test_a_storage_with_an_authority_of_its_own_is_trusted_by_name_only(tmp_path, monkeypatch):
    authority, key = certify(tmp_path, "storage")
    (tmp_path / "both.pem").write_bytes(key.read_bytes() + authority.read_bytes())
    place = S3Place("fleets", "east")
    with object_storage(tmp_path / "secure.log", certificate=tmp_path / "both.pem") as secure:
        for name, value in secure.environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InputError, match=r"certificate is not trusted .*AWS_CA_BUNDLE"):
            Dataset.open(place)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority))
        with pytest.raises(InputError, match="there is no bucket 'fleets'"):
            Dataset.open(place)


def test_a_server_that_says_nothing_is_given_up_after_bounded_attempts(monkeypatch):
    monkeypatch.setattr(files, "ATTEMPTS", 2)
    monkeypatch.setattr(files, "STALL_TIMEOUT_S", 1.0)
    taken = []
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def take() -> None:
            while True:
                try:
                    taken.append(silent.accept()[0])
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        for name, value in (KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}"}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InputError, match="does not answer, after 2 attempts"):
            Dataset.open(S3Place("fleets", "east"))
        silent.shutdown(socket.SHUT_RDWR)
    assert len(taken) == 2
    for connected in taken:
        connected.close()


@pytest.mark.system
@pytest.mark.parametrize("fault", ["busy", "lost", "cut"])
def test_requests_that_fail_now_and_then_are_sent_again(place, write, storage, monkeypatch, fault):
    here = write("fleet", 48)
    upload(storage, here.path, place.root)
    with proxy(storage) as (environment, requests):
        failed = []

        def every_fourth(number: int, method: str, path: str) -> str | None:
            if number % 4 == 2 and method != "HEAD":
                failed.append((method, path))
                return fault
            return None

        requests.fault = every_fourth
        monkeypatch.setenv("AWS_ENDPOINT_URL", environment["AWS_ENDPOINT_URL"])
        there = Dataset.open(place)
        assert there.events().equals(here.events())
        assert all(there.read_bucket(bucket).equals(here.read_bucket(bucket)) for bucket in here.buckets())
    assert {method for method, _ in failed} == {"GET"}
