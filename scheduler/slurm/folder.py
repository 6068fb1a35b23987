"""State, switches, lease and requests, for which Slurm has no place: files on a disk that the controllers share."""

import contextlib
import hashlib
import json
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from filelock import FileLock, Timeout

from foundation.errors import InputError
from foundation.files import fsync_path, write_bytes
from scheduler.ports.codec import object_of, plain_of, read_json
from scheduler.ports.errors import SchedulerError
from scheduler.ports.lease import ObservedLease, bounded_s
from scheduler.ports.protocols import Clock
from scheduler.ports.readings import StoredState, Switches, WriteResult

T = TypeVar("T")

FORMAT: Final = 1
NONE_YET: Final = "none"
_LONGEST_FILE: Final = 8 * 2**20
_LOCK_WAIT_S: Final = 10.0
_POLL_S: Final = 0.02
_MANY_LEASES: Final = 3
# By the file server's clock alone, a lease that was not prolonged for so many times its length has ended.


class _BusyError(SchedulerError):
    """Another process has the lock."""


@dataclass(frozen=True, slots=True)
class _Held:
    holder: str
    beat: str
    duration_s: float
    at: str


class SharedFolder:
    """Small documents, each a file that is replaced as a whole under a lock.

    ``path``: must exist: a disk that is not mounted would otherwise look like an empty one.
    ``monotonic``: gives seconds that never go back.
    Raises ``InputError`` if there is no such folder, or everybody may write into it.

    The lease of another holder has ended when its file did not change for its length, by our own observation: by our
    monotonic clock, or, for a process that has only just started, when the file server has dated it three lengths
    before a file that we write now. No two machines' clocks are compared.
    """

    def __init__(self, path: Path, clock: Clock, monotonic: Callable[[], float] = time.monotonic) -> None:
        if not path.is_dir():
            raise InputError(
                "the state folder of the controllers does not exist", str(path),
                "Create it on a disk shared by all controllers, or mount the disk.",
            )  # fmt: skip
        if path.stat().st_mode & stat.S_IWOTH:
            raise InputError(
                "every user can write to the state folder of the controllers", str(path),
                "Remove the permission (chmod o-w): writers can stop the controller or take the lease.",
            )  # fmt: skip
        self.path = path
        self._clock, self._monotonic = clock, monotonic
        self._own: tuple[_Held, float] | None = None  # the own lease, and its end by the monotonic clock
        self._observed = ObservedLease()

    def load(self, name: str) -> StoredState:
        """Read a text with its version; raises ``SchedulerError`` if it cannot be read."""
        document, version = self._read(name)
        if version == NONE_YET:
            return StoredState(None, version)
        text = (document or {}).get("text")
        return StoredState(text if isinstance(text, str) else f"damaged {name}.json", version)

    def save(self, name: str, text: str, version: str) -> WriteResult:
        """Replace a text that still has this version; the answer holds the new one."""
        try:
            with self._locked(name):
                stored = self.load(name)
                if stored.version != version:
                    return WriteResult("conflict", f"{name} has version {stored.version}, expected {version}")
                if stored.text == text:
                    return WriteResult("already", "no change", (), version)
                return WriteResult("done", "", (), self._write(name, {"token": secrets.token_hex(8), "text": text}))
        except SchedulerError as error:
            return WriteResult("refused", str(error))  # the file is replaced as a whole or not at all

    def read_switches(self) -> Switches:
        """Read the switches.

        Raises ``SchedulerError`` if they cannot be read: a person may have set the kill switch.
        """
        return self._object("switches", Switches) or Switches()

    def set_switches(self, switches: Switches) -> WriteResult:
        """Set the switches."""
        try:
            with self._locked("switches"):
                self._write("switches", plain_of(switches))
                return WriteResult("done")
        except SchedulerError as error:
            return WriteResult("refused", str(error))

    def hold_lease(self, holder: str, duration: timedelta) -> datetime | None:
        """Take the lease, or prolong one's own; None: another one holds it.

        Raises ``SchedulerError`` if the file cannot be read or written.
        """
        before, began = self._clock.now(), self._monotonic()
        self._own = None
        try:
            with self._locked("lease"):
                lease = self._lease()
                if lease is not None and lease.holder != holder and not self._ended(lease, began):
                    return None
                lease_taken = _Held(holder, secrets.token_hex(8), duration.total_seconds(), before.isoformat())
                self._write("lease", plain_of(lease_taken))
        except _BusyError:  # whoever holds the lock writes under the lease at this moment
            return None
        self._observed.forget()
        self._own = lease_taken, began + duration.total_seconds()
        return before + duration

    def drop_lease(self, holder: str) -> None:
        """Give the lease back, if it is held; a failure is passed over."""
        self._own = None
        with contextlib.suppress(SchedulerError), self._locked("lease"):
            lease = self._lease()
            if lease is not None and lease.holder == holder:
                (self.path / "lease.json").unlink()

    @contextlib.contextmanager
    def fenced(self, holder: str, until: datetime) -> Iterator[str | None]:
        """Keep every other process from taking the lease for the length of a block, if ``holder`` has it.

        Yields: why nothing may be written; None: it may.
        Raises ``SchedulerError`` if the file cannot be locked or read.
        """
        with self._locked("lease"):
            own, ends = self._own or (None, 0.0)
            lease = self._lease()
            if own is None or own.holder != holder:
                yield f"{holder} does not hold the lease"
            elif lease is None or (lease.holder, lease.beat) != (own.holder, own.beat):
                yield f"{holder} no longer holds the lease"
            elif self._monotonic() >= ends or self._clock.now() >= until:
                yield f"the lease of {holder} has expired"
            else:
                yield None

    def guarded(self, holder: str, until: datetime, call: Callable[[], WriteResult]) -> WriteResult:
        """Make a write under the lease, and return its answer; what cannot be read is not written."""
        try:
            with self.fenced(holder, until) as barred:
                return call() if barred is None else WriteResult("refused", barred)
        except SchedulerError as error:
            return WriteResult("refused", f"nothing was written: {error}")

    def note(self, name: str, key: str, value: dict[str, Any], keep: Callable[[dict[str, Any]], bool]) -> None:
        """Put one entry into a document of entries, and drop those that need not be kept.

        Raises ``SchedulerError`` if it is not certain to be stored.
        """
        with self._locked(name):
            entries = {name: entry for name, entry in self.notes(name).items() if keep(entry)}
            self._write(name, {"entries": {**entries, key: value}})

    def notes(self, name: str) -> dict[str, dict[str, Any]]:
        """Read a document of entries, none if it is damaged; raises ``SchedulerError`` if it cannot be read."""
        entries = (self._read(name)[0] or {}).get("entries")
        if not isinstance(entries, dict):
            return {}
        return {key: entry for key, entry in entries.items() if isinstance(entry, dict)}

    def _ended(self, lease: _Held, now: float) -> bool:
        if self._observed.left_s(lease.beat, lease.duration_s, now) <= 0:
            return True
        probe = self.path / f".probe-{secrets.token_hex(4)}"
        try:
            probe.write_bytes(b"")
            age = probe.stat().st_mtime - (self.path / "lease.json").stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)
        return age >= _MANY_LEASES * bounded_s(lease.duration_s)

    def _lease(self) -> _Held | None:
        return self._object("lease", _Held, "; remove it when no controller runs")

    def _object(self, name: str, kind: type[T], hint: str = "") -> T | None:
        document, version = self._read(name)
        try:
            if document is None:
                raise ValueError("it is damaged, or of another format")
            return None if version == NONE_YET else cast(T, object_of(kind, document, name))
        except ValueError as error:
            raise SchedulerError(f"{self.path / f'{name}.json'}: {error}{hint}") from None

    def _read(self, name: str) -> tuple[dict[str, Any] | None, str]:
        """Read a document and its version, ``NONE_YET`` where there is none; None: it is damaged."""
        file = self.path / f"{name}.json"
        try:
            with file.open("rb") as stream:
                content = stream.read(_LONGEST_FILE + 1)
        except FileNotFoundError:
            if self.path.is_dir():
                return {}, NONE_YET
            raise SchedulerError(f"{self.path} does not exist: check that its disk is mounted") from None
        except OSError as error:
            raise SchedulerError(f"{file}: {error.strerror}") from None
        if len(content) > _LONGEST_FILE:
            raise SchedulerError(f"{file} is larger than {_LONGEST_FILE:,} bytes")
        try:
            document = read_json(content)
        except ValueError:
            document = None
        good = isinstance(document, dict) and document.pop("format", None) == FORMAT
        return document if good else None, _version(content)

    def _write(self, name: str, document: dict[str, Any]) -> str:
        """Replace a document; returns its version."""
        document = {"format": FORMAT, **document}
        content = json.dumps(document, ensure_ascii=False, sort_keys=True, allow_nan=False).encode() + b"\n"
        if len(content) > _LONGEST_FILE:
            raise SchedulerError(f"{name} has {len(content):,} bytes, more than {_LONGEST_FILE:,}")
        write_bytes(self.path / f"{name}.json", content)
        fsync_path(self.path)
        return _version(content)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold a document's lock; what goes wrong with its file in the block is a ``SchedulerError``."""
        if not self.path.is_dir():
            raise SchedulerError(f"{self.path} does not exist: check that its disk is mounted")
        lock = FileLock(
            self.path / f".{name}.lock", timeout=_LOCK_WAIT_S, poll_interval=_POLL_S, mode=0o600, fallback_to_soft=False
        )
        try:
            with lock:
                yield
        except Timeout:
            raise _BusyError(f"{self.path}: {name} is locked by another process") from None
        except (InputError, OSError) as error:
            raise SchedulerError(f"{self.path / f'{name}.json'}: {error}") from None


def _version(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]
