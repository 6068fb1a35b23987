"""Fetching a published dataset into a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from telemetry.atomic import FolderSwap, disk_errors, fsync_path
from telemetry.dataset.dataset import Dataset
from telemetry.dataset.files import StoredFiles
from telemetry.dataset.meta import META_NAME
from telemetry.errors import InputError
from telemetry.object_store.place import S3Place

_AT_ONCE: Final = 8
_CHUNK: Final = 8 << 20


def pull(place: S3Place, folder: Path, *, progress: Callable[[int, int], None] | None = None) -> S3Place:
    """Fetch a version into a folder, which it replaces in one step; every byte is held against the manifest.

    ``place``: its version, or without one the current version.
    ``progress``: called with the bytes fetched and those of all files.
    Raises ``InputError`` if ``folder`` holds something else, there is no such version, a file is not what was
    published, the storage cannot be read, or the disk is full. What was in the folder is unchanged.
    """
    if folder.exists() and not (folder / META_NAME).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"{folder} exists and is no dataset", "FOLDER", "Choose another folder, or remove what is there yourself."
        )
    stored = StoredFiles.find(place)
    with FolderSwap(folder) as swap, disk_errors(folder):

        def fetch(name: str) -> int:
            target = swap.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            total = hashlib.sha256()
            with target.open("wb") as file, stored.opened(name) as stream:
                while chunk := stream.read(_CHUNK):
                    total.update(chunk)
                    file.write(chunk)
            if total.hexdigest() != stored.sha256_of(name):
                raise InputError(
                    "a file is not what was published",
                    f"{stored.place}/{name}",
                    "It is damaged: publish the dataset again under another prefix.",
                )
            fsync_path(target)
            return target.stat().st_size

        done = 0
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            try:
                for size in pool.map(fetch, stored.manifest.files):
                    done += size
                    if progress is not None:
                        progress(done, stored.manifest.size)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for path in sorted(each for each in swap.path.rglob("*") if each.is_dir()):
            fsync_path(path)
        Dataset.open(swap.path, lease=False)  # what this version of predrain cannot read replaces nothing
        swap.commit()
    return stored.place
