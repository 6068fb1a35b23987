"""Location of a dataset: a folder, or a prefix in an S3-compatible bucket."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from foundation.errors import InputError

SCHEME: Final = "s3://"

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,62}\Z")


@dataclass(frozen=True, slots=True)
class S3Place:
    """A dataset on S3-compatible storage.

    ``prefix``: key prefix in the bucket; not empty, without a leading or trailing slash.
    ``digest``: expected digest of the dataset; None: any.
    """

    bucket: str
    prefix: str
    digest: str | None = None

    @property
    def root(self) -> str:
        """``BUCKET/PREFIX``, as pyarrow expects it."""
        return f"{self.bucket}/{self.prefix}"

    def __str__(self) -> str:
        """Return the URL, ``s3://BUCKET/PREFIX``."""
        return SCHEME + self.root


Place = Path | S3Place


def place_of(written: str, option: str = "--dataset") -> Place:
    """Parse the location of a dataset: a folder, or ``s3://BUCKET/PREFIX``; else raise ``InputError``."""
    if not written.startswith(SCHEME):
        if "://" in written:
            raise InputError(
                f"{written!r} is neither a folder nor an S3 address",
                option,
                "Give a folder, or s3://BUCKET/PREFIX.",
            )
        return Path(written)
    bucket, _, prefix = written.removeprefix(SCHEME).partition("/")
    prefix = prefix.strip("/")
    if not _BUCKET.match(bucket) or {"", ".", ".."} & set(prefix.split("/")) or "?" in prefix:
        raise InputError(
            f"{written!r} is not a prefix in a bucket",
            option,
            "Write s3://BUCKET/PREFIX, for example s3://fleets/east.",
        )
    return S3Place(bucket, prefix)


def refuse_storage(path: Path) -> None:
    """Raise ``InputError`` if ``path`` was given as ``s3://…``, which would create a folder named ``s3:``."""
    if SCHEME.rstrip("/") in path.parts:
        raise InputError(
            "a local folder is required, not S3-compatible storage",
            str(path),
            "Give a folder: copy the dataset from the bucket with an S3 client or `dvc pull`.",
        )
