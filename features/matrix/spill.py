"""What each bucket gave, kept until all have: on disk, from where a killed build goes on, or, if little, in memory."""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from telemetry.atomic import fsync_path

Float32Array = npt.NDArray[np.float32]

_PARTIAL = ".partial"
_OWNER = "owner"


@dataclass(frozen=True, slots=True)
class BucketValues:
    """What the samples of a bucket say.

    ``values``: the columns that need no other bucket; shape (rows of the bucket, columns).
    ``amounts``: of the group ``onset``, still to be held against the fleet; no columns where that group is off; shape
    (rows of the bucket, amounts).
    ``peers``: first pass of the group ``peers``; no values where that group is off; shape (grid times, values, pairs of
    the bucket).
    """

    values: Float32Array
    amounts: Float32Array
    peers: Float32Array


class Spill:
    """Values of buckets in a folder beside the matrix that is being built.

    The folder is named by the digest, and files get their names when they are whole. So a machine that was thought lost
    and still writes can do no harm: it writes the same bytes again, or into a folder that is gone.

    ``target``: where the matrix will stand; the caller has it for itself (:class:`telemetry.atomic.FolderSwap`).
    ``token``: says which process began it.
    """

    def __init__(self, target: Path, digest: str) -> None:
        self._all = target.with_name(f".{target.name}.spill")
        self.folder = self._all / digest[:16]
        for entry in self._all.iterdir() if self._all.is_dir() else ():
            if entry.name != self.folder.name:
                shutil.rmtree(entry, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        for entry in self.folder.glob(f"*{_PARTIAL}"):  # left behind by a process that died
            entry.unlink(missing_ok=True)
        self._held: dict[int, BucketValues] | None = None
        self.token = secrets.token_hex(16)
        (self.folder / _OWNER).write_text(self.token, encoding="utf-8")

    @classmethod
    def join(cls, target: Path, digest: str, token: str) -> Spill | None:
        """Find the folder that another process has made, by its token; None where it is not to be seen."""
        joined = cls.__new__(cls)
        joined._all = target.with_name(f".{target.name}.spill")
        joined.folder = joined._all / digest[:16]
        joined._held = None
        joined.token = token
        try:
            found = (joined.folder / _OWNER).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return joined if found == token else None

    def is_there(self) -> bool:
        """Tell whether the folder is still there: it goes when the build ends."""
        return self.folder.is_dir()

    def temporary(self) -> Path:
        """Name a file that no other process writes to, for what is given its name when it is whole."""
        return self.folder / f"{secrets.token_hex(8)}{_PARTIAL}"

    def hold(self) -> None:
        """Keep in memory what comes from now on: where it is little, and no other process asks for it.

        Syncing and removing files costs more than a small bucket does; a build that is killed begins anew.
        """
        self._held = {}

    def has(self, bucket: int) -> bool:
        """Tell whether a bucket's values are there, whole."""
        return (self._held is not None and bucket in self._held) or self._file(bucket, "done").exists()

    def holds_any(self) -> bool:
        """Tell whether any bucket's values are on disk, whole."""
        return any(self.folder.glob("bucket-*.done"))

    def keep(self, bucket: int, found: BucketValues) -> None:
        """Keep a bucket's values; several processes may keep buckets at once, even the same one."""
        if self._held is not None:
            self._held[bucket] = found
            return
        for each in fields(found):
            path = self.temporary()
            np.ascontiguousarray(getattr(found, each.name)).tofile(path)
            fsync_path(path)
            path.replace(self._file(bucket, each.name))
        self._file(bucket, "done").touch()

    def read(self, bucket: int, name: str, begin: int, end: int, shape: tuple[int, ...]) -> Float32Array:
        """Read some entries along the first axis of one of a bucket's arrays.

        Returns shape (end - begin, *shape).
        """
        if self._held is not None and bucket in self._held:
            array: Float32Array = getattr(self._held[bucket], name)
            return array[begin:end]
        size = int(np.prod(shape))
        count = (end - begin) * size
        found = np.fromfile(self._file(bucket, name), dtype=np.float32, count=count, offset=begin * size * 4)
        return found.reshape(end - begin, *shape)

    def remove(self) -> None:
        """Remove everything."""
        shutil.rmtree(self._all, ignore_errors=True)

    def _file(self, bucket: int, what: str) -> Path:
        return self.folder / f"bucket-{bucket:05d}.{what}"
