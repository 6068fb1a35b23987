"""The fleet at a glance: a block a node, a cell a unit, by rack where racks are known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import Final
from urllib.parse import quote

from markupsafe import Markup

from policy.risk_record import RiskRecord
from policy.tiers import TIERS, UNKNOWN
from serving.pages.fleet_table import FleetRow, natural
from serving.pages.formatting import percent
from serving.scores.fleet import Fleet

MOST_NODES: Final = 4_000
"""Nodes drawn at most; beyond it those of tier clear are left out first."""

_CLEAR: Final = TIERS[0]
_LETTER: Final = {"watch": "w", "elevated": "e", "high": "h", UNKNOWN: "u"}


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A drawn fleet.

    ``blocks``: rack (empty: not known) and its nodes, drawn.
    ``left_out``: nodes that are not drawn because there are too many.
    """

    blocks: list[tuple[str, Markup]]
    nodes: int
    left_out: int


def draw(rows: Sequence[FleetRow], fleet: Fleet, now: datetime) -> HeatMap:
    """Draw nodes in the order of their names."""
    drawn = list(rows)
    if len(drawn) > MOST_NODES:
        drawn = sorted(drawn, key=lambda row: row.tier == _CLEAR)[:MOST_NODES]
    racks: dict[str, list[FleetRow]] = {}
    for row in sorted(drawn, key=lambda drawn_row: drawn_row.order):
        racks.setdefault(row.place.rack, []).append(row)
    first = True
    blocks = []
    for rack in sorted(racks, key=natural):
        parts = []
        for row in racks[rack]:
            parts.append(_node(row, fleet.scores.nodes[row.node], now, first=first))
            first = False
        blocks.append((rack, Markup("".join(parts))))  # noqa: S704 - every name in it is escaped
    return HeatMap(blocks, len(drawn), len(rows) - len(drawn))


def _node(row: FleetRow, records: Sequence[RiskRecord], now: datetime, *, first: bool) -> str:
    """Draw a node; all of them together are one stop of the tab key, and arrow keys go from one to the next."""
    words = escape(f"{row.node}: {row.tier}" + ("" if row.risk is None else f", {percent(row.risk)}"))
    columns = 1 if len(records) == 1 else math.ceil(len(records) / 2)
    rest = "" if first else ' tabindex="-1"'
    place = quote(row.node, safe="")
    head = f'<a class="b{min(columns, 8)}" href="/nodes/{place}"{rest} title="{words}" aria-label="{words}">'
    cells = list(_cells(records, columns, now))
    if not cells:
        return f"{head}</a>"
    lines = 1 if len(records) == 1 else 2
    drawn = f'<svg viewBox="0 0 {columns} {lines}" preserveAspectRatio="none" aria-hidden="true">{"".join(cells)}</svg>'
    return f"{head}{drawn}</a>"


def _cells(records: Sequence[RiskRecord], columns: int, now: datetime) -> Iterable[str]:
    paths: dict[str, list[str]] = {}
    for cell, record in enumerate(records):
        tier = record.tier if record.status == "ok" and not record.expired(now) else UNKNOWN
        if tier != _CLEAR:
            paths.setdefault(tier, []).append(f"M{cell % columns} {cell // columns}h1v1h-1z")
    return (f'<path class="{_LETTER[tier]}" d="{"".join(steps)}"/>' for tier, steps in paths.items())
