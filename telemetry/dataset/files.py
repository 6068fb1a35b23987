"""The files of a dataset that is open for reading: in a folder, or on S3-compatible storage."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import pyarrow as pa
from pyarrow.fs import FileSystem

from telemetry.atomic import ReadLease
from telemetry.errors import InputError
from telemetry.object_store.connection import connect, storage_errors
from telemetry.object_store.place import S3Place
from telemetry.object_store.published import Manifest, open_object, read_manifest, resolve

_OF_CONTENT = re.compile(r"parquet|thrift|corrupt|decompress|deserializ|end of stream|page header", re.IGNORECASE)
"""In what Arrow raises as an OSError without a number, this is about the bytes of a file and not about reaching it."""


@contextmanager
def damage_told(where: object, do: str) -> Iterator[None]:
    """Turn what is raised for a file that was cut off or overwritten into an InputError.

    ``do``: what its reader can do, such as "Import the sources of the dataset again."
    Raises ``InputError`` for content that is no Parquet, ends too early, has other columns, or text that is none. What
    the operating system or a storage says (a file that is not there, a disk that fails) passes through.
    """
    try:
        yield
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise _damaged(error, where, do) from error
    except KeyError as error:
        raise InputError(f"the file is damaged: it has no column {error}", str(where), do) from error
    except OSError as error:
        if error.errno is not None or not _OF_CONTENT.search(str(error)):
            raise
        raise _damaged(error, where, do) from error


def _damaged(error: Exception, where: object, do: str) -> InputError:
    said = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return InputError(f"the file is damaged: {said}", str(where), do)


PUBLISH_AGAIN = "What was published is damaged: publish the dataset again."
IMPORT_AGAIN = "The dataset is damaged: restore the file, or import or collect its sources again."


class DatasetFiles(Protocol):
    """Gives the files of one state of a dataset, whatever takes its place meanwhile."""

    @property
    def far(self) -> bool:
        """Whether each read is a request, so that what is wanted of a file should be asked for at once."""

    def opened(self, name: str) -> AbstractContextManager[pa.NativeFile]:
        """Open a file by its name in the dataset, for reading at any position.

        Raises ``FileNotFoundError`` if a folder has no such file.
        Raises ``InputError``: while the file is open, too: if what is read of it as Parquet is none, or storage has it
        not as it was published, or cannot be read.
        """

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""

    def parts_in(self, folder: str) -> list[str]:
        """Return the names of the part files in a folder of the dataset, in their order."""

    def sha256_of(self, name: str) -> str:
        """Return the SHA-256 of a file's bytes as hexadecimal text."""


class FolderFiles:
    """The files in a folder."""

    far = False

    def __init__(self, folder: Path, lease: ReadLease | None = None) -> None:
        self._lease = lease
        self._folder = folder
        self.root = folder if lease is None else lease.path

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[pa.NativeFile]:
        """See :class:`DatasetFiles`."""
        with damage_told(self._folder / name, IMPORT_AGAIN), pa.OSFile(str(self.root / name)) as stream:
            yield stream

    def has(self, name: str) -> bool:
        """See :class:`DatasetFiles`."""
        return (self.root / name).exists()

    def parts_in(self, folder: str) -> list[str]:
        """See :class:`DatasetFiles`."""
        return sorted(f"{folder}/{path.name}" for path in (self.root / folder).glob("part-*.parquet"))

    def sha256_of(self, name: str) -> str:
        """See :class:`DatasetFiles`."""
        return sha256_of(self.root / name)


class StoredFiles:
    """The files of one version on S3-compatible storage."""

    far = True

    def __init__(self, storage: FileSystem, place: S3Place, manifest: Manifest) -> None:
        self._storage, self.place, self.manifest = storage, place, manifest

    @classmethod
    def find(cls, place: S3Place) -> StoredFiles:
        """Find the version to read, through the connection that the environment describes.

        Raises ``InputError`` if there is none, or the storage cannot be read.
        """
        storage = connect()
        place = resolve(storage, place)
        return cls(storage, place, read_manifest(storage, place))

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[pa.NativeFile]:
        """See :class:`DatasetFiles`."""
        file = self.manifest.files.get(name)
        if file is None:
            raise FileNotFoundError(name)
        with (
            storage_errors(self.place, name),
            open_object(self._storage, self.place, name, file) as stream,
            damage_told(f"{self.place}/{name}", PUBLISH_AGAIN),
        ):
            yield stream

    def has(self, name: str) -> bool:
        """See :class:`DatasetFiles`."""
        return name in self.manifest.files

    def parts_in(self, folder: str) -> list[str]:
        """See :class:`DatasetFiles`."""
        begin = f"{folder}/part-"
        return sorted(name for name in self.manifest.files if name.startswith(begin) and name.endswith(".parquet"))

    def sha256_of(self, name: str) -> str:
        """See :class:`DatasetFiles`."""
        return self.manifest.files[name].sha256

    def read_checked(self, name: str) -> bytes:
        """Read a small file whole, and hold it against the manifest.

        Raises ``InputError`` if it is missing or something else than was published.
        """
        with self.opened(name) as stream:
            content: bytes = stream.read()
        if hashlib.sha256(content).hexdigest() != self.sha256_of(name):
            raise InputError(
                "a file is not what was published", f"{self.place}/{name}", "It is damaged: publish the dataset again."
            )
        return content


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as hexadecimal text."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
