"""Turns messages of GPU drivers into events, with per-node state from earlier messages."""

import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple, Protocol

from foundation.errors import InputError
from telemetry.accounting import Accounting
from telemetry.dataset.event import Event
from telemetry.kernel_log.catalogue import BOOT, FALLEN_OFF, KernelFinding, MessageCatalogue
from telemetry.kernel_log.entries import Entry
from telemetry.kernel_log.stamps import ADVICE, LogContext, Stamp, date_lines, parse_header

TABLE: Final = "kernel log lines"
NOT_ABOUT_A_GPU: Final = "not about a GPU"
WITHOUT_EVENT: Final = "GPU driver message without an event"
WITHOUT_RULE: Final = "GPU driver message without a rule"
UNCLEAR: Final = "no XID number or GPU"
UNDATED: Final = "no usable timestamp"
REPEATED: Final = "the same kernel message a second time"
QUOTED: Final = "kernel message quoted by another program"

_QUOTATION: Final = re.compile(
    r"(?<!\S)(?!kernel\b)[\w./-]+\[\d+\]:\s+(?![\[{<])(?!.*(?:\bkernel\b|\d\d:\d\d)).*[A-Za-z]{2}.*\Z"
)
# Text between a program's syslog tag and the message: a health check or a job log. A forwarder's tag is followed by
# nothing, by the forwarded timestamp, or by ``kernel:``.

_SENTENCE: Final = timedelta(seconds=5)
# The lines of one message arrive within milliseconds, but syslog has a resolution of seconds.
_REMEMBERED: Final = 512
_MAX_OCCURRENCES: Final = 16
_MAX_MESSAGE: Final = 2000
# The kernel truncates messages at about 1000 characters; regular expressions may take quadratic time.
_NO_TIME: Final = timedelta(0)
_GPU_LOST: Final = "79"
_Form = tuple[int, ...]


class LogLine(NamedTuple):
    """A message that may be about a GPU.

    ``when``: None without a timestamp; a key of :data:`telemetry.kernel_log.stamps.ADVICE` if it is ambiguous.
    ``since_boot``: seconds, if the line has them.
    ``history``: the line predates the collector, so ``known_at`` is its time plus the reporting delay.
    ``number``, ``line``: line number in the source, from 1, and its text.
    ``quoted``: a program other than the kernel repeats the message, with a later timestamp.
    ``assumed``: the assumption behind ``when``; see :class:`telemetry.kernel_log.stamps.Dated`.
    ``form``: number and kinds of its timestamps, by which the lines of two programs in one file differ.
    """

    message: str
    when: datetime | str | None
    host: str | None = None
    boot_id: str | None = None
    history: bool = False
    since_boot: float | None = None
    number: int = 0
    line: str = ""
    quoted: bool = False
    assumed: str | None = None
    form: _Form = ()


@dataclass(frozen=True, slots=True)
class Lines:
    """One batch of lines from a source.

    ``position``: resume position after these lines, in JSON types.
    ``n_lines``: number of lines and messages read, including those not about a GPU.
    """

    lines: list[LogLine]
    position: dict[str, Any]
    drained: bool
    n_lines: int = 0


class LogSource(Protocol):
    """Source of kernel messages, created from the resume ``position`` of an earlier process."""

    name: str

    def read(self, wait_s: float) -> Lines:
        """Return the available lines; if there are none, wait up to ``wait_s`` seconds."""
        ...

    def close(self) -> None:
        """Release files and processes."""
        ...


KnownAt = Callable[[datetime, bool], datetime]
"""Earliest time an event could have been known, given its time and whether it predates the collector."""


@dataclass(slots=True)
class _Host:
    """State of a node that later messages depend on.

    ``recent``: last time of each event, by code and GPU. ``seen``: the recent
    times of each message, since boot too, and the forms of the lines that have it.
    """

    boot_id: str | None = None
    uuids: dict[str, str] = field(default_factory=dict)
    addresses: set[str] = field(default_factory=set)
    sentence: tuple[datetime, str | None] | None = None
    recent: dict[tuple[str, str | None], datetime] = field(default_factory=dict)
    seen: OrderedDict[str, deque[tuple[datetime, float | None, set[_Form]]]] = field(default_factory=OrderedDict)
    is_boot_reported: bool = False


def log_lines(
    entries: Iterable[Entry], catalogue: MessageCatalogue, clock: LogContext, *, history: bool = False
) -> list[LogLine]:
    """Return the messages that may be about a GPU, with their times, and one line per new boot id."""
    parsed: list[tuple[Entry, str, str | None, tuple[Stamp, ...]]] = []
    last: tuple[str | None, tuple[Stamp, ...]] = (None, ())
    boots: dict[str | None, str] = {}
    quotations: set[int] = set()
    for entry in entries:
        start = catalogue.start(entry.text)
        if entry.boot_id is not None and boots.get(entry.host) != entry.boot_id:
            boots[entry.host] = entry.boot_id
        elif start < 0:
            continue
        prefix = entry.text[: max(start, 0)]
        header = parse_header(prefix)
        stamps = header.stamps if entry.stored is None else (entry.stored, *header.stamps)
        host = header.host or entry.host
        if not stamps and entry.text[:1].isspace():
            # Continuation of a multi-line message: only the first line has the header.
            host, stamps = last
        last = host, stamps
        message = entry.text[max(start, 0) :][:_MAX_MESSAGE].rstrip()
        if "]: " in prefix and message.startswith("NVRM") and _QUOTATION.search(prefix):
            quotations.add(len(parsed))
        parsed.append((entry, message, host, stamps))
    instants = date_lines([stamps for *_, stamps in parsed], clock)
    return [
        LogLine(
            message,
            when,
            host,
            entry.boot_id,
            history,
            stamps[-1].since_boot if stamps else None,
            entry.number,
            entry.line or entry.text,
            number in quotations,
            assumed,
            (len(stamps), stamps[0].aware is None, stamps[0].yearless, stamps[-1].yearless) if stamps else (),
        )
        for number, ((entry, message, host, stamps), (when, assumed)) in enumerate(zip(parsed, instants, strict=True))
    ]


class KernelLogReader:
    """Converts messages, in log order, to events.

    ``node``: node of messages without a hostname; with ``fixed``, of all messages.
    ``asks``: raise ``InputError`` if the time of an event is ambiguous for lack of a zone, a year or the boot time.
    ``state``: result of :meth:`state` of an earlier reader.
    ``accounting``: table :data:`TABLE`; :meth:`read` counts each message once.
    ``unused``: number, text and reason for each event that could not be parsed or dated.
    ``reported``: reasons already logged with an example.
    """

    def __init__(
        self,
        catalogue: MessageCatalogue,
        *,
        node: str | None = None,
        fixed: bool = False,
        asks: bool = False,
        state: Mapping[str, Any] | None = None,
        source: str = "kernel_log",
    ) -> None:
        self._catalogue, self._source = catalogue, source
        self._node, self._fixed, self._asks = node, fixed, asks
        self._hosts: defaultdict[str | None, _Host] = defaultdict(_Host)
        for name, known in (state or {}).items():
            self._hosts[name] = _Host(
                known.get("boot_id"), dict(known.get("uuids", {})), set(known.get("addresses", ()))
            )
        self.accounting = Accounting()
        self.unused: list[tuple[int, str, str]] = []
        self.reported: set[str] = set()

    def state(self) -> dict[str, Any]:
        """Return the state to resume with, in JSON types."""
        return {
            name: {"boot_id": host.boot_id, "uuids": host.uuids, "addresses": sorted(host.addresses)}
            for name, host in self._hosts.items()
            if name is not None
        }

    def count(self, n_lines: int, messages: int) -> None:
        """Count lines that were read, of which only ``messages`` are passed to :meth:`read`."""
        self.accounting.read(TABLE, n_lines - messages)
        self.accounting.left_out(TABLE, NOT_ABOUT_A_GPU, n_lines - messages)

    def read(self, lines: Iterable[LogLine], known_at: KnownAt = lambda when, _is_history: when) -> Iterator[Event]:
        """Yield the events of the next messages; ``InputError`` without a node or, with ``asks``, a clear time."""
        self._known_at = known_at
        for line in lines:
            node = self._node if self._fixed or line.host is None else line.host
            self.accounting.read(TABLE)
            boot = self._new_boot(line, node)
            if boot is not None:
                yield boot
            outcome = self._read(line, node)
            if isinstance(outcome, Event) or outcome is None:
                self.accounting.used(TABLE)
                if outcome is not None:
                    if line.assumed is not None:
                        self.accounting.assumed(TABLE, line.assumed, example=line.line or line.message)
                    yield outcome
            else:
                example = None if outcome == NOT_ABOUT_A_GPU else line.line or line.message
                self.accounting.left_out(TABLE, outcome, example=example)
                if outcome in (UNCLEAR, UNDATED):
                    self.unused.append((line.number, line.line or line.message, outcome))

    def _new_boot(self, line: LogLine, node: str | None) -> Event | None:
        if line.boot_id is None or node is None or self._hosts[node].boot_id == line.boot_id:
            return None
        is_first = self._hosts[node].boot_id is None
        self._hosts[node] = _Host(line.boot_id, is_boot_reported=not is_first)
        if is_first or not isinstance(line.when, datetime):
            return None
        known_at = self._known_at(line.when, line.history)
        return Event(line.when, node, "other", self._source, known_at, BOOT, f"boot id {line.boot_id}")

    def _read(self, line: LogLine, node: str | None) -> Event | str | None:
        """Return the event of a message, the reason for skipping it, or None if it belongs to another event."""
        if line.quoted:
            return QUOTED
        finding = self._catalogue.read(line.message)
        if finding is None:
            return WITHOUT_RULE if self._catalogue.is_driver(line.message) else NOT_ABOUT_A_GPU
        host = self._hosts[node]
        if finding.type == "unclear":
            return UNCLEAR
        if finding.known and finding.pci_bus_id not in host.addresses:
            return NOT_ABOUT_A_GPU
        if finding.pci_bus_id is not None:
            host.addresses.add(finding.pci_bus_id)
            if finding.gpu is not None:
                host.uuids[finding.pci_bus_id] = finding.gpu
        if not finding.type and not finding.part:
            return WITHOUT_EVENT
        when = self._instant(line)
        return UNDATED if when is None else self._event(line, node, when, finding)

    def _event(self, line: LogLine, node: str | None, when: datetime, finding: KernelFinding) -> Event | str | None:
        if node is None:
            raise InputError(
                "the kernel log does not name its node",
                f"line {line.number}: {line.line[:120]}",
                "Give `kernel_log: {node: NAME}` in the mapping (a collector: --node NAME), or name the file after "
                "the node.",
            )
        host = self._hosts[node]
        if _is_seen(host, line, when):
            return REPEATED
        if finding.part:
            finding = _sentence(host, finding, when)
        if finding.code == BOOT:
            # The boot id has already reported the boot of this banner.
            is_known = host.is_boot_reported and line.boot_id is not None
            self._hosts[node] = _Host(line.boot_id or host.boot_id, is_boot_reported=True)
        else:
            is_known = not finding.type or _is_reported(host, finding, when)
        if is_known:
            return None
        gpu = finding.gpu or host.uuids.get(finding.pci_bus_id or "")
        kind, code, detail, _, bus = finding[:5]
        return Event(when, node, kind, self._source, self._known_at(when, line.history), code, detail, gpu, bus)

    def _instant(self, line: LogLine) -> datetime | None:
        if isinstance(line.when, str):
            if self._asks:
                raise InputError(
                    f"the kernel log's timestamps {line.when}",
                    f"line {line.number}: {line.line[:120]}",
                    ADVICE[line.when],
                )
            return None
        return line.when


def _sentence(host: _Host, finding: KernelFinding, when: datetime) -> KernelFinding:
    """Set the GPU of a message split over several lines, known from its first line."""
    if finding.part == "begin":
        host.sentence = when, finding.pci_bus_id
    elif finding.part == "end":
        sentence, host.sentence = host.sentence, None
        if sentence is not None and abs(when - sentence[0]) <= _SENTENCE:
            return finding._replace(pci_bus_id=sentence[1])
    return finding


def _is_reported(host: _Host, finding: KernelFinding, when: datetime) -> bool:
    """Whether a message repeats a recent event of the same GPU; record it otherwise."""
    unit = finding.pci_bus_id or finding.gpu
    if finding.type == "xid":
        if finding.code == _GPU_LOST:
            # The driver follows XID 79 with a text message.
            host.recent[FALLEN_OFF, unit] = when
        return False
    if not finding.repeat_window_s:
        return False
    last = host.recent.get((finding.code, unit))
    if last is not None and _NO_TIME <= when - last < timedelta(seconds=finding.repeat_window_s):
        return True
    host.recent[finding.code, unit] = when
    return False


def _is_seen(host: _Host, line: LogLine, when: datetime) -> bool:
    """Whether another program has already stored the message: the time since boot is unique, the form is another."""
    occurrences = host.seen.setdefault(line.message, deque(maxlen=_MAX_OCCURRENCES))
    while occurrences and abs(when - occurrences[0][0]) > _SENTENCE:
        occurrences.popleft()
    for _, since_boot, forms in occurrences:
        is_timed = since_boot is not None and line.since_boot is not None
        if since_boot == line.since_boot if is_timed else line.form not in forms:
            forms.add(line.form)
            return True
    occurrences.append((when, line.since_boot, {line.form}))
    if len(host.seen) > _REMEMBERED:
        host.seen.popitem(last=False)
    return False
