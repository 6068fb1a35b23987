"""Publishing a dataset on S3-compatible storage: all files under a version of their own, then the pointer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from pyarrow.fs import S3FileSystem

from telemetry.dataset.dataset import Dataset
from telemetry.dataset.files import sha256_of
from telemetry.dataset.meta import META_NAME
from telemetry.errors import InputError
from telemetry.object_store.connection import connect, storage_errors
from telemetry.object_store.place import S3Place
from telemetry.object_store.published import (
    MANIFEST,
    DamagedError,
    Manifest,
    StoredFile,
    current_version,
    read_manifest,
    read_object,
    sizes_under,
    write_object,
    write_pointer,
)

_AT_ONCE: Final = 8
_CHUNK: Final = 8 << 20


@dataclass(slots=True)
class Pushed:
    """What a publication did.

    ``sent``, ``copied``, ``there``: files that were sent, that the storage copied from the version before, and that
    were there already.
    """

    place: S3Place
    size: int
    sent: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    there: list[str] = field(default_factory=list)


def push(folder: Path, place: S3Place, *, progress: Callable[[int, int], None] | None = None) -> Pushed:
    """Publish the dataset in a folder; readers have the version before until all of it is there.

    ``folder``: may be replaced by another run meanwhile: what is published is the state that was found.
    ``progress``: called with the bytes that are there and those of all files.
    Raises ``InputError`` if there is no dataset, a file of it is damaged, or the storage cannot be written to. What was
    published before stays current; what was sent is kept for the next attempt.
    """
    dataset = Dataset.open(folder)
    manifest = manifest_of(dataset)
    pinned = replace(place, version=manifest.version)
    storage = connect()
    try:
        current = current_version(storage, place)
    except DamagedError:
        current = None
    sender = _Sender(dataset.root, storage, pinned, manifest, _copyable(storage, place, current, manifest))
    pushed = sender.send(progress or _silent)
    found = sizes_under(storage, pinned, pinned.base)
    wrong = [name for name, file in manifest.files.items() if found.get(name) != file.size]
    if wrong:
        raise InputError(
            f"of a file just sent the storage has {found.get(wrong[0], 0)} of {manifest.files[wrong[0]].size} bytes",
            f"{pinned}/{wrong[0]}",
            "Run again: what did arrive is not sent again.",
        )
    encoded = manifest.encode()
    if found.get(MANIFEST) != len(encoded) or read_object(storage, pinned, f"{pinned.base}/{MANIFEST}") != encoded:
        write_object(storage, pinned, f"{pinned.base}/{MANIFEST}", encoded)
    if current != pinned.version:
        write_pointer(storage, place, manifest.version)
    return pushed


def manifest_of(dataset: Dataset) -> Manifest:
    """List the files of a dataset in a folder, and hold them against what it says about them.

    Raises ``InputError`` if a file is damaged or missing.
    """
    root = dataset.root
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    if dataset.meta.files:  # else an older version wrote it, which did not list what belongs to it
        own = {META_NAME, *dataset.meta.files}
        names = [name for name in names if name in own or name.startswith("quarantine/")]  # rows that were set aside
    elif MANIFEST in names:
        raise InputError(
            f"a file is named {MANIFEST}, as that of a publication is",
            f"{dataset.place}/{MANIFEST}",
            "It is not the dataset's: move it away.",
        )
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        digests = list(pool.map(lambda name: sha256_of(root / name), names))
    files = {
        name: StoredFile((root / name).stat().st_size, digest) for name, digest in zip(names, digests, strict=True)
    }
    for name, said in dataset.meta.files.items():
        if name not in files or files[name].sha256 != said:
            what = "is missing" if name not in files else "is not what dataset.json says"
            raise InputError(
                f"a file of the dataset {what}", f"{dataset.place}/{name}", "It is damaged: import its sources again."
            )
    return Manifest(files)


def _copyable(storage: S3FileSystem, place: S3Place, current: str | None, manifest: Manifest) -> dict[str, str]:
    """Find files of the current version that the new one has too: their keys, by SHA-256."""
    if current is None or current == manifest.version:
        return {}
    before = replace(place, version=current)
    there = sizes_under(storage, before, before.base)
    if MANIFEST not in there:  # somebody removed it: then all is sent
        return {}
    try:
        files = read_manifest(storage, before).files
    except DamagedError:
        return {}
    return {file.sha256: f"{before.base}/{name}" for name, file in files.items() if there.get(name) == file.size}


class _Sender:
    """Brings each file of a manifest to its key."""

    def __init__(
        self, root: Path, storage: S3FileSystem, place: S3Place, manifest: Manifest, copyable: dict[str, str]
    ) -> None:
        self._root, self._storage, self._place, self._manifest = root, storage, place, manifest
        self._copyable = copyable

    def send(self, progress: Callable[[int, int], None]) -> Pushed:
        pushed = Pushed(self._place, self._manifest.size)
        there = sizes_under(self._storage, self._place, self._place.base)
        done = 0
        wanted = []
        for name, file in self._manifest.files.items():
            # dataset.json is small, and what it says is believed: it is read back
            if there.get(name) == file.size and (name != META_NAME or self._is_whole(name)):
                pushed.there.append(name)
                done += file.size
            else:
                wanted.append(name)
        progress(done, pushed.size)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            try:
                for name, copied in zip(wanted, pool.map(self._bring, wanted), strict=True):
                    (pushed.copied if copied else pushed.sent).append(name)
                    done += self._manifest.files[name].size
                    progress(done, pushed.size)
            except BaseException:
                pool.shutdown(cancel_futures=True)  # what has not begun would only prolong the end
                raise
        return pushed

    def _is_whole(self, name: str) -> bool:
        content = read_object(self._storage, self._place, f"{self._place.base}/{name}")
        return hashlib.sha256(content).hexdigest() == self._manifest.files[name].sha256

    def _bring(self, name: str) -> bool:
        """Bring a file to its key; returns whether the storage copied it."""
        key = f"{self._place.base}/{name}"
        source = None if name == META_NAME else self._copyable.get(self._manifest.files[name].sha256)
        if source is not None:
            with storage_errors(self._place, name):
                self._storage.copy_file(source, key)
            return True
        # If this ends by an error, pyarrow completes the object as it is then. Nothing refers to it yet, and as it is
        # shorter than the file, the next attempt sends it anew.
        with (
            (self._root / name).open("rb") as file,
            storage_errors(self._place, name),
            self._storage.open_output_stream(key) as stream,
        ):
            while chunk := file.read(_CHUNK):
                stream.write(chunk)
        return False


def _silent(done: int, total: int) -> None:
    """Report nothing."""
