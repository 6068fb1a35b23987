"""The vocabulary of features: what a column of the matrix is, and its value in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from features.config import Group, Scope
from telemetry.config import format_duration, parse_duration


@dataclass(frozen=True, slots=True)
class FeatureColumn:
    """One column of a feature matrix.

    Parameters
    ----------
    name : str
        ``GROUP__WHAT__STATISTIC[__WINDOW]`` (history: ``GROUP__SCOPE_WHAT__STATISTIC[__WINDOW]``), unique in a matrix.
    group : str
        The feature group, one of :data:`features.config.GROUPS`.
    channel : str or None
        The channel the column is made of; in ``history`` what is counted; in ``static`` the inventory column.
    statistic : str
        What is taken of it, such as ``mean``, ``rise``, ``count``.
    window : timedelta or None
        The trailing window; None where the statistic has none.
    scope : str or None
        Whose history is counted: ``gpu``, ``slot`` or ``node``; None outside ``history``.
    unit : str
        Unit of the channel in words (``C``, ``W``), empty if it has none.
    categories : tuple of str
        What the codes 0, 1, ... of a categorical column stand for; empty for a numeric column.
    """

    name: str
    group: Group
    channel: str | None
    statistic: str
    window: timedelta | None = None
    scope: Scope | None = None
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
        scope: Scope | None = None,
        unit: str = "",
        categories: tuple[str, ...] = (),
    ) -> FeatureColumn:
        """Make a column and its name from its parts.

        Examples
        --------
        >>> FeatureColumn.of("telemetry", "gpu_temp_c", "mean", window=timedelta(hours=6)).name
        'telemetry__gpu_temp_c__mean__6h'
        """
        what = channel if scope is None else f"{scope}_{channel}"
        parts = [group, what, statistic]
        if window is not None:
            parts.append(format_window(window))
        return cls("__".join(parts), group, channel, statistic, window, scope, unit, categories)

    def to_json(self) -> dict[str, Any]:
        """Give the column as a JSON object."""
        return {
            "name": self.name,
            "group": self.group,
            "channel": self.channel,
            "statistic": self.statistic,
            "window": None if self.window is None else format_window(self.window),
            "scope": self.scope,
            "unit": self.unit,
            "categories": list(self.categories),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> FeatureColumn:
        """Read what :meth:`to_json` wrote."""
        window = content["window"]
        return cls(
            name=content["name"],
            group=content["group"],
            channel=content["channel"],
            statistic=content["statistic"],
            window=None if window is None else parse_duration(window),
            scope=content["scope"],
            unit=content.get("unit", ""),
            categories=tuple(content.get("categories", ())),
        )


def format_window(window: timedelta) -> str:
    """Write a window as column names hold it: hours up to two days (``24h``), then days.

    Examples
    --------
    >>> format_window(timedelta(days=1)), format_window(timedelta(days=7)), format_window(timedelta(minutes=90))
    ('24h', '7d', '90m')
    """
    seconds = window.total_seconds()
    if seconds % 3600 == 0 and (seconds < 2 * 86400 or seconds % 86400):
        return f"{int(seconds // 3600)}h"
    return format_duration(window)
