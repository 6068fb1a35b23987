"""Publishing: nothing is seen before it is whole, nothing is sent twice, and only who asks removes anything."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyarrow.fs import FileSelector, FileType

import telemetry.object_store.push as pushing
from telemetry.dataset.store import Dataset
from telemetry.errors import InputError
from telemetry.object_store.place import S3Place
from telemetry.object_store.push import push
from telemetry.object_store.versions import UNFINISHED_KEPT, prune, versions_at
from tests.killed import die_at, exit_code_of
from tests.object_storage import Storage, proxy

MOST_CALLS = 40


def objects(storage: Storage, place: S3Place) -> dict[str, int]:
    found = storage.direct.get_file_info(FileSelector(place.root, recursive=True, allow_not_found=True))
    return {each.path.removeprefix(place.root + "/"): each.size for each in found if each.type == FileType.File}


def publish_and_die(folder: Path, place: S3Place, at: int, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    die_at(at, [(pushing._Sender, "_bring"), (pushing, "write_object"), (pushing, "write_pointer")])
    pushing._AT_ONCE = 1
    push(folder, place)
    os._exit(0)


def test_a_publication_is_the_files_of_the_folder_a_manifest_and_a_pointer(place, write, storage):
    dataset = write("fleet", 48)
    pushed = push(dataset.path, place)
    version = pushed.place.version
    files = {path.relative_to(dataset.path).as_posix(): path for path in dataset.path.rglob("*") if path.is_file()}
    assert sorted(pushed.sent) == sorted(files)
    found = objects(storage, place)
    expected = {f"versions/{version}/{name}" for name in [*files, "manifest.json"]} | {"current.json"}
    assert set(found) == expected
    for name, path in files.items():
        with storage.direct.open_input_file(f"{pushed.place.base}/{name}") as stream:
            assert stream.read() == path.read_bytes()


def test_the_same_dataset_is_the_same_version_and_nothing_is_sent_again(place, write, storage, monkeypatch):
    dataset = write("fleet", 48)
    first = push(dataset.path, place)
    with proxy(storage) as (environment, requests):
        monkeypatch.setenv("AWS_ENDPOINT_URL", environment["AWS_ENDPOINT_URL"])
        again = push(dataset.path, place)
    assert again.place == first.place
    assert (again.sent, again.copied) == ([], [])
    assert sorted(again.there) == sorted(first.sent)
    assert {method for method, _ in requests.seen} <= {"GET", "HEAD"}


def test_what_the_version_before_has_is_copied_by_the_storage_and_not_sent(place, write):
    before, after = write("before", 72), write("after", 96)
    push(before.path, place)
    pushed = push(after.path, place)
    same = {name for name, digest in after.meta.files.items() if digest in before.meta.files.values()}
    assert {name for name in same if name.startswith("telemetry/")}
    assert set(pushed.copied) == same
    assert set(pushed.sent) == ({*after.meta.files, "dataset.json"} - same)
    there = Dataset.open(place)
    assert all(there.read_bucket(bucket).equals(after.read_bucket(bucket)) for bucket in after.buckets())


def test_a_publication_killed_anywhere_leaves_the_version_before_and_goes_on_where_it_was(place, write, storage):
    before, after = write("before", 48), write("after", 72)
    push(before.path, place)
    arrived = 0
    for at in range(1, MOST_CALLS):
        code = exit_code_of(publish_and_die, after.path, place, at, storage.environment)
        if code == 0:
            break
        assert code == 9
        assert Dataset.open(place).digest == before.digest
        whole = [version for version in versions_at(place) if version.whole and not version.current]
        there = next((each.files for each in versions_at(place) if not each.current), 0)
        assert there >= arrived or whole
        arrived = there
    assert code == 0
    assert at > 2
    assert Dataset.open(place).digest == after.digest


def test_a_resumed_publication_sends_only_what_is_missing_or_was_cut(place, write, storage):
    dataset = write("fleet", 48)
    assert exit_code_of(publish_and_die, dataset.path, place, 4, storage.environment) == 9
    with pytest.raises(InputError, match=r"no dataset was published here .*predrain dataset push FOLDER"):
        Dataset.open(place)
    (left,) = versions_at(place)
    assert (left.whole, left.current, left.files) == (False, False, 3)
    names = sorted(name.removeprefix(f"versions/{left.name}/") for name in objects(storage, place))
    with storage.direct.open_output_stream(f"{place.root}/versions/{left.name}/{names[0]}") as stream:
        stream.write(b"cut")
    pushed = push(dataset.path, place)
    assert sorted(pushed.there) == names[1:]
    assert names[0] in pushed.sent
    there = Dataset.open(place)
    assert there.events().equals(dataset.events())
    assert all(there.read_bucket(bucket).equals(dataset.read_bucket(bucket)) for bucket in dataset.buckets())


def test_publishing_again_repairs_a_published_file_that_was_cut(place, write, storage):
    dataset = write("fleet", 48)
    pushed = push(dataset.path, place)
    name = dataset.sample_files()[0].path
    with storage.direct.open_output_stream(f"{pushed.place.base}/{name}") as stream:
        stream.write(b"cut")
    assert push(dataset.path, place).sent == [name]
    assert Dataset.open(place).read_bucket(0).equals(dataset.read_bucket(0))


@pytest.mark.parametrize("name", ["current.json", "manifest.json"])
@pytest.mark.parametrize("hours", [48, 72])
def test_publishing_repairs_a_damaged_pointer_or_manifest(place, write, storage, name, hours):
    pushed = push(write("fleet", 48).path, place)
    key = f"{place.root}/{name}" if name == "current.json" else f"{pushed.place.base}/{name}"
    with storage.direct.open_output_stream(key) as stream:
        stream.write(b"{")
    dataset = write("next", hours)
    push(dataset.path, place)
    assert Dataset.open(place).digest == dataset.digest


def test_a_damaged_dataset_is_not_published(place, write, storage):
    dataset = write("fleet", 48)
    name = dataset.sample_files()[0].path
    (dataset.path / name).write_bytes(b"damaged")
    with pytest.raises(InputError, match=f"a file of the dataset is not what dataset.json says .*{name}"):
        push(dataset.path, place)
    assert objects(storage, place) == {}


def test_old_versions_stay_until_somebody_asks(place, write):
    versions = []
    for hours in (24, 48, 72):
        versions.append(push(write(f"fleet{hours}", hours).path, place).place.version)
        time.sleep(1.1)  # the storage tells when an object came in whole seconds
    push(Path(write("again", 48).path), place)  # the second one is current again
    told = {each.name: each for each in versions_at(place)}
    assert set(told) == set(versions)
    assert [name for name, each in told.items() if each.current] == [versions[1]]
    removed = prune(place, keep=2, now=datetime.now(UTC))
    assert [each.name for each in removed] == [versions[0]]
    assert {each.name for each in versions_at(place)} == {versions[1], versions[2]}
    prune(place, keep=1, now=datetime.now(UTC))
    assert [each.name for each in versions_at(place)] == [versions[1]]
    assert Dataset.open(place).meta.span[1] == Dataset.open(place).meta.span[0] + timedelta(hours=48)


def test_what_a_killed_publication_left_is_removed_a_day_later_and_not_before(place, write, storage):
    push(write("before", 48).path, place)
    assert exit_code_of(publish_and_die, write("after", 72).path, place, 4, storage.environment) == 9
    assert prune(place, keep=1, now=datetime.now(UTC)) == []
    (removed,) = prune(place, keep=1, now=datetime.now(UTC) + UNFINISHED_KEPT)
    assert not removed.whole
    assert [each.current for each in versions_at(place)] == [True]
    assert all(name.startswith(("versions/", "current.json")) for name in objects(storage, place))


def test_nothing_is_removed_where_the_current_version_is_not_known(place, write, storage):
    push(write("fleet", 48).path, place)
    storage.direct.delete_file(f"{place.root}/current.json")
    with pytest.raises(InputError, match=r"which version is current is not known .*nothing was removed"):
        prune(place, keep=1, now=datetime.now(UTC))
    assert len(versions_at(place)) == 1


@pytest.mark.parametrize("name", ["manifest.json", "dataset.json"])
def test_publishing_again_repairs_what_was_changed_without_a_change_of_length(place, write, storage, name):
    dataset = write("fleet", 48)
    pushed = push(dataset.path, place)
    key = f"{pushed.place.base}/{name}"
    with storage.direct.open_input_file(key) as stream:
        content = stream.read()
    with storage.direct.open_output_stream(key) as stream:
        stream.write(content.replace(b"a", b"b", 1))
    with pytest.raises(InputError):
        Dataset.open(place)
    push(dataset.path, place)
    assert Dataset.open(place).digest == dataset.digest
    with storage.direct.open_input_file(key) as stream:
        assert stream.read() == content


def test_only_what_belongs_to_the_dataset_is_published(place, write, tmp_path):
    dataset = write("fleet", 48)
    version = push(dataset.path, place).place.version
    (dataset.path / "manifest.json").write_text("{}")
    (dataset.path / "notes").mkdir()
    (dataset.path / "notes" / "mine.txt").write_text("mine")
    pushed = push(dataset.path, place)
    assert pushed.place.version == version
    assert pushed.sent == []
