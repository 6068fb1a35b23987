"""Where a dataset is: a folder, or a prefix in a bucket of S3-compatible storage."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from foundation.errors import InputError

SCHEME: Final = "s3://"

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,62}\Z")


@dataclass(frozen=True, slots=True)
class S3Place:
    """A dataset on S3-compatible storage; small, and the same wherever it is sent.

    ``prefix``: of the dataset's keys in the bucket; neither empty nor with a slash at an end.
    ``digest``: of the dataset that must lie there; None: whichever lies there when it is opened.
    """

    bucket: str
    prefix: str
    digest: str | None = None

    @property
    def root(self) -> str:
        """Bucket and prefix as pyarrow writes them."""
        return f"{self.bucket}/{self.prefix}"

    def __str__(self) -> str:
        """Write the place as a user gives it."""
        return SCHEME + self.root


Place = Path | S3Place
"""Where a dataset can be read."""


def place_of(written: str, option: str = "--dataset") -> Place:
    """Read where a dataset is: a folder, or ``s3://BUCKET/PREFIX``.

    Raises ``InputError`` if it names storage that cannot be read, or no prefix in a bucket.
    """
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
    """Raise ``InputError`` if ``path`` was written as ``s3://…``: it would become a folder named ``s3:`` here."""
    if SCHEME.rstrip("/") in path.parts:
        raise InputError(
            "a local folder is required, not S3-compatible storage",
            str(path),
            "Give a folder: copy the dataset from the bucket with an S3 client or `dvc pull`.",
        )
