"""The kernel's own ring, ``/dev/kmsg``: one record a read, numbered within a boot (kernel: ABI/testing/dev-kmsg)."""

from __future__ import annotations

import errno
import logging
import os
import re
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, Protocol

from telemetry.collect.kernel_log.lines import Lines, LogLine
from telemetry.errors import InputError
from telemetry.milliseconds import from_ms, to_ms

_log = logging.getLogger(__name__)
DEVICE: Final = Path("/dev/kmsg")
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_RECORD = re.compile(r"(?P<level>\d+),(?P<sequence>\d+),(?P<since_us>\d+),(?P<flags>[^,;]*)(?P<more>[^;]*);")
_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})")
_CALLER = re.compile(r"caller=([^,]+)")
_OWN_LINE = re.compile(r"\w[\w .-]*:\s")
_MOST_RECORDS: Final = 2000
_MOST_LINE: Final = 16_384
_RECORD_BYTES: Final = 65_536
# A record is at most 8 kB (kernel: CONSOLE_EXT_LOG_MAX); a smaller buffer than the record makes read() fail.


class Device(Protocol):
    """Something that gives one record a read, as an open ``/dev/kmsg`` does."""

    def read(self) -> bytes:
        """Return one record; BlockingIOError where there is none, OSError EPIPE where the next one was overwritten."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait for a record; whether there is one."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class OpenDevice:
    """An open descriptor that gives one record a read."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> bytes:
        """Return one record; see :class:`Device`."""
        return os.read(self._descriptor, _RECORD_BYTES)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a record; whether there is one."""
        return bool(select.select([self._descriptor], [], [], timeout_s)[0])

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)


def open_kmsg(path: Path = DEVICE) -> OpenDevice:
    """Open the ring, at its oldest record.

    Raises ``InputError`` if it is not there or this user may not read it.
    """
    try:
        return OpenDevice(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        raise InputError(
            f"the kernel log cannot be read: {os.strerror(error.errno or 0)}",
            str(path),
            "Run as root or with CAP_SYSLOG, or take `--source journal`.",
        ) from None


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the ring.

    ``continues``: ``-``: a line of its own; ``c`` or ``+``: a fragment of one.
    """

    sequence: int
    since_us: int
    continues: str
    caller: str | None
    message: str


def parse_record(raw: bytes) -> Record | None:
    r"""Parse ``level,sequence,microseconds,flags[,caller=…];message``; None if it is none.

    Lines after the first are the device's properties, and left out. Bytes that are not printable are written as
    ``\xNN`` by the kernel, and brought back.
    """
    text = raw.decode("utf-8", errors="replace")
    head = _RECORD.match(text)
    if head is None:
        return None
    first = text[head.end() :].split("\n", 1)[0]
    message = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), first)
    caller = _CALLER.search(head["more"])
    flag = "+" if "+" in head["flags"] else "c" if "c" in head["flags"] else "-"
    return Record(int(head["sequence"]), int(head["since_us"]), flag, caller[1] if caller else None, message)


def running_boot() -> str:
    """Return the id of the running boot.

    Raises ``InputError`` if the kernel does not tell it.
    """
    try:
        return BOOT_ID.read_text(encoding="ascii").strip().replace("-", "")
    except OSError as error:
        raise InputError(
            f"the boot id cannot be read: {error.strerror}", str(BOOT_ID), "Mount /proc, or take `--source journal`."
        ) from None


def since_boot_s() -> float:
    """Return seconds since boot without those asleep, as the log's stamps count them."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Kmsg:
    """Follows the ring.

    ``position``: what :class:`Lines` of an earlier process ended with; empty for none.
    ``device``: Default: :func:`open_kmsg`.
    ``boot_id``: Default: :func:`running_boot`.

    The log's clock is not disciplined by NTP and wanders by seconds a week against the wall clock. The moment of boot
    is therefore taken anew from each record that arrives while it is waited for, and kept for the next process.
    """

    name = "kmsg"

    def __init__(
        self,
        position: Mapping[str, Any],
        *,
        clock: Callable[[], datetime],
        device: Device | None = None,
        boot_id: str | None = None,
        uptime_s: Callable[[], float] = since_boot_s,
    ) -> None:
        self._clock = clock
        self._boot_id = boot_id or running_boot()
        self._device = device or open_kmsg()
        same = position.get("boot_id") == self._boot_id
        self._last: int | None = int(position["sequence"]) if same and position.get("sequence") is not None else None
        self._booted = from_ms(position["booted_ms"]) if same else clock() - timedelta(seconds=uptime_s())
        self._seen = self._last
        self._history = not position
        self._open: Record | None = None
        self._waits = False

    def read(self, wait_s: float) -> Lines:
        """Return what is there; see :class:`LogSource`."""
        fresh = wait_s > 0 and self._waits and self._device.wait(wait_s)
        lines: list[LogLine] = []
        lost, drained = 0, False
        for _ in range(_MOST_RECORDS):
            raw = self._raw()
            if raw is None:
                drained = True
                break
            record = parse_record(raw) if raw else None
            if record is None:
                if raw:
                    _log.warning("a record of the kernel log cannot be read: %r", raw[:120])
                continue
            if self._last is not None and record.sequence <= self._last:
                continue
            if self._seen is not None:
                lost += max(record.sequence - self._seen - 1, 0)
            self._seen = record.sequence
            if fresh:
                self._booted, fresh = self._clock() - timedelta(microseconds=record.since_us), False
            lines += self._joined(record)
        if drained:
            lines += self._finished()
            self._history = False
        self._waits = drained
        return Lines(lines, self._position(), drained, lost)

    def _raw(self) -> bytes | None:
        """Return a record, nothing where one was overwritten, or None where there is none."""
        try:
            return self._device.read() or None
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno == errno.EPIPE:  # the ring overran; the next read gives what is now the oldest
                return b""
            raise

    def close(self) -> None:
        """Close the device."""
        self._device.close()

    def _position(self) -> dict[str, Any]:
        # A line that is still open is read again by the next process: its fragments stand in the ring.
        return {"boot_id": self._boot_id, "sequence": self._last, "booted_ms": to_ms(self._booted)}

    def _joined(self, record: Record) -> list[LogLine]:
        """Take a record in; return the line that ends before it."""
        before = self._open
        joins = (
            before is not None
            and record.continues != "-"
            and record.caller == before.caller
            and len(before.message) < _MOST_LINE
            # Kernels differ in whether "c" is the first fragment or a later one: what begins like a line is one.
            and (record.continues == "+" or not _OWN_LINE.match(record.message))
        )
        if joins:
            assert before is not None
            whole = before.message + record.message
            self._open = Record(record.sequence, before.since_us, "-", before.caller, whole)
            return []
        done = self._finished()
        self._open = record
        return done

    def _finished(self) -> list[LogLine]:
        record, self._open = self._open, None
        if record is None:
            return []
        self._last = record.sequence
        when = self._booted + timedelta(microseconds=record.since_us)
        return [LogLine(record.message, when, None, self._boot_id, self._history)]
