"""What each bucket gave, kept on disk until all of them have: a build that is killed goes on at the bucket."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from telemetry.atomic import fsync_path

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BucketValues:
    """What the samples of a bucket say.

    Attributes
    ----------
    values : float32 array, shape (rows of the bucket, columns)
        The columns that need no other bucket.
    amounts : float32 array, shape (rows of the bucket, amounts)
        Of the group ``onset``, still to be held against the fleet; no columns where that group is off.
    peers : float32 array, shape (times, values, pairs of the bucket)
        First pass of the group ``peers``; no values where that group is off.
    """

    values: Float32Array
    amounts: Float32Array
    peers: Float32Array


class Spill:
    """Values of buckets in a folder beside the matrix that is being built.

    Parameters
    ----------
    target : Path
        Where the matrix will stand; the caller has it for itself (:class:`telemetry.atomic.FolderSwap`).
    digest : str
        Of the matrix. What another one left is removed.
    """

    def __init__(self, target: Path, digest: str) -> None:
        self.folder = target.with_name(f".{target.name}.spill")
        named = self.folder / "digest"
        if not named.is_file() or named.read_text(encoding="utf-8") != digest:
            self.remove()
            self.folder.mkdir(parents=True)
            named.write_text(digest, encoding="utf-8")

    def has(self, bucket: int) -> bool:
        """Tell whether a bucket's values are there, whole."""
        return self._file(bucket, "done").exists()

    def keep(self, bucket: int, found: BucketValues) -> None:
        """Keep a bucket's values; several threads may keep different buckets at once."""
        for each in fields(found):
            path = self._file(bucket, each.name)
            np.ascontiguousarray(getattr(found, each.name)).tofile(path)
            fsync_path(path)
        self._file(bucket, "done").touch()

    def read(self, bucket: int, name: str, begin: int, end: int, shape: tuple[int, ...]) -> Float32Array:
        """Read some entries along the first axis of one of a bucket's arrays.

        Parameters
        ----------
        bucket : int
        name : {"values", "amounts", "peers"}
        begin, end : int
            Entries.
        shape : tuple of int
            Of one entry.

        Returns
        -------
        float32 array, shape (end - begin, *shape)
        """
        size = int(np.prod(shape))
        count = (end - begin) * size
        found = np.fromfile(self._file(bucket, name), dtype=np.float32, count=count, offset=begin * size * 4)
        return found.reshape(end - begin, *shape)

    def remove(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, bucket: int, what: str) -> Path:
        return self.folder / f"bucket-{bucket:05d}.{what}"
