"""Kernel log lines, from whatever source, to events: XIDs, losses without an XID, driver loads, boots."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple, Protocol

from foundation.errors import InputError
from foundation.running import Wait
from telemetry.collect.event import Event
from telemetry.collect.outbox import Outbox
from telemetry.identity.pci import normalise_pci_bus_id
from telemetry.xids.xid_message import mentions_xid, parse_gpu_introduction, parse_xid_message

_log = logging.getLogger(__name__)
_SAVE_EVERY_S: Final = 5.0
_WAIT_S: Final = 0.5
# A signal sets a flag; it is looked at this often.
_SENTENCE: Final = timedelta(seconds=5)
# The messages of one sentence come within milliseconds; syslog has whole seconds.

FALLEN_OFF: Final = "fallen_off_the_bus"
"""Code of ``failure`` events: the driver lost a GPU and says so without an XID."""

BOOT: Final = "boot"
"""Code of ``other`` events: the node's kernel started."""

_ADDRESS = r"(?P<address>(?:PCI:)?(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"
_LOST = re.compile(rf"NVRM:(?!.*\bXid\b).*?\bGPU\s+(?:at\s+)?{_ADDRESS}\W.*?fallen off the bus", re.DOTALL)
# At boot it is one sentence over four messages, of which the first names the GPU and the last what befell it.
_LOSS_BEGINS: Final = re.compile(rf"NVRM:\s*The NVIDIA GPU\s+{_ADDRESS}\s*(?:\(.*)?\Z", re.DOTALL)
_LOSS_ENDS: Final = re.compile(r"NVRM:\s*(?:installed in this system has\s+)?fallen off the bus and is not responding")
_DRIVER = re.compile(r"NVRM:\s*loading NVIDIA UNIX\b.*?\bKernel Module\b.*?\s(?P<version>\d{2,4}\.\d+(?:\.\d+)*)\b")
_KERNEL = re.compile(r"\s*Linux version (?P<version>\d+\.\d+\S*)\s")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One kernel message.

    ``when``: None where the stamp cannot be read.
    ``history``: it is older than the collector: its events are dated as an import would date them, not as news.
    """

    message: str
    when: datetime | None
    host: str | None = None
    boot_id: str | None = None
    history: bool = False


@dataclass(frozen=True, slots=True)
class Lines:
    """What a source gives in one read; ``position`` is where to go on after these lines, in JSON types."""

    lines: list[LogLine]
    position: dict[str, Any]
    drained: bool


class LogSource(Protocol):
    """Where kernel messages come from; made from the ``position`` after the lines of an earlier process."""

    name: str

    def read(self, wait_s: float) -> Lines:
        """Return what is there; where that is nothing, after ``wait_s`` seconds."""
        ...

    def close(self) -> None:
        """Let go of files and processes."""
        ...


def collect_kernel_log(
    outbox: Outbox,
    open_source: Callable[[dict[str, Any]], LogSource],
    *,
    node: str | None,
    fixed: bool,
    clock: Callable[[], datetime],
    stop: Wait,
    once: bool,
    delay: timedelta = timedelta(minutes=10),
) -> dict[str, int]:
    """Read until the source is drained (``once``) or ``stop(seconds)``, which waits, is true; land the events.

    Returns: counts of :class:`KernelEvents`. Raises ``InputError`` if the source cannot be read, the disk is full, or
    no node is known of a line about a GPU.
    """
    position = dict(outbox.position.get("source", {}))
    source = open_source(dict(position))
    try:
        reader = KernelEvents(
            source.name, node=node, fixed=fixed, clock=clock, delay=delay, state=outbox.position.get("nodes")
        )
        saved_at_s = time.monotonic()
        while True:
            batch = source.read(0.0 if once else _WAIT_S)
            events = reader.read(batch.lines)
            leaving = stop(0.0) or (once and batch.drained)
            is_due = leaving or time.monotonic() - saved_at_s >= _SAVE_EVERY_S
            if events or (is_due and batch.position != position):
                outbox.commit({"source": batch.position, "nodes": reader.state()}, events=events)
                outbox.flush()
                saved_at_s, position = time.monotonic(), batch.position
            if leaving:
                return {name: reader.counts[name] for name in ("lines", "events", "unclear", "undated")}
            if once and not batch.lines:
                stop(0.01)
    finally:
        source.close()


class Finding(NamedTuple):
    """An event that a message reports; the fields are as in :class:`telemetry.collect.event.Event`."""

    type: str
    code: str
    detail: str | None = None
    gpu: str | None = None
    pci_bus_id: str | None = None


UNCLEAR: Final = Finding("xid", "")
"""A message about an XID that has no code or no GPU."""

_LOSS: Final = Finding("failure", FALLEN_OFF, "the driver says that the GPU fell off the bus")


def read_message(message: str, *, boots: bool = True) -> Finding | None:
    """Read one kernel message, from ``NVRM:`` on or before; None if it reports no event.

    ``boots``: whether the kernel's first message is a boot; False where boots are known by their id.
    """
    if "NVRM" not in message:
        kernel = _KERNEL.match(message) if boots else None
        return None if kernel is None else Finding("other", BOOT, f"Linux {kernel['version']}")
    if mentions_xid(message):
        xid = parse_xid_message(message)
        if xid is None:
            return UNCLEAR
        return Finding("xid", xid.code, xid.detail, xid.gpu, xid.pci_bus_id)
    if driver := _DRIVER.search(message):
        return Finding("driver", driver["version"], "open kernel module" if "Open Kernel" in message else None)
    lost = _LOST.search(message)
    return None if lost is None else _LOSS._replace(pci_bus_id=normalise_pci_bus_id(lost["address"]))


@dataclass(slots=True)
class _Host:
    """What earlier messages of a node say of later ones."""

    boot_id: str | None = None
    uuids: dict[str, str] = field(default_factory=dict)
    lost: tuple[datetime, str | None] | None = None


class KernelEvents:
    """Reads lines in their order and gives events.

    ``source``: name of a :class:`LogSource`; the events' source is ``kernel_log:NAME``, so that an event that two of
    them report is recognised as one, and repeats within one are not.
    ``node``: node of lines that name no host; with ``fixed``, of all.
    ``delay``: ``known_at`` of history is its time plus this, now at the latest.
    ``counts``: ``lines``, ``events``, ``unclear`` (about an XID, without a code or a GPU) and ``undated``.
    """

    def __init__(
        self,
        source: str,
        *,
        node: str | None,
        clock: Callable[[], datetime],
        fixed: bool = False,
        delay: timedelta = timedelta(minutes=10),
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._source = f"kernel_log:{source}"
        self._has_boot_ids = source != "file"
        self._node, self._fixed, self._clock, self._delay = node, fixed, clock, delay
        self._hosts: defaultdict[str, _Host] = defaultdict(_Host)
        for name, kept in (state or {}).items():
            self._hosts[name] = _Host(kept.get("boot_id"), dict(kept.get("uuids", {})))
        self.counts: Counter[str] = Counter()

    def state(self) -> dict[str, Any]:
        """Return, in JSON types, what a next process needs to read on."""
        return {name: {"boot_id": host.boot_id, "uuids": host.uuids} for name, host in self._hosts.items()}

    def read(self, lines: Iterable[LogLine]) -> list[Event]:
        """Return the events of further lines."""
        now = self._clock()
        events: list[Event] = []
        for line in lines:
            self.counts["lines"] += 1
            node = self._node if self._fixed or line.host is None else line.host
            for finding in self._boot(line, node), self._message(line, node):
                if finding is None or line.when is None or node is None:
                    continue
                known_at = min(now, line.when + self._delay) if line.history else now
                events.append(Event(line.when, node, finding.type, self._source, known_at, *finding[1:]))
        self.counts["events"] += len(events)
        return events

    def _boot(self, line: LogLine, node: str | None) -> Finding | None:
        if line.boot_id is None or node is None or self._hosts[node].boot_id == line.boot_id:
            return None
        is_first = self._hosts[node].boot_id is None
        self._hosts[node] = _Host(line.boot_id)
        return None if is_first else Finding("other", BOOT, f"boot id {line.boot_id}")

    def _message(self, line: LogLine, node: str | None) -> Finding | None:
        finding = read_message(line.message, boots=not self._has_boot_ids)
        if finding is UNCLEAR:
            self._count("unclear", "an XID message has no code or no GPU", line)
            return None
        if finding is None and "NVRM" not in line.message:
            return None
        introduced = parse_gpu_introduction(line.message)
        begins, ends = _LOSS_BEGINS.search(line.message), _LOSS_ENDS.search(line.message)
        if not (finding or introduced or begins or ends):
            return None
        if line.when is None:
            self._count("undated", "the time stamp cannot be read", line)
            return None
        if node is None:
            where = f"{self._source}, line {self.counts['lines']}"
            raise InputError("a line about a GPU names no host", where, "Give --node NAME.")
        host = self._hosts[node]
        if introduced:
            host.uuids[introduced[0]] = introduced[1]
        elif begins:
            host.lost = line.when, normalise_pci_bus_id(begins["address"])
        elif ends:
            begun, host.lost = host.lost, None
            is_near = begun is not None and abs(line.when - begun[0]) <= _SENTENCE
            finding = _LOSS._replace(pci_bus_id=begun[1] if begun is not None and is_near else None)
        if finding is not None and finding.code == BOOT:
            host.uuids.clear()
        if finding is not None and finding.gpu is None and finding.pci_bus_id is not None:
            finding = finding._replace(gpu=host.uuids.get(finding.pci_bus_id))
        return finding

    def _count(self, what: str, problem: str, line: LogLine) -> None:
        self.counts[what] += 1
        if self.counts[what] == 1:
            _log.warning("%s: %r (further ones are only counted, as %s)", problem, line.message[:160], what)
