"""Small charts as inline SVG, without scripts or style attributes; CSS classes colour them for light and dark mode."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import escape
from itertools import groupby
from typing import Final
from urllib.parse import quote

from markupsafe import Markup

from foundation.text import percent
from policy.risk_record import RiskRecord
from policy.tiers import TIERS, UNKNOWN
from serving.pages.fleet_table import FleetRow
from serving.pages.rendering import instant
from serving.scores.reading import PastScore, ScoredFleet, natural

MAX_NODES: Final = 4_000
"""Maximum number of nodes drawn; those of tier clear are omitted first."""

SHADES: Final = 8
"""Shades for the risk of GPUs of tier clear, on a logarithmic scale from 0.0001 to 1."""

_CLEAR: Final = TIERS[0]
_LETTER: Final = {"watch": "w", "elevated": "e", "high": "h", UNKNOWN: "u"}


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Heat map of the fleet.

    ``blocks``: rack (empty: unknown) and the SVG of its nodes.
    ``left_out``: number of nodes omitted because there are too many.
    """

    blocks: list[tuple[str, Markup]]
    nodes: int
    left_out: int


def draw(rows: Sequence[FleetRow], fleet: ScoredFleet, now: datetime) -> HeatMap:
    """Draw nodes by rack, in natural order of names."""
    rows_drawn = list(rows)
    if len(rows_drawn) > MAX_NODES:
        rows_drawn = sorted(rows_drawn, key=lambda row: row.tier == _CLEAR)[:MAX_NODES]
    racks: dict[str, list[FleetRow]] = {}
    for row in sorted(rows_drawn, key=lambda drawn_row: drawn_row.order):
        racks.setdefault(row.place.rack, []).append(row)
    first = True
    blocks = []
    for rack in sorted(racks, key=natural):
        parts = []
        for row in racks[rack]:
            parts.append(_node(row, fleet.scores.nodes[row.node], now, first=first))
            first = False
        blocks.append((rack, Markup("".join(parts))))  # noqa: S704 - every name in it is escaped
    return HeatMap(blocks, len(rows_drawn), len(rows) - len(rows_drawn))


def _node(row: FleetRow, records: Sequence[RiskRecord], now: datetime, *, first: bool) -> str:
    """Draw a node; the whole map is one tab stop, in which the arrow keys move between nodes."""
    label = escape(f"{row.node}: {row.tier}" + ("" if row.risk is None else f", {percent(row.risk)}"))
    columns = 1 if len(records) == 1 else math.ceil(len(records) / 2)
    focus = "" if first else ' tabindex="-1"'
    place = quote(row.node, safe="")
    head = f'<a class="b{min(columns, 8)}" href="/nodes/{place}"{focus} title="{label}" aria-label="{label}">'
    cells = list(_cells(records, columns, now))
    if not cells:
        return f"{head}</a>"
    lines = 1 if len(records) == 1 else 2
    svg = f'<svg viewBox="0 0 {columns} {lines}" preserveAspectRatio="none" aria-hidden="true">{"".join(cells)}</svg>'
    return f"{head}{svg}</a>"


def _cells(records: Sequence[RiskRecord], columns: int, now: datetime) -> Iterable[str]:
    paths: dict[str, list[str]] = {}
    for cell, record in enumerate(records):
        tier = record.tier if record.status == "ok" and not record.expired(now) else UNKNOWN
        kind = f"s{shade(record.risk or 0.0)}" if tier == _CLEAR else _LETTER[tier]
        if kind != "s0":
            paths.setdefault(kind, []).append(f"M{cell % columns} {cell // columns}h1v1h-1z")
    return (f'<path class="{kind}" d="{"".join(steps)}"/>' for kind, steps in paths.items())


def shade(risk: float) -> int:
    """Return the shade of a risk: 0 below about 0.0002, :data:`SHADES` at 1."""
    return max(0, min(SHADES, round(SHADES * (1 + math.log10(max(risk, _FLOOR)) / -math.log10(_FLOOR)))))


_WIDTH, _HEIGHT = 720, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 24
_FLOOR: Final = 1e-4
_LINES: Final = 6
"""Lines for annotation labels; a label takes the first line where it overlaps no other."""
_LETTER_PX: Final = 7
"""Maximum width of a letter."""


@dataclass(frozen=True, slots=True)
class Annotation:
    """An event on a risk chart; ``kind``: ``action`` or ``failure``."""

    at: datetime
    kind: str
    label: str
    title: str


def risk_chart(
    scores: Sequence[PastScore], thresholds: dict[str, float], label: str, annotations: Sequence[Annotation] = ()
) -> Markup:
    """Draw a risk over time on a logarithmic scale, with tier thresholds, actions and failures."""
    first, last = scores[0].decided, max([scores[-1].decided, *(annotation.at for annotation in annotations)])
    known = [score.risk for score in scores if score.risk is not None]
    low = min(0.1, 10 ** math.floor(math.log10(max(_FLOOR, min(known, default=_FLOOR)))))
    width = max((last - first).total_seconds(), 1.0)

    def x(instant: datetime) -> float:
        return round(_LEFT + (instant - first).total_seconds() / width * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(risk: float) -> float:
        share = math.log(max(risk, low) / low) / math.log(1 / low)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    parts = [f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">']
    decade = low
    while decade <= 1.0001:
        parts.append(f'<path class="grid" d="M{_LEFT} {y(decade)}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="tick end" x="{_LEFT - 6}" y="{y(decade) + 4}">{percent(decade)}</text>')
        decade *= 10
    for tier, threshold in thresholds.items():
        if low < threshold < 1:
            parts.append(f'<path class="bound {escape(tier)}" d="M{_LEFT} {y(threshold)}H{_WIDTH - _RIGHT}"/>')
            parts.append(f'<text class="tick end" x="{_WIDTH - _RIGHT}" y="{y(threshold) - 3}">{escape(tier)}</text>')
    for day in _days(first, last):
        parts.append(f'<text class="tick mid" x="{x(day)}" y="{_HEIGHT - 8}">{day:%d %b}</text>')
        parts.append(f'<path class="grid" d="M{x(day)} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
    parts += _lines(None if score.risk is None else (x(score.decided), y(score.risk)) for score in scores)
    for score in scores:
        if score.risk is not None and (len(scores) < 90 or score.tier in ("elevated", "high")):
            title = f"{instant(score.decided)}: {percent(score.risk)}, {score.tier}"
            parts.append(
                f'<circle class="dot {score.tier}" cx="{x(score.decided)}" cy="{y(score.risk)}" r="2.6">'
                f"<title>{title}</title></circle>"
            )
    ends = [0.0] * _LINES  # where the last label of each line ends
    for annotation in sorted(
        (annotation_at for annotation_at in annotations if annotation_at.at >= first),
        key=lambda annotation_at: annotation_at.at,
    ):
        x_px, width_px = x(annotation.at), 3 + _LETTER_PX * len(annotation.label)
        side, start = ("end", x_px - width_px) if x_px + width_px > _WIDTH else ("start", x_px)
        free = next((line for line, end in enumerate(ends) if end <= start), None)
        text = ""
        if free is not None:  # without room for a label there is only the title
            ends[free] = start + width_px
            label_x, height = x_px - 3 if side == "end" else x_px + 3, _TOP + 10 + 12 * free
            text = f'<text class="tick {side}" x="{label_x}" y="{height}">{escape(annotation.label)}</text>'
        parts.append(
            f'<g class="annotation {escape(annotation.kind)}"><title>{escape(annotation.title)}</title>'
            f'<path d="M{x_px} {_TOP}V{_HEIGHT - _BOTTOM}"/>{text}</g>'
        )
    return Markup("".join([*parts, "</svg>"]))  # noqa: S704 - every text in it is escaped or our own


def spark(scores: Sequence[PastScore]) -> Markup:
    """Draw a word-sized sparkline of a risk; the table next to it has the number."""
    if len(scores) < 2:
        return Markup()
    first = scores[0].decided
    width = max((scores[-1].decided - first).total_seconds(), 1.0)
    points = (
        None
        if score.risk is None
        else (
            1 + 78 * (score.decided - first).total_seconds() / width,
            17 - 16 * max(0.0, 1 + math.log10(max(score.risk, _FLOOR)) / 4),
        )
        for score in scores
    )
    parts = ['<svg class="spark" viewBox="0 0 80 18" aria-hidden="true">', *_lines(points), "</svg>"]
    return Markup("".join(parts))  # noqa: S704 - numbers only


def course(values: Sequence[float | None]) -> Markup:
    """Draw the hourly values of a channel, scaled from minimum to maximum; the table next to it has both."""
    known = [value for value in values if value is not None]
    if not known:
        return Markup()
    low, width = min(known), max(known) - min(known) or 1.0
    points = (
        None if value is None else (300 * place / len(values), 34 - 32 * (value - low) / width)
        for place, value in enumerate(values)
    )
    parts = ['<svg class="course" viewBox="0 0 300 36" aria-hidden="true">', *_lines(points), "</svg>"]
    return Markup("".join(parts))  # noqa: S704 - numbers only


def _lines(points: Iterable[tuple[float, float] | None]) -> Iterable[str]:
    """Draw a line through points; None interrupts it."""
    for _, run in groupby(points, lambda point: point is None):
        steps = [f"{point[0]:.1f},{point[1]:.1f}" for point in run if point is not None]
        if steps:  # the last point twice: a single one between two gaps is visible too
            yield f'<polyline class="line" points="{" ".join([*steps, steps[-1]])}"/>'


def _days(first: datetime, last: datetime) -> list[datetime]:
    """Return the UTC midnights to mark, at most eight."""
    start = datetime.combine(first.astimezone(UTC).date(), datetime.min.time(), UTC) + timedelta(days=1)
    count = (last - start).days + 1
    interval = max(1, -(-count // 8))
    return [start + timedelta(days=day) for day in range(0, max(count, 0), interval)]
