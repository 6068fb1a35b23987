"""Files of a dataset open for reading, in a folder or on S3-compatible storage."""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow.fs import AwsStandardS3RetryStrategy, FileInfo, FileSelector, FileSystem, FileType, S3FileSystem

from foundation.errors import InputError
from foundation.files import ReadLease
from foundation.place import S3Place
from telemetry.dataset.meta import META_NAME, DatasetMeta, decode_meta

CONNECT_TIMEOUT_S: Final = 10.0
STALL_TIMEOUT_S: Final = 30.0
"""Timeout for a stalled response; slow responses that make progress are not aborted."""

ATTEMPTS: Final = 5
"""Attempts per request, with backoff, for lost connections, timeouts, 5xx and "slow down"."""

_ERRORS: Final = (
    (("NO_SUCH_BUCKET",), "there is no bucket {bucket!r}", "Check its name and AWS_ENDPOINT_URL, or create it."),
    (("NO_SUCH_KEY",), "a file of the dataset was removed during the read", "Run again when the dataset is complete."),
    (
        (
            "ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "INVALID_CLIENT_TOKEN_ID",
            "HTTP status 403",
        ),
        "the storage rejects these credentials, or they lack permission",
        "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), and their permissions.",
    ),
    (
        ("curlCode: 60", "curlCode: 77"),  # CURLE_PEER_FAILED_VERIFICATION, CURLE_SSL_CACERT_BADFILE
        "the storage's certificate is not trusted",
        "Set AWS_CA_BUNDLE to the PEM file of its authority.",
    ),
    (
        ("NETWORK_CONNECTION", "REQUEST_TIMEOUT"),
        "the storage does not respond, after {attempts} attempts",
        "Check AWS_ENDPOINT_URL and the network, then run again.",
    ),
    (("",), "the storage answered with an error", "Run again; if the error persists, ask its operator."),
)  # fmt: skip
"""Substrings of a storage error, its meaning and the fix; the first match counts."""


def connect(environment: Mapping[str, str] | None = None) -> S3FileSystem:
    """Configure the client from the environment like other S3 clients; no request is sent.

    Reads ``AWS_ENDPOINT_URL_S3`` or ``AWS_ENDPOINT_URL`` (default: AWS), ``AWS_REGION`` or ``AWS_DEFAULT_REGION``, and
    ``AWS_CA_BUNDLE`` (a PEM file). The AWS SDK reads the credentials from the process's environment. pyarrow documents
    ``request_timeout`` for Windows and macOS only; on Linux curl uses it as the timeout of a transfer below 1 byte/s.

    Raises ``InputError`` if the endpoint is not a URL.
    """
    variables = os.environ if environment is None else environment
    endpoint = variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL") or None
    region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or None
    options: dict[str, Any] = {}
    if endpoint is not None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/") or parts.query:
            raise InputError(
                f"{endpoint!r} is not the address of a server", "AWS_ENDPOINT_URL", "Write http(s)://HOST[:PORT]."
            )
        options |= {"endpoint_override": parts.netloc, "scheme": parts.scheme}
        # Without a region the SDK would query the EC2 metadata service.
        region = region or "us-east-1"
    if variables.get("AWS_CA_BUNDLE"):
        options["tls_ca_file_path"] = variables["AWS_CA_BUNDLE"]
    return S3FileSystem(
        region=region,
        connect_timeout=CONNECT_TIMEOUT_S,
        request_timeout=STALL_TIMEOUT_S,
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        # Small files are sent in one request instead of three.
        allow_delayed_open=True,
        **options,
    )


@contextlib.contextmanager
def storage_errors(place: S3Place, name: str = "") -> Iterator[None]:
    """Convert storage errors to ``InputError``, except FileNotFoundError, which callers handle."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        text = str(error)
        if "AWS Error" not in text:
            raise
        # Strip the text before the error itself, and the request id, which differs each time.
        short = text[text.index("AWS Error") :].partition(" (Request ID")[0]
        problem, advice = next(
            (problem, advice) for signs, problem, advice in _ERRORS if any(sign in text for sign in signs)
        )
        location = f"{place}/{name}".rstrip("/")
        raise InputError(
            problem.format(bucket=place.bucket, attempts=ATTEMPTS), f"{location}: {short}", advice
        ) from error


_OF_CONTENT = re.compile(r"parquet|thrift|corrupt|decompress|deserializ|end of stream|page header", re.IGNORECASE)
# An OSError of Arrow without an errno that matches this is about the content of a file, not about access to it.

UPLOAD_AGAIN = "Upload the complete dataset again."
JSON_LAST = "Wait until the upload has ended. If it has, upload dataset.json again: it must be uploaded last."
RUN_AGAIN = "Run again when the upload has ended; upload a newer dataset under another prefix."
IMPORT_AGAIN = "The dataset is damaged: restore the file, or import or collect its sources again."


@contextmanager
def damage_reported(location: object, advice: str) -> Iterator[None]:
    """Convert errors about a file's content to ``InputError``: not Parquet, truncated, missing columns, not UTF-8.

    Errors of the operating system or storage (missing file, disk failure) pass through.
    ``advice``: the fix, e.g. "Import the sources of the dataset again."
    """
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, KeyError, OSError) as error:
        if isinstance(error, OSError) and (error.errno is not None or not _OF_CONTENT.search(str(error))):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        reason = f"it has no column {error}" if isinstance(error, KeyError) else reason
        raise InputError(f"the file is damaged: {reason}", str(location), advice) from error


class FolderFiles:
    """Files of one version of a dataset in a folder; a lease keeps them when the dataset is replaced.

    ``is_remote``: whether each read is a network request, so that reads of a file should be combined.
    """

    is_remote = False

    def __init__(self, folder: Path, lease: ReadLease | None = None) -> None:
        self._lease = lease
        self._folder = folder
        self.root = folder if lease is None else lease.path

    @contextmanager
    def opened(self, name: str) -> Iterator[pa.NativeFile]:
        """Open a file for random access, by its name in the dataset.

        Raises ``FileNotFoundError`` if it does not exist; ``InputError``, also while it is open, if it is corrupt, was
        replaced on the storage, or cannot be read.
        """
        with damage_reported(self._folder / name, IMPORT_AGAIN), pa.OSFile(str(self.root / name)) as stream:
            yield stream

    def has(self, name: str) -> bool:
        """Whether the file exists."""
        return (self.root / name).exists()

    def parts_in(self, folder: str) -> list[str]:
        """Return the names of the part files in a folder of the dataset, sorted."""
        return sorted(f"{folder}/{path.name}" for path in (self.root / folder).glob("part-*.parquet"))

    def sha256_of(self, name: str) -> str:
        """Return the SHA-256 of a file in hexadecimal."""
        with self.opened(name) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()


class StoredFiles(FolderFiles):
    """Files under a prefix on S3-compatible storage, as listed when the dataset was opened.

    Nothing prevents others from replacing a file. A file that differs from the list is rejected, so that versions of a
    dataset are never mixed.
    """

    is_remote = True

    def __init__(self, place: S3Place, storage: FileSystem, listed: Mapping[str, FileInfo], meta: DatasetMeta) -> None:
        self.place, self.meta = place, meta
        self._storage, self._listed = storage, listed

    @classmethod
    def open(cls, place: S3Place) -> "StoredFiles":
        """Open the dataset at ``place``; raises ``InputError`` if it is missing, incomplete, or has another digest."""
        storage = connect()
        meta, written = _read_meta(storage, place)
        if place.digest not in (None, meta.digest):
            raise InputError("the dataset was replaced while it was read", str(place), RUN_AGAIN)
        with storage_errors(place):
            infos = storage.get_file_info(FileSelector(place.root, recursive=True))
        listed = {info.path.removeprefix(place.root + "/"): info for info in infos if info.type == FileType.File}
        newest = _whole_seconds(listed[META_NAME].mtime) if META_NAME in listed else None
        if newest is None or written not in (None, newest):
            raise InputError("the dataset was replaced while it was read", str(place), RUN_AGAIN)
        # Older versions did not list the files in dataset.json.
        names = set(meta.files) or {name for name in listed if name.endswith(".parquet")}
        missing = sorted(names - set(listed))
        if missing:
            raise InputError(
                f"the dataset is incomplete: files are missing ({len(missing)}, such as {missing[0]})",
                str(place),
                UPLOAD_AGAIN,
            )
        uploaded_late = sorted(name for name in names if _whole_seconds(listed[name].mtime) > newest)
        if uploaded_late:
            raise InputError(
                f"files were uploaded after dataset.json ({len(uploaded_late)}, such as {uploaded_late[0]})",
                str(place),
                JSON_LAST,
            )
        return cls(replace(place, digest=meta.digest), storage, {name: listed[name] for name in names}, meta)

    @contextmanager
    def opened(self, name: str) -> Iterator[pa.NativeFile]:
        """See :class:`FolderFiles`."""
        listed = self._listed.get(name)
        if listed is None:
            raise FileNotFoundError(name)
        location = f"{self.place}/{name}"
        with storage_errors(self.place, name):
            try:
                stream = self._storage.open_input_file(listed.path)
            except FileNotFoundError:
                raise InputError("a file of the dataset was removed during the read", location, RUN_AGAIN) from None
            with stream:
                if stream.size() != listed.size or _changed_at(stream) not in (None, _whole_seconds(listed.mtime)):
                    raise InputError("a file of the dataset was replaced while it was read", location, RUN_AGAIN)
                with damage_reported(location, UPLOAD_AGAIN):
                    yield stream if "/" in name else self._checked(name, stream.read())

    def has(self, name: str) -> bool:
        """See :class:`FolderFiles`."""
        return name in self._listed

    def parts_in(self, folder: str) -> list[str]:
        """See :class:`FolderFiles`."""
        begin = f"{folder}/part-"
        return sorted(name for name in self._listed if name.startswith(begin) and name.endswith(".parquet"))

    def _checked(self, name: str, content: bytes) -> pa.NativeFile:
        """Verify the content of a table against the digest in dataset.json."""
        digest = hashlib.sha256(content).hexdigest()
        if digest != self.meta.files.get(name, digest):
            raise InputError("a file does not match dataset.json", f"{self.place}/{name}", UPLOAD_AGAIN)
        return pa.BufferReader(content)


def _read_meta(storage: FileSystem, place: S3Place) -> tuple[DatasetMeta, datetime | None]:
    """Read dataset.json; return it with its Last-Modified time, in whole seconds."""
    key = f"{place.root}/{META_NAME}"
    try:
        with storage_errors(place), storage.open_input_file(key) as stream:
            content: bytes = stream.read()
            written = _changed_at(stream)
    except FileNotFoundError:
        with storage_errors(place):
            (bucket,) = storage.get_file_info([place.bucket])
        if bucket.type == FileType.NotFound:
            raise InputError(
                f"there is no bucket {place.bucket!r}", str(place), "Check its name and AWS_ENDPOINT_URL, or create it."
            ) from None
        raise InputError(
            "there is no dataset here: no dataset.json", str(place), "Upload the folder of a dataset to this prefix."
        ) from None
    with damage_reported(f"{place}/{META_NAME}", UPLOAD_AGAIN):
        return decode_meta(content.decode(), f"{place}/{META_NAME}"), written


def _changed_at(stream: pa.NativeFile) -> datetime | None:
    """Last-Modified time of an open object, in whole seconds; None if the storage does not report it."""
    written = stream.metadata().get("Last-Modified")
    return None if written is None else datetime.fromisoformat(written.decode())


def _whole_seconds(instant: datetime) -> datetime:
    return instant.replace(microsecond=0)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
