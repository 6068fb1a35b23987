"""Which of a page's observations of GPUs are news: what changed, and once an hour all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from telemetry.landing.tables import LANDED_INVENTORY

REPEAT_S: Final = 3600.0
"""What did not change is told again after so many seconds."""

_MAX_KNOWN: Final = 10_000


class SightingNews:
    """What was last told of one target's GPUs.

    ``labels``: fields of ``LANDED_INVENTORY`` that are known of the target itself (cluster, group, rack,
    nvlink_domain); they fill what the page leaves open.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._table: pa.Table | None = None
        self._rows: dict[tuple[str | None, str], dict[str, Any]] = {}
        self._told_s = 0.0

    def news(self, inventory: pa.Table, now_s: float) -> pa.Table:
        """Return the rows to land.

        ``inventory``: rows of ``LANDED_INVENTORY``: all GPUs of the page.
        """
        fields = inventory.drop_columns(["seen_at"])
        again = now_s - self._told_s >= REPEAT_S
        if self._table is not None and not again and fields.equals(self._table):
            return LANDED_INVENTORY.empty_table()
        told: list[dict[str, Any]] = []
        for row in inventory.to_pylist():
            for name, value in self._labels.items():
                if row[name] is None:
                    row[name] = value
            key = (row["gpu"], row["node"])
            content = {name: value for name, value in row.items() if name != "seen_at"}
            if again or self._rows.get(key) != content:
                told.append(row)
                self._rows[key] = content
        again = again or len(self._rows) > _MAX_KNOWN
        if again or self._table is None:
            self._told_s = now_s
            here = set(zip(fields.column("gpu").to_pylist(), fields.column("node").to_pylist(), strict=True))
            self._rows = {key: row for key, row in self._rows.items() if key in here}
        self._table = fields
        return pa.Table.from_pylist(told, schema=LANDED_INVENTORY) if told else LANDED_INVENTORY.empty_table()
