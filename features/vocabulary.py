"""Vocabulary of features: columns of the matrix, and their values as text."""

import math
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from features.config import Group
from features.wording import (
    COUNTED_WORDS,
    SCOPE_WORDS,
    STATIC_WORDS,
    STAY_WORDS,
    channel_words,
    count_of,
    decimal,
    duration,
    percent,
    with_unit,
)
from foundation.durations import Duration, format_duration


def describe_percentile(column: "FeatureColumn", value: float, fleet: NDArray[np.float32], noun: str = "GPUs") -> str:
    """Describe a value's position in the fleet: median, 1st or 99th percentile, and rank.

    ``fleet``: values of all units at the same time, including this one; NaN: unknown; shape (n_units,).
    """
    known, rounded = fleet[~np.isnan(fleet)], np.float32(value)
    n_equal = fleet.size - known.size if math.isnan(value) else int((known == rounded).sum())
    if math.isnan(value) or column.categories or column.unit == "bool" or not known.size:
        return f"the same on {percent(n_equal / max(fleet.size, 1))} of the fleet at that time"
    # observed values: no interpolated half errors
    low, median, high = np.percentile(known, [1, 50, 99], method="nearest").tolist()
    middle = f"fleet at that time: median {amount(column, median)}"
    if value == median:
        return f"equal to the median of the fleet at that time, {amount(column, median)}"
    is_high = value > median
    n_above, n_below = int((known > rounded).sum()), int((known < rounded).sum())
    n_beyond, n_behind = (n_above, n_below) if is_high else (n_below, n_above)
    edge = f"{'99th' if is_high else '1st'} percentile {amount(column, high if is_high else low)}"
    n_beyond += n_equal - 1
    word = "highest" if is_high else "lowest"
    if n_beyond <= 0:
        place = f"the {word} of {known.size:,} {noun}"
    elif n_beyond < known.size / 100:
        place = f"among the {n_beyond + 1:,} {word} of {known.size:,} {noun}"
    else:
        place = f"{'higher' if is_high else 'lower'} than {percent(n_behind / known.size)} of {known.size:,} {noun}"
    return f"{middle}, {edge}; {place}"


_COUNT_UNITS = frozenset({"errors", "pages", "rows", "replays", "count", "lanes", "generation"})
_SHARES = frozenset({"share", "missing", "repeated", "fresh", "idle_share", "busy_share", "node_rank", "swing_ratio"})
_COUNTS = frozenset(
    {"rise", "rise_delta", "step_rise", "changes", "transitions", "vanished", "count", "distinct", "ordinal"}
)


@dataclass(frozen=True, slots=True)
class FeatureColumn:
    """One column of a feature matrix.

    ``name``: ``GROUP__WHAT__STATISTIC[__WINDOW]`` (history: ``GROUP__SCOPE_WHAT__STATISTIC[__WINDOW]``).
    ``channel``: source channel; in ``history`` the event type that is counted; in ``static`` the inventory column.
    ``window``: None where the statistic has none.
    ``scope``: ``gpu``, ``slot``, ``node`` or a failure domain; None outside ``history``.
    ``unit``: unit of the channel (``C``, ``W``), empty if it has none.
    ``categories``: labels of the codes 0, 1, ... of a categorical column; empty for a numeric column.
    """

    name: str
    group: Group
    channel: str | None
    statistic: str
    window: Duration | None = None
    scope: str | None = None
    unit: str = ""
    categories: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        group: Group,
        channel: str,
        statistic: str,
        *,
        window: timedelta | None = None,
        scope: str | None = None,
        unit: str = "",
        categories: tuple[str, ...] = (),
    ) -> "FeatureColumn":
        """Build a column and its name from its parts."""
        subject = channel if scope is None else f"{scope}_{channel}"
        parts = [group, subject, statistic]
        if window is not None:
            parts.append(format_window(window))
        return cls("__".join(parts), group, channel, statistic, window, scope, unit, categories)


COLUMNS = TypeAdapter(tuple[FeatureColumn, ...])
"""JSON serializer of the columns in matrices and bundles."""


def format_window(window: timedelta) -> str:
    """Format a window for column names: hours below two days (``24h``), then days.

    >>> format_window(timedelta(days=1)), format_window(timedelta(days=7)), format_window(timedelta(minutes=90))
    ('24h', '7d', '90m')
    """
    seconds = window.total_seconds()
    if seconds % 3600 == 0 and (seconds < 2 * 86400 or seconds % 86400):
        return f"{int(seconds // 3600)}h"
    return format_duration(window)


def describe(column: FeatureColumn, value: float) -> str:
    """Describe a feature value in a clause without a full stop.

    ``value``: NaN: unknown.

    >>> from datetime import timedelta
    >>> power = FeatureColumn.of("telemetry", "power_w", "std", window=timedelta(hours=24), unit="W")
    >>> describe(power, 42.0)
    'power had a standard deviation of 42.0 W over the last 24 h'
    """
    if math.isnan(value):
        return _unknown(column)
    return _SENTENCES[column.group](column, float(value))


def amount(column: FeatureColumn, value: float) -> str:
    """Format a value with its unit."""
    return "unknown" if math.isnan(value) else _quantity(column, value)


def _unknown(column: FeatureColumn) -> str:
    if column.group == "history" and column.statistic == "since":
        singular, _ = _counted(column)
        return f"no earlier {singular} {_scope(column)}"
    span = f" over the last {duration(column.window)}" if column.window is not None else ""
    return f"{_subject(column)} unknown{span}"


def _subject(column: FeatureColumn) -> str:
    channel = str(column.channel)
    if column.group == "history":
        return f"{_counted(column)[1]} {_scope(column)}"
    if column.group == "static":
        return STATIC_WORDS.get(channel, channel.replace("_", " "))
    if column.group == "gaps":
        return {"samples": "samples", "channels": "channels", "node_units": "the node's GPUs"}.get(channel, channel)
    return channel_words(channel)


def _quantity(column: FeatureColumn, value: float) -> str:
    """Format a known value with the unit and precision of its statistic."""
    if column.group == "onset":
        return f"{_ratio(value)} times"
    if column.statistic in ("since", "age", "longest_gap"):
        return _hours(value)
    if column.statistic in _SHARES:
        return percent(value)
    if (
        column.statistic in _COUNTS
        or (column.unit in _COUNT_UNITS and (column.group == "peers" or column.statistic in ("last", "min", "max")))
        or (column.group == "static" and column.statistic == "value" and value == round(value))
    ):
        return count_of(value)
    return with_unit(decimal(value), column.unit)


def _measured(column: FeatureColumn, value: float) -> str:
    """Describe a value of the groups ``telemetry``, ``gaps`` and ``workload``."""
    name = channel_words(str(column.channel))
    span = duration(column.window) if column.window is not None else ""
    size, text, share = _quantity(column, abs(value)), _quantity(column, value), percent(value)
    flag = column.unit == "bool"
    sentences = {
        "last": f"{name} was {('set' if value else 'not set') if flag else text} in the last sample",
        "mean": f"{name} averaged {text} over the last {span}",
        "std": f"{name} had a standard deviation of {text} over the last {span}",
        "min": f"{name} fell to {text} in the last {span}",
        "max": f"{name} was {'' if value else 'never '}set in the last {span}"
        if flag
        else f"{name} reached {text} in the last {span}",
        "slope": f"{name} {_moved(value, f'by {size} per hour')} over the last {span}",
        "delta": _against(f"{name} averaged", value, size, "higher", "lower", span),
        "rise": f"{name} rose by {text} in the last {span}" if value else f"{name} did not rise in the last {span}",
        "rise_delta": _against(f"{name} rose by", value, size, "more", "less", span),
        "share": f"{name} was active in {text} of samples over the last {span}",
        "changes": f"{name} changed {_times(value)} in the last {span}",
        "step_mean": f"{name} averaged {text} in the interval that started {span} earlier",
        "step_rise": f"{name} rose by {text} in the interval that started {span} earlier",
        "missing": f"{share} of the samples expected in the last {span} are missing",
        "longest_gap": f"longest gap between samples in the last {span}: {text}",
        "age": f"{text} since the last sample",
        "repeated": f"{share} of samples in the last {span} are identical to the previous one",
        "vanished": f"{count_of(value)} {'channel' if value == 1 else 'channels'} stopped reporting in the last {span}",
        "fresh": f"{share} of the GPUs of the node reported in the last {span}",
        "idle_share": f"idle in {share} of samples over the last {span}",
        "busy_share": f"busy in {share} of samples over the last {span}",
        "transitions": f"switched between idle and busy {_times(value)} in the last {span}",
        "swing": f"power swung by {text} within the last {span}",
        "swing_ratio": f"the latest power swing is {share} of that of the last {span}",
        "step_change": f"power changed by {text} between samples over the last {span}",
    }
    return sentences[column.statistic]


def _history(column: FeatureColumn, value: float) -> str:
    singular, plural = _counted(column)
    scope = _scope(column)
    span = f" in the last {duration(column.window)}" if column.window is not None else ""
    if column.statistic == "count":
        return f"{count_of(value) if value else 'no'} {singular if value == 1 else plural} {scope}{span}"
    if column.statistic == "since":
        return f"{_quantity(column, value)} since the last {singular} {scope}"
    if column.statistic == "distinct":
        return f"{count_of(value)} different {singular if value == 1 else plural} {scope}{span}"
    if column.statistic in ("rate", "recency_rate"):
        over = span or ", weighted by recency"
        return f"{decimal(value)} {plural} per 1,000 unit-days {scope}{over}"
    if column.statistic == "relative":
        return f"{plural} {scope}{span}: {decimal(value)} times the rate of the fleet"
    return f"{plural} {scope}, weighted by recency: {decimal(value)}"


def _peers(column: FeatureColumn, value: float) -> str:
    name = channel_words(str(column.channel))
    span = duration(column.window) if column.window is not None else ""
    if column.statistic == "node_rank":
        return f"{name} was higher than on {percent(value)} of the other GPUs of the node over the last {span}"
    peers = "the other GPUs of the node" if column.statistic == "node_deviation" else "units of this model"
    size = _quantity(column, abs(value))
    if value == 0:
        return f"{name} equal to the median of {peers} over the last {span}"
    return f"{name} {size} {'above' if value > 0 else 'below'} the median of {peers} over the last {span}"


def _onset(column: FeatureColumn, value: float) -> str:
    span = duration(column.window) if column.window is not None else ""
    times = _ratio(value)
    combined = {
        "surge_max": "largest increase of an error counter",
        "surge_sum": "increases of all error counters, multiplied,",
        "excess_max": "the error counter furthest above the fleet",
        "excess_sum": "all error counters above the fleet, multiplied,",
    }
    name = combined.get(column.statistic, channel_words(str(column.channel)))
    peers = "the 95th percentile of units of this model"
    if value <= 0:
        return f"{name} in the last {span}: not above the usual rate"
    if column.statistic.startswith("excess"):
        return f"{name} in the last {span}: {times} times {peers}"
    return f"{name} in the last {span}: at least {times} times its own baseline, above {peers}"


def _ratio(logarithm: float) -> str:
    return decimal(math.exp(min(logarithm, 40.0)))


def _static(column: FeatureColumn, value: float) -> str:
    name, text = _subject(column), _quantity(column, value)
    if column.categories:
        code = int(value)
        known = 0 <= code < len(column.categories)
        return f"{name} is {column.categories[code]}" if known else f"{name} does not occur in the training data"
    if column.statistic == "days":
        return f"{text} {STAY_WORDS.get(str(column.channel), f'since {name}')}"
    return f"{name} {text}" if column.statistic == "ordinal" else f"{name} is {text}"


def _counted(column: FeatureColumn) -> tuple[str, str]:
    event_kind = str(column.channel)
    plain = event_kind.replace("_", " ")
    return COUNTED_WORDS.get(event_kind, (f"{plain} event", f"{plain} events"))


def _scope(column: FeatureColumn) -> str:
    scope = str(column.scope)
    return SCOPE_WORDS.get(scope, f"in this {scope.replace('_', ' ')}")


def _hours(value: float) -> str:
    return f"{decimal(value)} h" if value < 48 else f"{decimal(value / 24)} d"


def _times(value: float) -> str:
    return "once" if value == 1 else f"{count_of(value)} times"


def _moved(value: float, amount_text: str) -> str:
    if value == 0:
        return "did not change"
    return f"{'rose' if value > 0 else 'fell'} {amount_text}"


def _against(beginning: str, value: float, size: str, more: str, less: str, span: str) -> str:
    if value == 0:
        return f"{beginning} the same over the last {span} as over the {span} before"
    return f"{beginning} {size} {more if value > 0 else less} over the last {span} than over the {span} before"


_SENTENCES = {
    "telemetry": _measured,
    "history": _history,
    "peers": _peers,
    "onset": _onset,
    "gaps": _measured,
    "workload": _measured,
    "static": _static,
}
