"""What stands in a bucket: versions that never change, each with a manifest, and a pointer to the current one.

::

    PREFIX/current.json                         which version is current; the only object that is ever replaced
    PREFIX/versions/VERSION/manifest.json       size and SHA-256 of each file, written when all of them are there
    PREFIX/versions/VERSION/dataset.json …      the files of the dataset, as in its folder

A version is named by the SHA-256 of its manifest, so the same dataset has the same version wherever it is published,
and what lies under a version's name can be nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa
from pyarrow.fs import FileSelector, FileSystem, FileType

from telemetry.errors import InputError
from telemetry.object_store.connection import storage_errors
from telemetry.object_store.place import S3Place

POINTER: Final = "current.json"
MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
"""Of pointer and manifest."""

_VERSION_CHARACTERS: Final = 16


class DamagedError(InputError):
    """A pointer or a manifest that cannot be read; the next publication writes it anew."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What a manifest says about a file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a version."""

    files: Mapping[str, StoredFile]

    def encode(self) -> bytes:
        """Return the bytes of manifest.json: a function of the files alone."""
        files = {name: {"size": file.size, "sha256": file.sha256} for name, file in sorted(self.files.items())}
        return (json.dumps({"format": FORMAT, "files": files}, indent=1, ensure_ascii=False) + "\n").encode()

    @property
    def version(self) -> str:
        """The name of the version."""
        return version_of(self.encode())

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


def version_of(manifest: bytes) -> str:
    """Return the name of the version that has these bytes as its manifest."""
    return hashlib.sha256(manifest).hexdigest()[:_VERSION_CHARACTERS]


def is_inside(name: str) -> bool:
    """Whether a name leads to a file within a folder, and nowhere else, on any system."""
    return not any(part in ("", ".", "..") for part in name.split("/")) and not set(name) & set("\\:\0")


def read_object(storage: FileSystem, place: S3Place, key: str) -> bytes:
    """Read a small object whole.

    Raises ``FileNotFoundError`` if it is not there.
    Raises ``InputError`` if the storage cannot be read.
    """
    with storage_errors(place), storage.open_input_file(key) as stream:
        content: bytes = stream.read()
        return content


def write_object(storage: FileSystem, place: S3Place, key: str, content: bytes) -> None:
    """Write a small object; others see the old one or the new one, whole.

    Raises ``InputError`` if the storage cannot be written to.
    """
    with storage_errors(place), storage.open_output_stream(key) as stream:
        stream.write(content)


def sizes_under(storage: FileSystem, place: S3Place, prefix: str) -> dict[str, int]:
    """List the objects under a prefix: bytes of each, by its name after the prefix; empty where there are none.

    Raises ``InputError`` if the storage cannot be read.
    """
    with storage_errors(place):
        found = storage.get_file_info(FileSelector(prefix, allow_not_found=True, recursive=True))
    return {each.path.removeprefix(prefix + "/"): each.size for each in found if each.type == FileType.File}


def current_version(storage: FileSystem, place: S3Place) -> str | None:
    """Read which version is current; None where nothing was published.

    Raises ``InputError`` if there is no such bucket, the storage cannot be read, or a newer predrain wrote the pointer;
    as a :class:`DamagedError` if nobody can read it.
    """
    key = f"{place.root}/{POINTER}"
    try:
        content = read_object(storage, place, key)
    except FileNotFoundError:
        with storage_errors(place):
            if storage.get_file_info(place.bucket).type == FileType.NotFound:
                raise InputError(
                    f"there is no bucket {place.bucket!r}",
                    str(place),
                    "Check its name and AWS_ENDPOINT_URL, or make it.",
                ) from None
        return None
    version: str = _decoded(content, f"{place}/{POINTER}", "version")["version"]
    return version


def resolve(storage: FileSystem, place: S3Place) -> S3Place:
    """Find the version to read, once: whatever is published later, what is read is this version.

    Raises ``InputError`` if nothing was published at the place, or the storage cannot be read.
    """
    if place.version is not None:
        return place
    version = current_version(storage, place)
    if version is None:
        raise InputError(
            "no dataset was published here", str(place), f"Publish one: `predrain dataset push FOLDER {place}`."
        )
    return replace(place, version=version)


def read_manifest(storage: FileSystem, place: S3Place) -> Manifest:
    """Read the manifest of a version.

    Raises ``InputError`` if there is no such version, its manifest is damaged, or the storage cannot be read.
    """
    try:
        content = read_object(storage, place, f"{place.base}/{MANIFEST}")
    except FileNotFoundError:
        raise InputError(
            f"there is no version {place.version}",
            str(place),
            "It was removed, or never published whole: see `predrain dataset versions`.",
        ) from None
    if version_of(content) != place.version:
        raise DamagedError("the manifest is damaged", f"{place}/{MANIFEST}", "Publish the dataset again.")
    files = _decoded(content, f"{place}/{MANIFEST}", "files")["files"]
    for name in files:
        if not is_inside(name):  # the version vouches for the manifest's bytes, not for who wrote them
            raise InputError(
                f"the manifest names {name!r}, which is no file within a dataset",
                f"{place}/{MANIFEST}",
                "Nothing was read. Ask who may write to this prefix, and publish the dataset under another one.",
            )
    return Manifest({name: StoredFile(each["size"], each["sha256"]) for name, each in files.items()})


def write_pointer(storage: FileSystem, place: S3Place, version: str) -> None:
    """Make a version the current one.

    Raises ``InputError`` if the storage cannot be written to.
    """
    content = json.dumps({"format": FORMAT, "version": version}, indent=1) + "\n"
    write_object(storage, place, f"{place.root}/{POINTER}", content.encode())


def _decoded(content: bytes, where: str, holds: str) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads(content)
        form, _ = told["format"], told[holds]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"it is damaged: {error}", where, "Publish the dataset again.") from error
    if form != FORMAT:
        raise InputError(
            f"it has format {form}, this predrain reads {FORMAT}", where, "Use the version of predrain that wrote it."
        )
    return told


def open_object(storage: FileSystem, place: S3Place, name: str, file: StoredFile) -> pa.NativeFile:
    """Open a file of a version for reading at any position.

    Raises ``InputError`` if it is missing, or not as long as the manifest says.
    Raises ``OSError`` if the storage cannot be read; see :func:`telemetry.object_store.connection.storage_errors`.
    """
    try:
        stream = storage.open_input_file(f"{place.base}/{name}")
    except FileNotFoundError:
        raise InputError(
            "a file of the dataset is missing",
            f"{place}/{name}",
            "The version was removed while it was read, or is damaged: read the current one, or publish it again.",
        ) from None
    size = stream.size()
    if size != file.size:
        stream.close()
        raise InputError(
            f"a file of the dataset has {size} bytes, its manifest says {file.size}",
            f"{place}/{name}",
            "It is damaged: publish the dataset again, which sends such files anew.",
        )
    return stream
