"""Kernel log lines, from whatever source, to events that land."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final, Protocol

from telemetry.collect.event import Event
from telemetry.collect.kernel_log.message import BOOT, Finding, lost_gpu, read_message
from telemetry.collect.outbox import Outbox
from telemetry.collect.running import Wait
from telemetry.errors import InputError

_log = logging.getLogger(__name__)
_SAVE_EVERY_S: Final = 5.0
_WAIT_S: Final = 0.5
# A signal sets a flag; it is looked at this often.
_COUNTS: Final = ("lines", "events", "unclear", "undated")


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
    monotonic: Callable[[], float] = time.monotonic,
) -> dict[str, int]:
    """Read until the source is drained (``once``) or ``stop`` says so, and land the events found.

    ``stop``: ``stop(0)`` is true when the collector shall leave; ``stop(s)`` waits.
    Returns: counts of :class:`KernelEvents`.
    Raises ``InputError`` if the source cannot be read, the disk is full, or a line about a GPU names no node and
    ``node`` is not given.
    """
    held = outbox.position
    source = open_source(dict(held.get("source", {})))
    try:
        events = KernelEvents(source.name, node=node, fixed=fixed, clock=clock, delay=delay, state=held.get("nodes"))
        saved_at = monotonic()
        position = dict(held.get("source", {}))
        while True:
            got = source.read(0.0 if once else _WAIT_S)
            found = events.read(got.lines)
            if events.counts["no_node"]:  # before anything is noted as read
                raise InputError(
                    "a line about a GPU names no host",
                    f"--source {source.name}, line {events.counts['lines']} or before",
                    "Give --node NAME.",
                )
            moved = got.position != position
            leaving = stop(0.0) or (once and got.drained)
            if found or (moved and (leaving or monotonic() - saved_at >= _SAVE_EVERY_S)):
                outbox.commit({"source": got.position, "nodes": events.state()}, events=found)
                outbox.flush()
                saved_at, position = monotonic(), got.position
            if leaving:
                break
            if once and not got.lines:
                stop(0.01)
        return {name: int(events.counts[name]) for name in _COUNTS}
    finally:
        source.close()


_MAX_NODES: Final = 20_000
_SENTENCE: Final = timedelta(seconds=5)
# The four messages of the oldest form of a loss come within milliseconds; syslog has whole seconds.


@dataclass(frozen=True, slots=True)
class LogLine:
    """One kernel message.

    ``when``: None where the stamp cannot be read.
    ``history``: it was there before anybody collected: its events are dated as an import would date them, not as news.
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
    """Where kernel messages come from: ``journal`` or ``file``.

    Each is made from the ``position`` that the lines of an earlier process ended with, or an empty one.
    """

    name: str

    def read(self, wait_s: float) -> Lines:
        """Return what is there, waiting up to ``wait_s`` seconds if that is nothing."""
        ...

    def close(self) -> None:
        """Let go of files and processes."""
        ...


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
    ``counts``: ``lines``, ``events``, ``unclear`` (about an XID, without a code or a GPU), ``undated`` and ``no_node``.
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
        self._by_id = source != "file"
        self._node, self._fixed, self._clock, self._delay = node, fixed, clock, delay
        self._hosts: OrderedDict[str, _Host] = OrderedDict()
        for name, kept in (state or {}).items():
            self._hosts[name] = _Host(kept.get("boot_id"), dict(kept.get("uuids", {})))
        self.counts: Counter[str] = Counter()

    def state(self) -> dict[str, Any]:
        """Return, in JSON types, what a next process needs to read on."""
        return {
            name: {"boot_id": host.boot_id, "uuids": host.uuids}
            for name, host in self._hosts.items()
            if host.boot_id is not None or host.uuids
        }

    def read(self, lines: Iterable[LogLine]) -> list[Event]:
        """Return the events of further lines."""
        now = self._clock()
        events: list[Event] = []
        for line in lines:
            self.counts["lines"] += 1
            if line.boot_id is not None:
                events += self._boot(line, now)
            finding = read_message(line.message, boots=not self._by_id)
            if finding is not None:
                events += self._found(finding, line, now)
        self.counts["events"] += len(events)
        return events

    def _found(self, finding: Finding, line: LogLine, now: datetime) -> list[Event]:
        node = self._name(line)
        if finding.kind == "unclear":
            self._odd("unclear", "an XID message tells no code or no GPU", line)
            return []
        if line.when is None:
            self._odd("undated", "the time stamp cannot be read", line)
            return []
        if node is None:
            self.counts["no_node"] += 1
            return []
        host = self._host(node)
        if finding.kind == "introduction":
            assert finding.gpu is not None
            assert finding.pci_bus_id is not None
            host.uuids[finding.pci_bus_id] = finding.gpu
            return []
        if finding.kind == "lost_begins":
            host.lost = (line.when, finding.pci_bus_id)
            return []
        if finding.kind == "lost_ends":
            begun, host.lost = host.lost, None
            near = begun is not None and abs(line.when - begun[0]) <= _SENTENCE
            finding = lost_gpu(begun[1] if begun is not None and near else None)
        if finding.code == BOOT and finding.type == "other":
            host.uuids.clear()
        if finding.gpu is None and finding.pci_bus_id is not None:
            finding = replace(finding, gpu=host.uuids.get(finding.pci_bus_id))
        return [self._event(finding, node, line, now)]

    def _boot(self, line: LogLine, now: datetime) -> list[Event]:
        node = self._name(line)
        if node is None:
            return []
        host = self._host(node)
        before = host.boot_id
        if before == line.boot_id:
            return []
        host.boot_id = line.boot_id
        host.uuids.clear()
        if before is None or line.when is None:
            return []
        return [self._event(Finding("event", "other", BOOT, f"boot id {line.boot_id}"), node, line, now)]

    def _event(self, finding: Finding, node: str, line: LogLine, now: datetime) -> Event:
        assert line.when is not None
        return Event(
            timestamp=line.when,
            node=node,
            type=finding.type,
            source=self._source,
            known_at=min(now, line.when + self._delay) if line.history else now,
            code=finding.code,
            detail=finding.detail,
            gpu=finding.gpu,
            pci_bus_id=finding.pci_bus_id,
        )

    def _name(self, line: LogLine) -> str | None:
        return self._node if self._fixed or line.host is None else line.host

    def _host(self, node: str) -> _Host:
        host = self._hosts.get(node)
        if host is None:
            host = self._hosts[node] = _Host()
            if len(self._hosts) > _MAX_NODES:  # a log with made-up host names must not fill the memory
                self._hosts.popitem(last=False)
        return host

    def _odd(self, what: str, why: str, line: LogLine) -> None:
        self.counts[what] += 1
        if self.counts[what] == 1:  # once; the count tells of the rest
            _log.warning("%s: %r (further ones are only counted, as %s)", why, line.message[:160], what)
