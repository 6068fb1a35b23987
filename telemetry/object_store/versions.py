"""The versions of a published dataset: which there are, and removing old ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from pyarrow.fs import FileInfo, FileSelector, FileType

from telemetry.errors import InputError
from telemetry.object_store.connection import connect, storage_errors
from telemetry.object_store.place import VERSIONS, S3Place
from telemetry.object_store.published import MANIFEST, current_version

UNFINISHED_KEPT: Final = timedelta(days=1)
"""A version without a manifest may be on its way: it is left alone for so long after its newest object."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version as it lies in the bucket.

    ``at``: when it was published; of one that is not whole, when its newest object came. By the storage's clock, aware.
    ``files``, ``size``: objects and their bytes.
    """

    name: str
    at: datetime
    files: int
    size: int
    whole: bool
    current: bool


def versions_at(place: S3Place) -> list[Version]:
    """List the versions at a place, the newest first; none where nothing was published.

    Raises ``InputError`` if the storage cannot be read.
    """
    storage = connect()
    current = current_version(storage, place)
    base = f"{place.root}/{VERSIONS}"
    with storage_errors(place):
        found = storage.get_file_info(FileSelector(base, allow_not_found=True, recursive=True))
    by_name: dict[str, list[FileInfo]] = {}
    for each in found:
        if each.type == FileType.File:
            by_name.setdefault(each.path.removeprefix(f"{base}/").partition("/")[0], []).append(each)
    versions = []
    for name, objects in by_name.items():
        manifests = [each for each in objects if each.path == f"{base}/{name}/{MANIFEST}"]
        at = max(each.mtime for each in manifests or objects)
        size = sum(each.size for each in objects)
        versions.append(Version(name, at, len(objects), size, bool(manifests), name == current))
    return sorted(versions, key=lambda version: (version.at, version.name), reverse=True)


def prune(place: S3Place, *, keep: int, now: datetime) -> list[Version]:
    """Remove old versions, and what killed publications left.

    Whoever reads a version that is removed gets an error that says so.

    ``keep``: how many whole versions stay, at least 1: the current one, and the newest of the others.
    Raises ``InputError`` if nothing was published, or the storage cannot be read or written to.
    """
    if keep < 1:
        raise InputError(f"{keep} versions are to be kept", "--keep", "Keep 1 at least: the current one always stays.")
    versions = versions_at(place)
    if not any(version.current for version in versions):
        raise InputError(
            "which version is current is not known", str(place), "Publish the dataset first; nothing was removed."
        )
    others = [version for version in versions if version.whole and not version.current]
    old = others[keep - 1 :]
    left = [version for version in versions if not version.whole and not version.current]
    removed = [*old, *(version for version in left if now - version.at > UNFINISHED_KEPT)]
    storage = connect()
    for version in removed:
        base = replace(place, version=version.name).base
        with storage_errors(place, f"{VERSIONS}/{version.name}"):
            if version.whole:
                storage.delete_file(f"{base}/{MANIFEST}")  # first, so that what a kill leaves is not taken for whole
            storage.delete_dir(base)
    return removed
