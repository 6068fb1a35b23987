"""What a command read and what became of it: every row, line, event or sample is used, left out for a reason, or waits.

One :class:`Accounting` is filled along the way and reported at the end: :func:`as_text` is the table that every command
prints, ``as_dict`` the key ``accounting`` of its ``--json``, :func:`metrics` what a running collector exposes.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from prometheus_client.core import Metric

EXAMPLE_LENGTH: Final = 300

MAX_REASONS: Final = 200
"""Reasons of one table: a hostile source may make up a new one for each row."""

FURTHER: Final = "further reasons"
"""Reason of what is beyond :data:`MAX_REASONS`."""


@dataclass(slots=True)
class Account:
    """The rows of one table (``samples``, ``events``, ``kernel log lines``, ``jobs`` …).

    ``left_out`` and ``waiting`` are counts by reason; ``examples`` has one example a reason.
    ``assumed``: used rows with an uncertain value, by assumption.
    """

    read: int = 0
    used: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    waiting: Counter[str] = field(default_factory=Counter)
    assumed: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def unaccounted(self) -> int:
        """Rows that are neither used, nor left out, nor waiting; 0 unless a reader loses rows."""
        return self.read - self.used - self.left_out.total() - self.waiting.total()


class Accounting:
    """Counts by table; order of tables is the order in which they were first named."""

    def __init__(self) -> None:
        self.tables: defaultdict[str, Account] = defaultdict(Account)
        self._lock = threading.Lock()

    def read(self, table: str, number: int = 1) -> None:
        """Count rows that were read."""
        self.tables[table].read += number

    def used(self, table: str, number: int = 1) -> None:
        """Count rows that are in the result; an exact repeat of such a row is used, too."""
        self.tables[table].used += number

    def left_out(self, table: str, reason: str, number: int = 1, example: object = None) -> None:
        """Count rows that are not in the result."""
        self._count(self.tables[table].left_out, table, reason, number, example)

    def waiting(self, table: str, waits_for: str, number: int = 1, example: object = None) -> None:
        """Count rows that are kept for a later run."""
        self._count(self.tables[table].waiting, table, waits_for, number, example)

    def assumed(self, table: str, assumption: str, number: int = 1, example: object = None) -> None:
        """Count used rows that rest on an assumption."""
        self._count(self.tables[table].assumed, table, assumption, number, example)

    def holds(self, table: str, waits_for: str, number: int) -> None:
        """Set how many rows wait at the moment, of a collector that runs."""
        self.tables[table].waiting[waits_for] = number
        if not number:
            del self.tables[table].waiting[waits_for]

    def take(self, table: str, number: int, left_out: Mapping[str, int], example: object = None) -> None:
        """Count rows of which all are used but those left out, by reason; ``example`` may be a mapping by reason."""
        with self._lock:  # collectors read in several threads
            self.read(table, number)
            self.used(table, number - sum(left_out.values()))
            for reason, count in left_out.items():
                self.left_out(table, reason, count, example.get(reason) if isinstance(example, Mapping) else example)

    def _count(self, counts: Counter[str], table: str, reason: str, number: int, example: object) -> None:
        if number:
            reason = reason if reason in counts or len(counts) < MAX_REASONS else FURTHER
            counts[reason] += number
            if example is not None:
                self.tables[table].examples.setdefault(reason, str(example)[:EXAMPLE_LENGTH])

    def add(self, other: "Accounting") -> None:
        """Add the counts of a part of the work."""
        for name, account in other.tables.items():
            total = self.tables[name]
            total.read += account.read
            total.used += account.used
            total.left_out.update(account.left_out)
            total.waiting.update(account.waiting)
            total.assumed.update(account.assumed)
            total.examples = {**account.examples, **total.examples}

    def as_dict(self) -> dict[str, Any]:
        """Return the counts in JSON types: ``{table: {read, used, left_out: [{reason, count, example}], …}}``."""
        return {
            name: {
                "read": account.read,
                "used": account.used,
                "left_out": _reasons(account.left_out, account.examples),
                "waiting": _reasons(account.waiting, account.examples),
                "assumed": _reasons(account.assumed, account.examples),
            }
            for name, account in self.tables.items()
        }


def _reasons(counts: Counter[str], examples: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {"reason": reason, "count": count, "example": examples.get(reason)} for reason, count in counts.most_common()
    ]


def as_text(accounting: Accounting) -> str:
    """Return the table that a command ends with: a line a table of rows, and one for each reason with an example."""
    lines = [f"{'':<24}{'read':>12}{'used':>12}{'left out':>12}{'waiting':>12}"] if accounting.tables else []
    for name, account in accounting.tables.items():
        numbers = (account.read, account.used, account.left_out.total(), account.waiting.total())
        lines.append(f"{name:<24}" + "".join(f"{number:>12,}" for number in numbers))
        sections = {"left out": account.left_out, "waiting for": account.waiting, "assumed": account.assumed}
        for title, counts in sections.items():
            for reason, count in counts.most_common():
                example = account.examples.get(reason)
                lines.append(f"  {title}: {count:,} {reason}" + (f", such as {example}" if example else ""))
        if account.unaccounted:
            lines.append(f"  unaccounted: {account.unaccounted:,}; please report this")
    return "".join(f"{line}\n" for line in lines)


def metrics(accounting: Accounting) -> "Iterator[Metric]":
    """Yield the counts for the ``collect`` of a collector that is registered with ``prometheus_client``."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    reasons = ["table", "reason"]
    read = CounterMetricFamily("predrain_ingest_read", "Rows that were read.", labels=["table"])
    used = CounterMetricFamily("predrain_ingest_used", "Rows that were used.", labels=["table"])
    left_out = CounterMetricFamily("predrain_ingest_left_out", "Rows that were left out.", labels=reasons)
    waiting = GaugeMetricFamily("predrain_ingest_waiting", "Rows that wait.", labels=reasons)
    for name, account in list(accounting.tables.items()):  # another thread may count meanwhile
        read.add_metric([name], account.read)
        used.add_metric([name], account.used)
        for family, counts in ((left_out, account.left_out), (waiting, account.waiting)):
            for reason, count in list(counts.items()):
                family.add_metric([name, reason], count)
    yield from (read, used, left_out, waiting)
