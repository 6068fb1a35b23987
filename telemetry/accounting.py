"""What a command read and what became of it: every row, line, event or sample is used, left out for a reason, or waits.

One :class:`Accounting` is filled along the way and reported at the end, as a table, in ``--json`` and as metrics.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

EXAMPLE_LENGTH: Final = 300


@dataclass(slots=True)
class Account:
    """The rows of one table (``samples``, ``events``, ``kernel log lines``, ``jobs`` …).

    ``left_out`` and ``waiting`` are counts by reason; ``examples`` has one example a reason.
    """

    read: int = 0
    used: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    waiting: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def unaccounted(self) -> int:
        """Rows that are neither used, nor left out, nor waiting; 0 unless a reader loses rows."""
        return self.read - self.used - self.left_out.total() - self.waiting.total()


class Accounting:
    """Counts by table; order of tables is the order in which they were first named."""

    def __init__(self) -> None:
        self.tables: defaultdict[str, Account] = defaultdict(Account)

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

    def _count(self, counts: Counter[str], table: str, reason: str, number: int, example: object) -> None:
        if number:
            counts[reason] += number
            if example is not None:
                self.tables[table].examples.setdefault(reason, str(example)[:EXAMPLE_LENGTH])

    def add(self, other: Accounting) -> None:
        """Add the counts of a part of the work."""
        for name, account in other.tables.items():
            mine = self.tables[name]
            mine.read += account.read
            mine.used += account.used
            mine.left_out.update(account.left_out)
            mine.waiting.update(account.waiting)
            mine.examples = {**account.examples, **mine.examples}

    def as_dict(self) -> dict[str, Any]:
        """Return the counts in JSON types: ``{table: {read, used, left_out: [{reason, count, example}], waiting}}``."""
        return {
            name: {
                "read": account.read,
                "used": account.used,
                "left_out": _reasons(account.left_out, account.examples),
                "waiting": _reasons(account.waiting, account.examples),
            }
            for name, account in self.tables.items()
        }


def _reasons(counts: Counter[str], examples: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {"reason": reason, "count": count, "example": examples.get(reason)} for reason, count in counts.most_common()
    ]
