"""A dataset in a bucket reads as one in a folder, and failures on the way are retried and reported."""

import json
import pickle
import socket
import threading
import time
from pathlib import Path

import pandas as pd
import pytest

from foundation.errors import InputError
from foundation.files import FolderSwap
from foundation.place import S3Place, place_of
from telemetry.dataset import files
from telemetry.dataset.files import connect
from telemetry.dataset.store import Dataset
from telemetry.staging.folder import staging_of
from tests.features.small_fleet import HOUR, T0
from tests.http_server import certify
from tests.object_storage import KEYS, object_storage, proxy, upload


def put(storage, place: S3Place, name: str, content: bytes) -> None:
    """Replace a file, and upload dataset.json again after it, as it must be."""
    meta = storage.direct.open_input_stream(f"{place.root}/dataset.json").read()
    files = {name: content} if name == "dataset.json" else {name: content, "dataset.json": meta}
    for path, made in files.items():
        with storage.direct.open_output_stream(f"{place.root}/{path}") as stream:
            stream.write(made)


@pytest.mark.parametrize(("run_days", "older"), [(1, False), (None, False), (None, True)])
def test_everything_that_a_dataset_says_it_says_from_storage_too(place, write, storage, run_days, older):
    here = write("fleet", 72, run_days=run_days)
    if older:
        meta = json.loads((here.path / "dataset.json").read_text())
        del meta["files"], meta["run_days"]
        (here.path / "dataset.json").write_text(json.dumps(meta))
        here = Dataset.open(here.path)
    upload(storage, here.path, place.root)
    there = Dataset.open(place)
    assert (there.digest, there.meta, there.buckets()) == (here.digest, here.meta, here.buckets())
    assert there.sample_files() == here.sample_files()
    for file in here.sample_files():
        assert there.day_digests(file) == here.day_digests(file)
    since = T0 + 30 * HOUR
    for bucket in here.buckets():
        assert there.runs_of(bucket) == here.runs_of(bucket)
        assert there.read_bucket(bucket).equals(here.read_bucket(bucket))
        columns = ["power_w", "timestamp"]
        assert there.read_bucket(bucket, columns, since=since).equals(here.read_bucket(bucket, columns, since=since))
        assert there.rows_in(bucket) == here.rows_in(bucket) == here.read_bucket(bucket).num_rows
        assert there.rows_in(bucket, since=since) == here.rows_in(bucket, since=since)
    pd.testing.assert_frame_equal(there.events(), here.events())
    pd.testing.assert_frame_equal(there.inventory(), here.inventory())
    assert there.jobs() is None


def test_storage_is_not_taken_for_a_folder_by_what_writes_datasets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for use in (FolderSwap, staging_of, Dataset.open):
        with pytest.raises(InputError, match="a local folder is required, not S3-compatible storage"):
            use(Path("s3://bucket/fleet"))
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_that_is_replaced_while_it_is_read_is_not_mixed_with_the_new_one(place, write, storage):
    first, second = write("first", 48), write("second", 40)
    upload(storage, first.path, place.root)
    reading = Dataset.open(place)
    upload(storage, second.path, place.root)
    with pytest.raises(InputError, match=r"replaced while it was read .*Run again"):
        reading.read_bucket(0)
    with pytest.raises(InputError, match="the dataset was replaced while it was read"):  # as a worker meets it
        Dataset.open(pickle.loads(pickle.dumps(reading.pinned)))
    assert Dataset.open(place).digest == second.digest
    storage.direct.delete_dir_contents(place.root)
    with pytest.raises(InputError, match="removed during the read"):
        reading.read_bucket(0)


def test_a_dataset_that_is_replaced_in_place_is_refused_until_its_json_is_there(place, write, storage):
    upload(storage, write("first", 48).path, place.root)
    time.sleep(1.1)  # storage counts whole seconds
    second = write("second", 40)
    name = Dataset.open(place).sample_files()[0].path
    with storage.direct.open_output_stream(f"{place.root}/{name}") as stream:
        stream.write((second.path / name).read_bytes())
    with pytest.raises(
        InputError, match=rf"files were uploaded after dataset\.json \(1, such as {name}\).*upload dataset\.json"
    ):
        Dataset.open(place)


def test_a_file_that_dataset_json_does_not_name_is_not_the_dataset_s(place, write, storage):
    upload(storage, write("fleet", 48).path, place.root)
    put(storage, place, "jobs.parquet", b"of the dataset that was here before")
    assert Dataset.open(place).jobs() is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("events.parquet", r"does not match dataset\.json .*events\.parquet"),
        ("dataset.json", r"dataset\.json is damaged.*east/dataset\.json"),
    ],
)
def test_a_file_that_is_not_the_dataset_s_own_is_named(place, write, storage, name, message):
    upload(storage, write("fleet", 48).path, place.root)
    put(storage, place, name, b"{")
    with pytest.raises(InputError, match=message):
        Dataset.open(place).events()


def test_a_replaced_file_of_the_same_length_is_detected_by_its_time(place, write, storage):
    here = write("fleet", 48)
    upload(storage, here.path, place.root)
    reading = Dataset.open(place)
    name = reading.sample_files()[0].path
    time.sleep(1.1)  # storage counts whole seconds
    with storage.direct.open_output_stream(f"{place.root}/{name}") as stream:
        stream.write((here.path / name).read_bytes())
    with pytest.raises(InputError, match=rf"replaced while it was read .*{name}"):
        reading.read_bucket(reading.buckets()[0])


def test_samples_that_are_damaged_are_named(place, write, storage):
    upload(storage, write("fleet", 48).path, place.root)
    name = Dataset.open(place).sample_files()[0].path
    put(storage, place, name, b"PAR1")
    with pytest.raises(InputError, match=rf"the file is damaged.*{name}.*Upload the complete dataset again"):
        Dataset.open(place).read_bucket(0)


def test_an_upload_that_is_not_whole_is_refused(place, write, storage):
    here = write("fleet", 48)
    upload(storage, here.path, place.root)
    name = here.sample_files()[0].path
    storage.direct.delete_file(f"{place.root}/{name}")
    with pytest.raises(InputError, match=rf"files are missing \(1, such as {name}\).*Upload"):
        Dataset.open(place)


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
        ("gs://fleets/east", "'gs://fleets/east' is neither a folder nor an S3 address"),
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
    with pytest.raises(InputError, match=r"there is no bucket 'no-such-bucket' .*AWS_ENDPOINT_URL, or create it"):
        Dataset.open(S3Place("no-such-bucket", "east"))
    with pytest.raises(InputError, match=f"there is no dataset here: .*{place}.*Upload the folder"):
        Dataset.open(place)


def test_wrong_credentials_are_distinguished_from_everything_else(place, tmp_path, monkeypatch):
    with object_storage(tmp_path / "guarded.log", INITIAL_NO_AUTH_ACTION_COUNT="0") as guarded:
        monkeypatch.setenv("AWS_ENDPOINT_URL", guarded.environment["AWS_ENDPOINT_URL"])
        with pytest.raises(InputError, match=r"rejects these credentials.*Check AWS_ACCESS_KEY_ID"):
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
        with pytest.raises(InputError, match="does not respond, after 2 attempts"):
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
