"""Files on a disk shared by the controllers: state, switches, lease and requests, for which Slurm has no place."""

import contextlib
import hashlib
import json
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from filelock import FileLock, Timeout

from foundation.errors import InputError
from foundation.files import fsync_path, write_bytes
from foundation.running import Patience, bounded
from scheduler.ports.codec import object_of, plain_of, read_json
from scheduler.ports.errors import SchedulerError
from scheduler.ports.lease import ObservedLease, bounded_s
from scheduler.ports.protocols import Clock
from scheduler.ports.readings import StoredState, Switches, WriteResult

T = TypeVar("T")

FORMAT: Final = 1
NONE_YET: Final = "none"
_MAX_FILE_BYTES: Final = 8 * 2**20
_LOCK_WAIT_S: Final = 10.0
_POLL_S: Final = 0.02
_LONGEST_S: Final = 30.0
_bounded = bounded("the state folder of the controllers", SchedulerError)
_EXPIRED_DURATIONS: Final = 3
# Durations without a renewal after which a lease has expired by the file server's clock alone.


class _BusyError(SchedulerError):
    """Another process holds the lock."""


@dataclass(frozen=True, slots=True)
class _LeaseRecord:
    holder: str
    beat: str
    duration_s: float
    at: str


class SharedFolder:
    """Small documents, each a file that is replaced atomically under a lock.

    ``path``: must exist at each write, as an unmounted disk would otherwise look like an empty folder, and must not be
    world-writable.
    ``longest_s``: limit on each call; on a disk that hangs, calls raise ``SchedulerError``.

    Another holder's lease has expired once its file was observed unchanged for the lease duration by our monotonic
    clock, or, for a process that has just started, if its mtime is three durations before that of a file written now.
    Clocks of different machines are never compared.
    """

    def __init__(
        self,
        path: Path,
        clock: Clock,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        longest_s: float | None = _LONGEST_S,
    ) -> None:
        self.path = path
        self.patience = None if longest_s is None else Patience(longest_s)
        self._clock, self._monotonic = clock, monotonic
        self._our_lease: tuple[_LeaseRecord, float] | None = None  # our lease, and its expiry by the monotonic clock
        self._observed = ObservedLease()

    @_bounded
    def load(self, name: str) -> StoredState:
        """Read a text with its version; raises ``SchedulerError`` if it cannot be read."""
        document, version = self._read(name)
        if version == NONE_YET:
            return StoredState(None, version)
        text = (document or {}).get("text")
        return StoredState(text if isinstance(text, str) else f"damaged {name}.json", version)

    @_bounded
    def save(self, name: str, text: str, version: str) -> WriteResult:
        """Replace a text if it still has this version; the result has the new version."""
        try:
            with self._locked(name):
                stored = self.load(name)
                if stored.version != version:
                    return WriteResult("conflict", f"{name} has version {stored.version}, expected {version}")
                if stored.text == text:
                    return WriteResult("already", "no change", (), version)
                return WriteResult("done", "", (), self._write(name, {"token": secrets.token_hex(8), "text": text}))
        except SchedulerError as error:
            return WriteResult("refused", str(error))  # the file is replaced atomically

    @_bounded
    def read_switches(self) -> Switches:
        """Read the switches; raises ``SchedulerError`` if they cannot be read, as the kill switch may be set."""
        return self._read_object("switches", Switches) or Switches()

    @_bounded
    def set_switches(self, switches: Switches) -> WriteResult:
        """Set the switches."""
        try:
            with self._locked("switches"):
                self._write("switches", plain_of(switches))
                return WriteResult("done")
        except SchedulerError as error:
            return WriteResult("refused", str(error))

    @_bounded
    def hold_lease(self, holder: str, duration: timedelta) -> datetime | None:
        """Acquire or renew the lease; None if another process holds it.

        Raises ``SchedulerError`` if the file cannot be read or written.
        """
        acquired_at, started_s = self._clock.now(), self._monotonic()
        self._our_lease = None
        try:
            with self._locked("lease"):
                lease = self._read_lease()
                if lease is not None and lease.holder != holder and not self._has_expired(lease, started_s):
                    return None
                record = _LeaseRecord(holder, secrets.token_hex(8), duration.total_seconds(), acquired_at.isoformat())
                self._write("lease", plain_of(record))
        except _BusyError:  # the holder of the lock is writing under the lease
            return None
        self._observed.forget()
        self._our_lease = record, started_s + duration.total_seconds()
        return acquired_at + duration

    def drop_lease(self, holder: str) -> None:
        """Release the lease if held; failures are ignored."""
        self._our_lease = None
        with contextlib.suppress(SchedulerError):
            self._drop(holder)

    @_bounded
    def _drop(self, holder: str) -> None:
        with self._locked("lease"):
            lease = self._read_lease()
            if lease is not None and lease.holder == holder:
                (self.path / "lease.json").unlink()

    @contextlib.contextmanager
    def fenced(self, holder: str, until: datetime) -> Iterator[str | None]:
        """Lock the lease for the duration of the block, so that no other process can take it.

        Yields: why nothing may be written, or None.
        Raises ``SchedulerError`` if the file cannot be locked or read.
        """
        lock, lease = self._lock_lease()
        ours, expires_s = self._our_lease or (None, 0.0)
        try:
            if ours is None or ours.holder != holder:
                yield f"{holder} does not hold the lease"
            elif lease is None or (lease.holder, lease.beat) != (ours.holder, ours.beat):
                yield f"{holder} no longer holds the lease"
            elif self._monotonic() >= expires_s or self._clock.now() >= until:
                yield f"the lease of {holder} has expired"
            else:
                yield None
        finally:
            try:
                self._close(lock)
            except SchedulerError:  # a call in the block hangs; what was written stays written
                threading.Thread(target=lock.close, daemon=True).start()

    @_bounded
    def _lock_lease(self) -> tuple[contextlib.ExitStack, _LeaseRecord | None]:
        with contextlib.ExitStack() as lock:
            lock.enter_context(self._locked("lease"))
            lease = self._read_lease()
            return lock.pop_all(), lease

    @_bounded
    def _close(self, lock: contextlib.ExitStack) -> None:
        lock.close()

    def guarded(self, holder: str, until: datetime | None, call: Callable[[], WriteResult]) -> WriteResult:
        """Make a write under the lease and return its result; ``refused`` if the lease is lost or a file fails.

        ``until``: None makes it without the lease.
        """
        if until is None:
            return call()
        try:
            with self.fenced(holder, until) as barred:
                return call() if barred is None else WriteResult("refused", barred)
        except SchedulerError as error:
            return WriteResult("refused", f"not completed: {error}")

    @_bounded
    def note(self, name: str, key: str, value: dict[str, Any], keep: Callable[[dict[str, Any]], bool]) -> None:
        """Add an entry to a document of entries, and drop those that ``keep`` rejects.

        Raises ``SchedulerError`` if it was not saved.
        """
        with self._locked(name):
            entries = {old: entry for old, entry in self.notes(name).items() if keep(entry)}
            self._write(name, {"entries": {**entries, key: value}})

    @_bounded
    def notes(self, name: str) -> dict[str, dict[str, Any]]:
        """Read a document of entries, empty if it is corrupt; raises ``SchedulerError`` if it cannot be read."""
        entries = (self._read(name)[0] or {}).get("entries")
        if not isinstance(entries, dict):
            return {}
        return {key: entry for key, entry in entries.items() if isinstance(entry, dict)}

    def _has_expired(self, lease: _LeaseRecord, now_s: float) -> bool:
        if self._observed.left_s(lease.beat, lease.duration_s, now_s) <= 0:
            return True
        probe = self.path / f".probe-{secrets.token_hex(4)}"
        try:
            probe.write_bytes(b"")
            lag_s = probe.stat().st_mtime - (self.path / "lease.json").stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)
        return lag_s >= _EXPIRED_DURATIONS * bounded_s(lease.duration_s)

    def _read_lease(self) -> _LeaseRecord | None:
        return self._read_object("lease", _LeaseRecord, "; remove it when no controller runs")

    def _read_object(self, name: str, kind: type[T], hint: str = "") -> T | None:
        document, version = self._read(name)
        try:
            if document is None:
                raise ValueError("it is damaged, or of another format")
            return None if version == NONE_YET else cast(T, object_of(kind, document, name))
        except ValueError as error:
            raise SchedulerError(f"{self.path / f'{name}.json'}: {error}{hint}") from None

    def _read(self, name: str) -> tuple[dict[str, Any] | None, str]:
        """Read a document (None if corrupt) and its version (``NONE_YET`` if missing)."""
        file = self.path / f"{name}.json"
        try:
            with file.open("rb") as stream:
                content = stream.read(_MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            if self.path.is_dir():
                return {}, NONE_YET
            raise SchedulerError(f"{self.path} does not exist: check that its disk is mounted") from None
        except OSError as error:
            raise SchedulerError(f"{file}: {error.strerror}") from None
        if len(content) > _MAX_FILE_BYTES:
            raise SchedulerError(f"{file} is larger than {_MAX_FILE_BYTES:,} bytes")
        try:
            document = read_json(content)
        except ValueError:
            document = None
        is_document = isinstance(document, dict) and document.pop("format", None) == FORMAT
        return document if is_document else None, _version(content)

    def _write(self, name: str, document: dict[str, Any]) -> str:
        """Replace a document; return its version."""
        document = {"format": FORMAT, **document}
        content = json.dumps(document, ensure_ascii=False, sort_keys=True, allow_nan=False).encode() + b"\n"
        if len(content) > _MAX_FILE_BYTES:
            raise SchedulerError(f"{name} has {len(content):,} bytes, more than {_MAX_FILE_BYTES:,}")
        write_bytes(self.path / f"{name}.json", content)
        fsync_path(self.path)
        return _version(content)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold a document's lock; file errors in the block become ``SchedulerError``."""
        if not self.path.is_dir():
            raise SchedulerError(f"{self.path} does not exist: check that its disk is mounted")
        if self.path.stat().st_mode & stat.S_IWOTH:
            raise SchedulerError(
                f"every user can write to {self.path} and could stop the controller or take the lease: "
                "remove the permission (chmod o-w)"
            )
        lock = FileLock(
            self.path / f".{name}.lock", timeout=_LOCK_WAIT_S, poll_interval=_POLL_S, mode=0o600,
            fallback_to_soft=False, thread_local=False,
        )  # fmt: skip
        try:
            with lock:
                yield
        except Timeout:
            raise _BusyError(f"{self.path}: {name} is locked by another process") from None
        except (InputError, OSError) as error:
            raise SchedulerError(f"{self.path / f'{name}.json'}: {error}") from None


def _version(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]
