"""Push of files staged on a node to ``predrain collect receive``: a bounded spool, and a pusher with retries.

A file is deleted only after the receiver has acknowledged it. After a kill in between, it is sent again under the same
name, and the receiver accepts each name once.
"""

import io
import json
import logging
import re
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ByteSize, TypeAdapter, ValidationError

from foundation.errors import InputError
from foundation.http import BodyTooLarge, HttpError, ask, connect_to, retry_after_s
from foundation.running import Failing, backoff_s
from telemetry.staging.folder import StagingFolder

_LOG = logging.getLogger(__name__)

MAX_PAUSE_S: Final = 300.0
"""Maximum backoff between attempts, unless the receiver asks for longer."""

MAX_SERVER_ERRORS: Final = 10
"""A file is set aside after this many server errors while other files were accepted."""

MAX_SKIPPED: Final = 3
"""Server errors in one round after which the receiver is considered down."""

REFUSED_FILES: Final = 1000
"""Maximum number of rejected files that are retained; the oldest are deleted first."""

PATH: Final = "/v1/telemetry"
CONTENT_TYPE: Final = "application/vnd.apache.arrow.stream"
TIMEOUT_S: Final = 30.0
_IDLE_S: Final = 1.0
_ANSWER_BYTES: Final = 65536
_MAX_RETRY_AFTER_S: Final = 3600.0
_NOT_THE_FILE: Final = frozenset({401, 403, 404, 405, 407, 408, 421, 425, 429})
# 4xx about the token, the address or load: any other file would get the same response.
_NAMED: Final = "named-"
_DROP_ORDER: Final = ("samples", "inventory", "jobs", "events")


class Deferred(Exception):
    """A transient failure; the file stays in the spool.

    ``after_s``: delay that the receiver asked for, if any. ``server_error``: whether the file may be the cause, because
    the receiver is reachable and failed on it.
    """

    def __init__(self, reason: str, after_s: float | None = None, *, server_error: bool = False) -> None:
        super().__init__(reason)
        self.after_s = after_s
        self.server_error = server_error


class Rejected(Exception):
    """The receiver permanently rejects this file."""


def parse_bytes(text: str) -> int:
    """Parse a size like ``1GiB`` or ``500 MB``; raises ``ValueError`` if it is malformed or not positive."""
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text.strip()))
    except (ValidationError, OverflowError):
        size = 0
    if size <= 0:
        raise ValueError(f"{text!r} is not a size: write a number and a unit (KiB, MiB, GiB, TiB), such as '1GiB'")
    return size


class Spool:
    """Spool of one writer's files in a staging folder; other writers' files are not touched.

    Above ``limit_bytes`` (None: no limit) the oldest samples are dropped, and other files only when no samples are
    left. ``counts``: ``files_dropped`` and ``files_rejected``.
    """

    def __init__(self, staging: StagingFolder, writer: str, limit_bytes: int | None) -> None:
        self._staging = staging
        self._limit_bytes = limit_bytes
        pattern = re.escape(writer)
        self._own_files = re.compile(rf"(?:\d{{13}}-{pattern}-\d+-\d{{6,}}-[0-9a-f]{{8}}|{_NAMED}{pattern}\..*)\Z")
        self._is_over = False
        self.counts: Counter[str] = Counter()

    def files(self) -> list[Path]:
        """Return the pending files, oldest first."""
        return [path for path in self._staging.waiting() if self._own_files.match(path.stem)]

    def trim(self) -> None:
        """Drop the oldest files while the spool is over its limit."""
        if self._limit_bytes is None:
            return
        sizes: dict[Path, int] = {}
        for path in self.files():
            with suppress(FileNotFoundError):  # sent meanwhile
                sizes[path] = path.stat().st_size
        over_bytes = sum(sizes.values()) - self._limit_bytes
        if over_bytes > 0 and not self._is_over:
            limit = self._limit_bytes
            _LOG.error("the spool %s exceeds %d bytes: dropping the oldest samples", self._staging.root, limit)
        self._is_over = over_bytes > 0
        # A stable sort: within a kind, the oldest files come first.
        for path in sorted(sizes, key=lambda path: _DROP_ORDER.index(path.parent.name)):
            if over_bytes > 0:
                path.unlink(missing_ok=True)
                over_bytes -= sizes[path]
                self.counts["files_dropped"] += 1

    def refuse(self, path: Path, reason: str) -> None:
        """Set a permanently rejected file aside."""
        moved_to = self._staging.put_aside(path, "refused")
        self.counts["files_rejected"] += 1
        _LOG.error("permanently rejected, moved to %s: %s", moved_to, reason)
        rejected = sorted(
            moved_to.parent.parent.glob("*/*.parquet"), key=lambda path: path.stat().st_mtime_ns, reverse=True
        )
        for old in rejected[REFUSED_FILES:]:
            old.unlink(missing_ok=True)


class HttpTarget:
    """Client of ``collect receive`` at ``url``; raises InputError if the address or a credential file is invalid."""

    def __init__(self, url: str, *, token_file: Path | None = None, ca_file: Path | None = None) -> None:
        self._connection = connect_to(url, bearer_token_file=token_file, ca_file=ca_file, option="--push")
        self._path = "" if self._connection.url.endswith(PATH) else PATH

    def __str__(self) -> str:
        return self._connection.url + self._path

    def send(self, path: Path) -> None:
        """Post a file as an Arrow stream under its name; raises Deferred, Rejected or FileNotFoundError."""
        try:
            with pq.ParquetFile(path) as stored:
                table = stored.read()
        except pa.ArrowException as error:
            raise Rejected(f"the file cannot be read: {error}") from error
        body = io.BytesIO()
        with pa.ipc.new_stream(body, table.schema) as stream:
            stream.write_table(table)
        try:
            answer = ask(
                self._connection,
                "POST",
                self._path,
                timeout_s=TIMEOUT_S,
                max_bytes=_ANSWER_BYTES,
                params={"kind": path.parent.name, "name": path.stem.removeprefix(_NAMED)},
                content=body.getvalue(),
                headers={"Content-Type": CONTENT_TYPE},
            )
        except BodyTooLarge as error:
            answer = error.answer
        except (HttpError, InputError) as error:  # an invalid token or certificate is transient too
            raise Deferred(f"{self}: {error}") from error
        status = answer.status
        if status == 204 or (status == 200 and _value_of(answer.body, "left_out") is not None):
            return
        detail = _value_of(answer.body, "detail")
        reason = f"{self} answered {status}" + ("" if detail is None else f": {str(detail)[:500]}")
        if 200 <= status < 400:  # else a login page would swallow all telemetry
            reason += "; this is not a receiver: check the address (no data is lost)"
        if 400 <= status < 500 and status not in _NOT_THE_FILE:
            raise Rejected(reason)
        if status in (401, 403):
            reason += "; check the token in --bearer-token-file (no data is lost)"
        after_s = retry_after_s(answer.headers.get("retry-after"), longest_s=_MAX_RETRY_AFTER_S)
        # A 503 is about the receiver's load, any other 5xx possibly about this file.
        raise Deferred(reason, after_s, server_error=status >= 500 and status != 503)


def _value_of(content: bytes, key: str) -> Any:
    try:
        return json.loads(content)[key]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None


class Pusher:
    """Sends files from a spool to a target in the order of staging; ``sent`` counts them."""

    def __init__(self, spool: Spool, target: HttpTarget) -> None:
        self._spool, self._target = spool, target
        self._failing = Failing(_LOG)
        self._server_errors: Counter[str] = Counter()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="push", daemon=True)
        self.sent = 0

    def push(self) -> Deferred | None:
        """Send pending files until the target fails; return None if all are sent, else the failure and retry delay."""
        skipped: list[tuple[Path, Deferred]] = []
        sent = self.sent
        self._spool.trim()
        for path in self._spool.files():
            try:
                self._target.send(path)
            except FileNotFoundError:  # dropped by the spool's limit, or taken by another process
                continue
            except Rejected as error:
                self._spool.refuse(path, str(error))
                continue
            except Deferred as error:
                skipped.append((path, error))
                if error.server_error and len(skipped) < MAX_SKIPPED:
                    continue  # the next file shows whether the file or the server is at fault
                break
            path.unlink(missing_ok=True)
            self.sent += 1
        if not skipped or self.sent > sent:
            self._failing.recovered(f"pushing to {self._target}")
        if not skipped:
            return None
        if self.sent > sent:
            for path, failure in skipped:
                self._server_errors[path.name] += failure.server_error
                if self._server_errors[path.name] >= MAX_SERVER_ERRORS:
                    self._spool.refuse(path, f"{failure}, {MAX_SERVER_ERRORS} times, while other files were accepted")
        return self._wait(str(skipped[-1][1]), skipped[-1][1].after_s)

    def _wait(self, reason: str, after_s: float | None = None) -> Deferred:
        failures = self._failing.failed(f"pushing to {self._target}", reason)
        return Deferred(reason, max(backoff_s(failures, max_s=MAX_PAUSE_S), after_s or 0.0))

    def start(self) -> None:
        """Start the push thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop after one more round, waiting at most ``timeout_s``; unsent files stay in the spool."""
        self._stopped.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopped.is_set()  # one more round after the signal
            try:
                failure = self.push()
            except (OSError, InputError) as error:  # the spool itself, for example on a full disk
                failure = self._wait(f"the spool cannot be used: {error}")
            self._stopped.wait(_IDLE_S if failure is None or failure.after_s is None else failure.after_s)
