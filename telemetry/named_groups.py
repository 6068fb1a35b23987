"""Columns taken out of another one's text, such as cabinet and cage out of a location."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pyarrow as pa

from telemetry.columns import as_text
from telemetry.errors import InputError
from telemetry.mapping import nearest_hint


def with_parts(table: pa.Table, parts: Mapping[str, str], where: str, matched: set[str]) -> pa.Table:
    """Add the named groups of patterns as columns of text.

    ``parts``: source column to a regular expression that a whole value has to match; from the mapping file, where it
    was compiled already.
    Returns: with a further column for each named group; null where a value does not match, or is null.
    Raises ``InputError`` if the column is not there, or a group has the name of a column.
    """
    for name, pattern in parts.items():
        if name not in table.column_names:
            raise InputError(
                f"the mapping takes parts of column {name!r}, which is not there",
                where,
                nearest_hint(name, table.column_names) or f"Its columns are {', '.join(table.column_names)}.",
            )
        compiled = re.compile(pattern)
        matches = [
            None if text is None else compiled.fullmatch(text) for text in as_text(table.column(name), len(table))
        ]
        if any(matches):
            matched.add(name)
        for group in compiled.groupindex:
            if group in table.column_names:
                raise InputError(
                    f"the mapping takes {group!r} out of {name!r}, and there is a column of that name",
                    where,
                    "Name the group otherwise.",
                )
            values = [None if match is None else match[group] for match in matches]
            table = table.append_column(group, pa.array(values, pa.string()))
    return table


def refuse_unmatched(parts: Mapping[str, str], matched: set[str], where: str) -> None:
    """Refuse patterns that no value matched.

    Raises ``InputError`` if there is one: it would leave its columns empty without a word.
    """
    for name, pattern in parts.items():
        if name not in matched:
            raise InputError(
                f"no value of column {name!r} matches {pattern!r}",
                where,
                "Correct the pattern under `parts` in the mapping; it has to match a whole value.",
            )
