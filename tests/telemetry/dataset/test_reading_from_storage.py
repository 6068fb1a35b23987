"""A dataset in a bucket reads as the one in the folder does, and never as two states of it."""

import json
import pickle
import time
from pathlib import Path

import pandas as pd
import pytest

from foundation.errors import InputError
from foundation.files import FolderSwap
from foundation.place import S3Place
from telemetry.dataset.store import Dataset
from telemetry.landing.folder import landing_of
from tests.features.small_fleet import HOUR, T0
from tests.object_storage import upload


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
    for use in (FolderSwap, landing_of, Dataset.open):
        with pytest.raises(InputError, match="this needs a folder and not S3-compatible storage"):
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
    with pytest.raises(InputError, match="removed while it was read"):
        reading.read_bucket(0)


def test_a_dataset_that_is_replaced_in_place_is_refused_until_its_json_is_there(place, write, storage):
    upload(storage, write("first", 48).path, place.root)
    time.sleep(1.1)  # storage counts whole seconds
    second = write("second", 40)
    name = Dataset.open(place).sample_files()[0].path
    with storage.direct.open_output_stream(f"{place.root}/{name}") as stream:
        stream.write((second.path / name).read_bytes())
    with pytest.raises(InputError, match=rf"{name} was uploaded after dataset\.json, one of 1 .*upload dataset\.json"):
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
    with pytest.raises(InputError, match=rf"the file is damaged.*{name}.*Upload the whole dataset again"):
        Dataset.open(place).read_bucket(0)


def test_an_upload_that_is_not_whole_is_refused(place, write, storage):
    here = write("fleet", 48)
    upload(storage, here.path, place.root)
    name = here.sample_files()[0].path
    storage.direct.delete_file(f"{place.root}/{name}")
    with pytest.raises(InputError, match=rf"{name} is missing, one of 1 .*Upload"):
        Dataset.open(place)
