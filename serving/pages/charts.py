"""Small plots as inline SVG: no script, no style attribute, colours by class so that light and dark pages differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from html import escape
from typing import Final

from markupsafe import Markup

from serving.pages.dataset_reader import ChannelSeries
from serving.pages.formatting import instant, number, percent
from serving.pages.history import PastScore

_WIDTH, _HEIGHT = 720, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 24
_FLOOR: Final = 1e-4
_SMALL_WIDTH, _SMALL_HEIGHT, _PAD = 240, 56, 3


def risk_chart(scores: Sequence[PastScore], thresholds: dict[str, float], words: str) -> Markup:
    """Draw a unit's risk over time, on a logarithmic scale, with the tiers' thresholds."""
    first, last = scores[0].decided, scores[-1].decided
    known = [score.risk for score in scores if score.risk is not None]
    low = min(0.1, 10 ** math.floor(math.log10(max(_FLOOR, min(known, default=_FLOOR)))))
    width = max((last - first).total_seconds(), 1.0)

    def x(when: datetime) -> float:
        return round(_LEFT + (when - first).total_seconds() / width * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(risk: float) -> float:
        share = math.log(max(risk, low) / low) / math.log(1 / low)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    parts = [f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(words)}">']
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
    for run in _runs(scores):
        steps = " ".join(f"{x(score.decided)},{y(score.risk or 0.0)}" for score in run)
        parts.append(f'<polyline class="line" points="{steps}"/>')
    for score in scores:
        if score.risk is not None and (len(scores) < 90 or score.tier in ("elevated", "high")):
            title = f"{instant(score.decided)}: {percent(score.risk)}, {score.tier}"
            parts.append(
                f'<circle class="dot {score.tier}" cx="{x(score.decided)}" cy="{y(score.risk)}" r="2.6">'
                f"<title>{title}</title></circle>"
            )
    return Markup("".join([*parts, "</svg>"]))  # noqa: S704 - every text in it is escaped or our own


def spark(scores: Sequence[PastScore]) -> Markup:
    """Draw a risk's course in the size of a word; a table beside it says the number."""
    if len(scores) < 2:
        return Markup()
    first = scores[0].decided
    width = max((scores[-1].decided - first).total_seconds(), 1.0)
    parts = ['<svg class="spark" viewBox="0 0 80 18" aria-hidden="true">']
    for run in _runs(scores):
        steps = (
            (
                1 + 78 * (score.decided - first).total_seconds() / width,
                17 - 16 * max(0.0, 1 + math.log10(max(score.risk or 0.0, _FLOOR)) / 4),
            )
            for score in run
        )
        parts.append(f'<polyline class="line" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in steps)}"/>')
    return Markup("".join([*parts, "</svg>"]))  # noqa: S704 - numbers only


def channel_chart(series: ChannelSeries) -> Markup:
    """Draw a channel's last days: the band between least and most of each interval, and the mean."""
    low, high = series.least, series.most
    room = (high - low) or 1.0
    count = len(series.mean)

    def x(at: int) -> float:
        return round(_PAD + at / max(count - 1, 1) * (_SMALL_WIDTH - 2 * _PAD), 1)

    def y(value: float) -> float:
        return round(_SMALL_HEIGHT - _PAD - (value - low) / room * (_SMALL_HEIGHT - 2 * _PAD), 1)

    words = f"{series.name}: {number(low)} to {number(high)} {series.unit}, now {number(series.last)}"
    parts = [
        f'<svg class="small" viewBox="0 0 {_SMALL_WIDTH} {_SMALL_HEIGHT}" role="img" aria-label="{escape(words)}">'
    ]
    for start, end in _present(series.mean):
        over = " ".join(f"{x(at)},{y(series.max[at] or 0.0)}" for at in range(start, end))
        under = " ".join(f"{x(at)},{y(series.min[at] or 0.0)}" for at in reversed(range(start, end)))
        parts.append(f'<polygon class="band" points="{over} {under}"/>')
        line = " ".join(f"{x(at)},{y(series.mean[at] or 0.0)}" for at in range(start, end))
        parts.append(f'<polyline class="line" points="{line}"/>')
        if end == start + 1:
            parts.append(f'<circle class="dot" cx="{x(start)}" cy="{y(series.mean[start] or 0.0)}" r="1.5"/>')
    return Markup("".join([*parts, "</svg>"]))  # noqa: S704 - every text in it is escaped


def _present(values: Sequence[float | None]) -> list[tuple[int, int]]:
    runs, start = [], None
    for at, value in enumerate([*values, None]):
        if value is not None and start is None:
            start = at
        if value is None and start is not None:
            runs.append((start, at))
            start = None
    return runs


def _runs(scores: Sequence[PastScore]) -> list[list[PastScore]]:
    """Cut where nothing was known: a line over a gap would claim something."""
    runs: list[list[PastScore]] = [[]]
    for score in scores:
        if score.risk is None:
            runs.append([])
        else:
            runs[-1].append(score)
    return [run for run in runs if run]


def _days(first: datetime, last: datetime) -> list[datetime]:
    """Return the midnights to mark: eight at most."""
    start = datetime.combine(first.astimezone(UTC).date(), datetime.min.time(), UTC) + timedelta(days=1)
    count = (last - start).days + 1
    every = max(1, -(-count // 8))
    return [start + timedelta(days=at) for at in range(0, max(count, 0), every)]
