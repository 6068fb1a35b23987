"""A published dataset reads as the one in the folder does, and as one state of it whatever is published meanwhile."""

from __future__ import annotations

import hashlib
import json
import pickle
from datetime import timedelta
from pathlib import Path

import pandas as pd
import pytest

from features.config import DecisionSection, LabelSection
from features.matrix.building import build_matrix
from features.matrix.matrix import FeatureMatrix
from telemetry.atomic import FolderSwap
from telemetry.dataset.store import Dataset
from telemetry.errors import InputError
from telemetry.landing.folder import landing_of
from telemetry.object_store.connection import connect
from telemetry.object_store.place import place_of
from telemetry.object_store.published import Manifest, StoredFile, write_object, write_pointer
from telemetry.object_store.pull import pull
from telemetry.object_store.push import push
from telemetry.object_store.versions import prune
from tests.features.small_fleet import HOUR, SMALL, T0, Training, make_matrix


def content(matrix: FeatureMatrix) -> dict[str, bytes]:
    return tree(matrix.path)


def tree(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("run_days", [1, None])
def test_everything_that_a_dataset_says_it_says_from_storage_too(place, write, run_days):
    here = write("fleet", 72, run_days=run_days)
    push(here.path, place)
    there = Dataset.open(place)
    assert (there.digest, there.meta, there.buckets()) == (here.digest, here.meta, here.buckets())
    assert there.sample_files() == here.sample_files()
    assert [there.day_digests(each) for each in there.sample_files()] == [
        here.day_digests(each) for each in here.sample_files()
    ]
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


@pytest.mark.parametrize("run_days", [1, None])
def test_features_from_storage_are_those_from_the_folder_byte_for_byte(place, write, tmp_path, run_days):
    here = write("fleet", 72, run_days=run_days)
    push(here.path, place)
    ours = make_matrix(here, tmp_path / "here")
    theirs = make_matrix(Dataset.open(place), tmp_path / "there")
    assert theirs.digest == ours.digest
    assert content(theirs) == content(ours)


def test_a_dataset_of_an_older_version_is_published_and_read(place, write):
    path = write("fleet", 48, run_days=None).path
    said = json.loads((path / "dataset.json").read_text())
    del said["files"], said["run_days"]
    (path / "dataset.json").write_text(json.dumps(said))
    here = Dataset.open(path)
    push(path, place)
    there = Dataset.open(place)
    assert there.sample_files() == here.sample_files()
    assert all(there.read_bucket(bucket).equals(here.read_bucket(bucket)) for bucket in here.buckets())


def test_a_matrix_is_extended_from_storage_as_from_the_folder(place, write, tmp_path):
    push(write("short", 72).path, place)
    training = Training(3, 4)
    before = make_matrix(Dataset.open(place), tmp_path / "matrix", training=training)
    longer = write("long", 96)
    push(longer.path, place)
    extended = make_matrix(Dataset.open(place), tmp_path / "matrix", training=training)
    assert extended.meta.counts["rows"] > before.meta.counts["rows"]
    assert content(extended) == content(make_matrix(longer, tmp_path / "anew", training=training))


def test_a_dataset_that_is_published_while_another_is_read_is_not_mixed_with_it(place, write, tmp_path):
    first, second = write("first", 72), write("second", 96)
    push(first.path, place)
    reading = Dataset.open(place)
    reading.read_bucket(0)
    push(second.path, place)
    assert reading.read_bucket(1).equals(first.read_bucket(1))
    assert reading.events().equals(first.events())
    assert Dataset.open(place).digest == second.digest


def test_a_matrix_is_of_the_dataset_that_it_began_with(place, write, tmp_path):
    first, second = write("first", 72), write("second", 96)
    push(first.path, place)
    published = []

    def publish_amid(done: int, total: int) -> None:
        if done and not published:
            assert done < total
            published.append(push(second.path, place))

    matrix = build_matrix(
        Dataset.open(place),
        tmp_path / "there",
        decision=DecisionSection(every=3 * HOUR),
        labels=LabelSection(horizon=6 * HOUR),
        features=SMALL,
        training=Training(),
        seed=5,
        progress=publish_amid,
    )
    assert published
    assert content(matrix) == content(make_matrix(first, tmp_path / "here"))


def test_another_process_is_sent_to_the_version_that_this_one_reads(place, write):
    first, second = write("first", 48), write("second", 72)
    push(first.path, place)
    sent = pickle.dumps(Dataset.open(place).pinned)
    push(second.path, place)
    assert Dataset.open(pickle.loads(sent)).digest == first.digest


def test_what_is_read_is_named_by_its_version_and_the_name_can_be_given(place, write):
    push(write("first", 48).path, place)
    named = str(Dataset.open(place).place)
    push(write("second", 72).path, place)
    assert Dataset.open(place_of(named)).meta.span[1] == T0 + timedelta(hours=48)


def test_reading_a_version_that_was_removed_meanwhile_says_so(place, write):
    push(write("first", 48).path, place)
    reading = Dataset.open(place)
    push(write("second", 72).path, place)
    prune(place, keep=1, now=T0)
    with pytest.raises(InputError, match=r"a file of the dataset is missing .* removed while it was read"):
        reading.read_bucket(0)
    with pytest.raises(InputError, match=r"there is no version .* removed, or never published whole"):
        Dataset.open(reading.pinned)


def test_a_truncated_object_is_named(place, write, storage):
    push(write("fleet", 48).path, place)
    reading = Dataset.open(place)
    name = reading.sample_files()[0].path
    key = f"{reading.place.base}/{name}"
    whole = storage.direct.open_input_file(key).read()
    with storage.direct.open_output_stream(key) as stream:
        stream.write(whole[: len(whole) // 2])
    with pytest.raises(
        InputError, match=f"has {len(whole) // 2} bytes, its manifest says {len(whole)} .*{name}.*publish the dataset"
    ):
        reading.read_bucket(reading.buckets()[0])


@pytest.mark.parametrize("name", ["current.json", "manifest.json", "dataset.json"])
def test_a_damaged_description_is_named(place, write, storage, name):
    push(write("fleet", 48).path, place)
    version = Dataset.open(place).place
    key = f"{place.root}/{name}" if name == "current.json" else f"{version.base}/{name}"
    whole = storage.direct.open_input_file(key).read()
    with storage.direct.open_output_stream(key) as stream:
        stream.write(whole[:20])
    with pytest.raises(InputError, match=name):
        Dataset.open(place)


def test_a_dataset_that_is_fetched_is_the_one_that_was_published(place, write, tmp_path):
    published = write("fleet", 72)
    (published.path / "quarantine").mkdir()
    (published.path / "quarantine" / "rows.parquet").write_bytes(b"set aside")
    push(published.path, place)
    pull(place, tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(published.path)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_fetching_takes_nothing_that_is_not_what_was_published(place, write, storage, tmp_path):
    push(write("first", 48).path, place)
    pull(place, tmp_path / "copy")
    before = tree(tmp_path / "copy")
    push(write("second", 72).path, place)
    key = f"{Dataset.open(place).place.base}/events.parquet"
    whole = storage.direct.open_input_file(key).read()
    with storage.direct.open_output_stream(key) as stream:
        stream.write(whole[:-1] + b"?")
    with pytest.raises(InputError, match=r"not what was published .*events\.parquet"):
        pull(place, tmp_path / "copy")
    assert tree(tmp_path / "copy") == before


def test_fetching_refuses_a_folder_that_holds_something_else(place, write, tmp_path):
    push(write("fleet", 48).path, place)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("precious")
    with pytest.raises(InputError, match="exists and is no dataset"):
        pull(place, tmp_path / "home")
    assert tree(tmp_path / "home") == {"thesis.txt": b"precious"}


def test_storage_is_not_taken_for_a_folder_by_what_writes_datasets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for use in (FolderSwap, landing_of, Dataset.open):
        with pytest.raises(InputError, match="this needs a folder and not S3-compatible storage"):
            use(Path("s3://bucket/fleet"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../../escaped", "/etc/escaped", "a//b", "./a", "a\\\\b", "c:a", ""])
def test_a_manifest_that_leads_out_of_the_folder_is_not_followed(place, write, storage, tmp_path, name):
    pushed = push(write("fleet", 48).path, place)
    with storage.direct.open_input_file(f"{pushed.place.base}/dataset.json") as stream:
        content = stream.read()
    evil = Manifest({name: StoredFile(len(content), hashlib.sha256(content).hexdigest())})
    with storage.direct.open_output_stream(f"{place.root}/versions/{evil.version}/manifest.json") as stream:
        stream.write(evil.encode())
    write_pointer(storage.direct, place, evil.version)
    home = tmp_path / "home" / "deep"
    home.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match="is no file within a dataset"):
        pull(place, home / "fetched")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_version_that_cannot_be_read_here_replaces_nothing(place, write, tmp_path):
    good, newer = write("good", 48), write("newer", 72)
    push(good.path, place)
    pull(place, tmp_path / "fetched")
    description = newer.path / "dataset.json"
    description.write_text(description.read_text().replace('"schema_version": 3', '"schema_version": 99'))
    files = {
        path.relative_to(newer.path).as_posix(): StoredFile(
            path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
        )
        for path in newer.path.rglob("*")
        if path.is_file()
    }
    manifest, storage = Manifest(files), connect()
    for name in files:
        write_object(
            storage, place, f"{place.root}/versions/{manifest.version}/{name}", (newer.path / name).read_bytes()
        )
    write_object(storage, place, f"{place.root}/versions/{manifest.version}/manifest.json", manifest.encode())
    write_pointer(storage, place, manifest.version)
    with pytest.raises(InputError, match="99"):
        pull(place, tmp_path / "fetched")
    assert Dataset.open(tmp_path / "fetched").digest == good.digest
