"""The connection to S3-compatible storage: what the environment says, timeouts, retries, and errors in words."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

from foundation.errors import InputError
from foundation.place import S3Place

CONNECT_TIMEOUT_S: Final = 10.0
"""A server that takes no connection for so long counts as absent."""

STALL_TIMEOUT_S: Final = 30.0
"""An answer of which nothing comes for so long is given up; a slow one that goes on coming is not."""

ATTEMPTS: Final = 5
"""Of each request, with pauses that grow between them: for lost connections, timeouts, 5xx and "slow down"."""

_ERRORS: Final = (
    (("NO_SUCH_BUCKET",), "there is no bucket {bucket!r}", "Check its name and AWS_ENDPOINT_URL, or make it."),
    (("NO_SUCH_KEY",), "a file of the dataset was removed while it was read", "Run again when the dataset is whole."),
    (
        (
            "ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "INVALID_CLIENT_TOKEN_ID",
            "HTTP status 403",
        ),
        "the storage refuses these credentials, or they may not do this",
        "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), and what they may do there.",
    ),
    (
        ("curlCode: 60", "curlCode: 77"),  # not signed by a trusted authority; authorities cannot be read
        "the storage's certificate is not trusted",
        "Name the PEM file of its authority in AWS_CA_BUNDLE.",
    ),
    (
        ("NETWORK_CONNECTION", "REQUEST_TIMEOUT"),
        "the storage does not answer, after {attempts} attempts",
        "Check AWS_ENDPOINT_URL and the network, then run again.",
    ),
    (("",), "the storage answered with an error", "Run again; if it stays, ask who runs it."),
)  # fmt: skip
"""What stands in the text of an error of the storage, what it means, and what to do; the first that is there counts."""


def connect(environment: Mapping[str, str] | None = None) -> S3FileSystem:
    """Connect as the environment says, as other S3 clients do; nothing is sent yet.

    ``AWS_ENDPOINT_URL_S3`` or ``AWS_ENDPOINT_URL`` (none: Amazon's own), ``AWS_REGION`` or ``AWS_DEFAULT_REGION``, and
    ``AWS_CA_BUNDLE`` (a PEM file) are read here; credentials by Amazon's own library, which reads the process's
    environment. The time an answer may stall is called ``request_timeout`` in pyarrow, whose documentation says that it
    counts on Windows and macOS only; on Linux curl gives up on a transfer of less than a byte a second by it.

    Raises ``InputError`` if the endpoint is not an address.
    """
    given = os.environ if environment is None else environment
    endpoint = given.get("AWS_ENDPOINT_URL_S3") or given.get("AWS_ENDPOINT_URL") or None
    region = given.get("AWS_REGION") or given.get("AWS_DEFAULT_REGION") or None
    options: dict[str, Any] = {}
    if endpoint is not None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/") or parts.query:
            raise InputError(
                f"{endpoint!r} is not the address of a server", "AWS_ENDPOINT_URL", "Write http(s)://HOST[:PORT]."
            )
        options |= {"endpoint_override": parts.netloc, "scheme": parts.scheme}
        # Without a region the library would ask a metadata service that only Amazon's machines have.
        region = region or "us-east-1"
    if given.get("AWS_CA_BUNDLE"):
        options["tls_ca_file_path"] = given["AWS_CA_BUNDLE"]
    return S3FileSystem(
        region=region,
        connect_timeout=CONNECT_TIMEOUT_S,
        request_timeout=STALL_TIMEOUT_S,
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        # What is small is sent in one request instead of three.
        allow_delayed_open=True,
        **options,
    )


@contextlib.contextmanager
def storage_errors(place: S3Place, name: str = "") -> Iterator[None]:
    """Raise ``InputError`` for an error of the storage, but for FileNotFoundError, whose meaning its caller knows."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        text = str(error)
        if "AWS Error" not in text:
            raise
        # Without what stands before the error itself, and without the request's number, which is another each time.
        short = text[text.index("AWS Error") :].partition(" (Request ID")[0]
        what, do = next((what, do) for signs, what, do in _ERRORS if any(sign in text for sign in signs))
        where = f"{place}/{name}".rstrip("/")
        raise InputError(what.format(bucket=place.bucket, attempts=ATTEMPTS), f"{where}: {short}", do) from error
