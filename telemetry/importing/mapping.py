"""Mapping file of ``predrain import --mapping``: how source columns map to the dataset's.

docs/reference/mapping.md has an example of every key.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from zoneinfo import ZoneInfo

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    Field,
    FiniteFloat,
    model_validator,
)

from foundation.durations import Duration
from foundation.settings import Section, read_settings
from telemetry.identity.nodes import node_key
from telemetry.kernel_log.catalogue import MessageRule

Scalar = str | int | float | bool | None


_SectionT = TypeVar("_SectionT", bound=Section)
_Text = Annotated[str, BeforeValidator(str)]
"""YAML parses a key like 0 as a number."""


class TimeFormat(Section):
    """Timestamp format of a table."""

    unit: Literal["ns", "us", "ms", "s", "m", "h", "d"] | None = None
    """Unit of numbers since ``origin``; null: detected for s to ns since 1970 and for Excel days."""

    origin: AwareDatetime = datetime(1970, 1, 1, tzinfo=UTC)
    """Start of numeric times."""

    format: str | None = None
    """strptime format of unusual text, such as ``%d.%m.%Y %H:%M:%S``; null: the common forms."""

    order: Literal["dmy", "mdy", "ymd"] | None = None
    """Order of day, month and year in dates such as 03/04/2026, if no date of the table shows it."""

    timezone: ZoneInfo | None = None
    """Zone of timestamps without an offset; required for such a column."""


def _stripped(columns: Any) -> Any:
    """Strip column names, as the reader does for a file's header."""
    if columns is None:
        return {}
    if not isinstance(columns, Mapping):
        return columns
    return {name.strip() if isinstance(name, str) else name: target for name, target in columns.items()}


class LongFormat(Section):
    """Columns of a long-format table (one row per value)."""

    metric: str
    """Column with the name of the metric."""

    value: str
    """Column with the value."""

    labels: str | None = None
    """Column that holds further columns, as JSON or ``key="value"`` pairs."""


class TableMapping(Section):
    """How a source is converted to a table of the dataset."""

    columns: Annotated[dict[str, str | tuple[str, ...] | None], BeforeValidator(_stripped)] = Field(
        default_factory=dict
    )
    """Source column: column of predrain, or a list of them; null ignores the source column."""

    constants: dict[str, Scalar] = Field(default_factory=dict)
    """Column: value of every row."""

    time: TimeFormat = TimeFormat()
    """Format of timestamps."""

    scale: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Column: factor (value * factor + offset)."""

    offset: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Column: number added after scaling."""

    decimal: Literal[".", ","] | None = None
    """Decimal sign; null: detected, and a comma in files separated by semicolons."""

    long: LongFormat | None = None
    """Long format: one row per value."""

    values: dict[str, dict[_Text, Scalar]] = Field(default_factory=dict)
    """Column: source value: value; null skips the row, counted."""

    drop_without: tuple[str, ...] = ()
    """Columns; rows without a value in each of them are skipped, counted."""

    ignore_others: bool = False
    """true: unknown source columns are ignored; false: they are an error."""


def _named_groups(pattern: re.Pattern[str]) -> re.Pattern[str]:
    if not pattern.groupindex:
        raise ValueError("the pattern has no named group, such as (?P<cage>[0-9]+)")
    return pattern


class InventoryMapping(TableMapping):
    """How an inventory is converted to installations; with a ``seen_at`` column, its rows are observations."""

    parts: dict[str, Annotated[re.Pattern[str], AfterValidator(_named_groups)]] = Field(default_factory=dict)
    """Source column: regular expression for whole values;
    its named groups become columns, numeric if all values are."""

    absent: Annotated[Duration, Field(gt=timedelta(0))] = timedelta(days=7)
    """With ``seen_at``: a unit last seen this long before the newest observation of any unit counts as removed then."""


class KernelLogMapping(Section):
    """Context that kernel logs lack."""

    node: str | None = None
    """Node of lines without a host; null: the file name, if it is a node."""

    boot_time: AwareDatetime | None = None
    """Boot time, for stamps such as ``[  12.345]``."""

    reference_time: AwareDatetime | None = None
    """Time after the last line, for stamps without a year; null: modification time of the file."""

    timezone: ZoneInfo | None = None
    """Zone of stamps without an offset."""

    messages: list[MessageRule] = Field(default_factory=list)
    """Additions to the [kernel messages](kernel-messages.md); they take precedence."""


class NodesMapping(Section):
    """Node names."""

    aliases: dict[_Text, _Text] = Field(default_factory=dict)
    """Other name of a node, in any letter case: node; for every table."""

    @model_validator(mode="after")
    def _are_unambiguous(self) -> "NodesMapping":
        meant: dict[str, str] = {}
        for alias, node in self.aliases.items():
            if not node_key(alias) or not node_key(node):
                raise ValueError("an alias or its node is empty")
            if meant.setdefault(node_key(alias), node) != node:
                raise ValueError(f"{alias!r} is an alias of both {meant[node_key(alias)]!r} and {node!r}")
        chained = [alias for alias, node in self.aliases.items() if node_key(node) in meant]
        if chained:
            raise ValueError(f"{chained[0]!r} is an alias of {self.aliases[chained[0]]!r}, which is an alias itself")
        return self


class ImportMapping(Section):
    """The whole mapping file."""

    samples: TableMapping = TableMapping()
    """Telemetry."""

    events: TableMapping = TableMapping()
    """Events."""

    inventory: InventoryMapping = InventoryMapping()
    """Inventory."""

    jobs: TableMapping = TableMapping()
    """Jobs."""

    kernel_log: KernelLogMapping = KernelLogMapping()
    """Kernel logs among the event sources."""

    nodes: NodesMapping = NodesMapping()
    """Names of nodes, in every table."""

    timezone: ZoneInfo | None = None
    """Default zone of all tables."""

    span: Annotated[list[AwareDatetime], Field(min_length=2, max_length=2)] | None = None
    """Start and end of the observed period, if longer than the sources; installations that end at its end are
    current."""

    @model_validator(mode="before")
    @classmethod
    def _spread_timezone(cls, content: Any) -> Any:
        """Apply the mapping's ``timezone`` to each table without one."""
        zone = content.get("timezone") if isinstance(content, Mapping) else None
        if zone is None:
            return content
        spread = dict(content)
        for table in ("samples", "events", "inventory", "jobs"):
            section = spread.get(table) or {}
            time = section.get("time") or {} if isinstance(section, Mapping) else None
            if isinstance(time, Mapping):
                spread[table] = {**section, "time": {"timezone": zone, **time}}
        log = spread.get("kernel_log") or {}
        if isinstance(log, Mapping):
            spread["kernel_log"] = {"timezone": zone, **log}
        return spread

    @model_validator(mode="after")
    def _ordered(self) -> "ImportMapping":
        if self.span is not None and self.span[0] >= self.span[1]:
            raise ValueError(f"span is empty: {self.span[0].isoformat()} is not before {self.span[1].isoformat()}")
        return self


def load_mapping(path: Path | None) -> ImportMapping:
    """Load and validate a mapping file; without a path, return the default mapping."""
    return ImportMapping() if path is None else read_settings(path, ImportMapping)
