"""Where a dataset is: a folder, or a prefix in a bucket of S3-compatible storage."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from telemetry.errors import InputError

SCHEME: Final = "s3://"
VERSIONS: Final = "versions"
"""Folder of the versions under a dataset's prefix."""

_VERSION = re.compile(rf"(?P<prefix>.+)/{VERSIONS}/(?P<version>[0-9a-f]{{16}})\Z")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,62}\Z")


@dataclass(frozen=True, slots=True)
class S3Place:
    """A dataset on S3-compatible storage; small, and the same wherever it is sent.

    ``prefix``: of the dataset's keys in the bucket; neither empty nor with a slash at an end.
    ``version``: one of the versions that were published there; None: the current one, whichever that is when it is
    opened.
    """

    bucket: str
    prefix: str
    version: str | None = None

    @property
    def root(self) -> str:
        """Bucket and prefix of the dataset as pyarrow writes them, whatever the version."""
        return f"{self.bucket}/{self.prefix}"

    @property
    def base(self) -> str:
        """Bucket and prefix of the version's own objects.

        Raises ``ValueError`` if no version is named.
        """
        if self.version is None:
            raise ValueError(f"{self} names no version")
        return f"{self.root}/{VERSIONS}/{self.version}"

    def __str__(self) -> str:
        """Write the place as a user gives it; with a version it is the prefix that the version's objects have."""
        return SCHEME + (self.root if self.version is None else self.base)


Place = Path | S3Place
"""Where a dataset can be read."""


def place_of(written: str, option: str = "--dataset") -> Place:
    """Read where a dataset is.

    ``written``: a folder; or ``s3://BUCKET/PREFIX``, the version that is current there; or
    ``s3://BUCKET/PREFIX/versions/VERSION``, one that was published there.
    Raises ``InputError`` if it names storage that cannot be read, or no prefix in a bucket.
    """
    if not written.startswith(SCHEME):
        if "://" in written:
            raise InputError(
                f"{written!r} is neither a folder nor an address of S3-compatible storage",
                option,
                "Give a folder, or s3://BUCKET/PREFIX.",
            )
        return Path(written)
    bucket, _, prefix = written.removeprefix(SCHEME).partition("/")
    prefix = prefix.strip("/")
    parts = prefix.split("/")
    if not _BUCKET.match(bucket) or {"", ".", ".."} & set(parts) or "?" in prefix:
        raise InputError(
            f"{written!r} does not name a prefix in a bucket", option, "Write s3://BUCKET/PREFIX, say s3://fleets/east."
        )
    found = _VERSION.match(prefix)
    if VERSIONS in (parts if found is None else found["prefix"].split("/")):  # what lies there belongs to a dataset
        raise InputError(
            f"{written!r} is within a dataset and names no version of it",
            option,
            f"Write s3://BUCKET/PREFIX, or s3://BUCKET/PREFIX/{VERSIONS}/ and the 16 characters that `predrain dataset "
            "versions` gives.",
        )
    return S3Place(bucket, prefix) if found is None else S3Place(bucket, found["prefix"], found["version"])


def storage_place(written: str, option: str) -> S3Place:
    """Read a place that must be on S3-compatible storage and name no version of it.

    Raises ``InputError`` if it is something else.
    """
    place = place_of(written, option)
    if isinstance(place, Path) or place.version is not None:
        what = "is a folder" if isinstance(place, Path) else "names one version"
        raise InputError(f"{written!r} {what}", option, "Give the dataset's prefix in a bucket: s3://BUCKET/PREFIX.")
    return place


def refuse_storage(path: Path) -> None:
    """Refuse to take an address of storage for a path: it would become a folder named ``s3:`` here.

    Raises ``InputError`` if ``path`` was written as ``s3://…``.
    """
    if SCHEME.rstrip("/") in path.parts:
        raise InputError(
            "this needs a folder and not S3-compatible storage",
            str(path),
            "Give a folder: `predrain dataset push` publishes a dataset from there, and `pull` fetches one.",
        )
