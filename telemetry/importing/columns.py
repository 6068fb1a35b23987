"""Resolves source columns to dataset columns."""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from foundation.errors import InputError
from foundation.text import nearest_hint
from foundation.yaml import read_yaml
from telemetry.dataset.channels import Channel, by_source_name, is_unused
from telemetry.importing.mapping import TableMapping
from telemetry.values.names import EXACT_NAMES, INVENTORY, spellings
from telemetry.values.numbers import NO_VALUE_WORDS, split_header

KEY_ALIASES: Final[Mapping[str, str]] = {
    name: row.target for name, row in EXACT_NAMES.items() if row.unit is None and row.target != INVENTORY
}
"""Common names of key columns and static attributes, and their dataset columns."""

SAMPLE_KEYS: Final = ("timestamp", "node", "gpu", "mig_instance", "slot", "pci_bus_id")
"""Columns of samples that are not channels."""

GPU_PLACE: Final = ("pci_bus_id", "slot")
"""Columns that identify a GPU within its node if samples have no GPU id, in order of preference."""

_STATIC: Final = frozenset({"slot", "pci_bus_id", "serial", "model", "driver", INVENTORY})


COLUMN_NAMES: Final = read_yaml(Path(__file__).with_name("column_names.yaml").read_text(encoding="utf-8"))
_AFFIXES: Final = [re.compile(pattern, re.IGNORECASE) for pattern in COLUMN_NAMES["around"]]
_UNIT_NAME: Final = re.compile(r"[KMG]i?B|[kMG]Hz|k?Wh|[mk]J|[mk]W")
_PCI_ADDRESS: Final = re.compile(r"(PCI:)?(0x)?[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[01][0-9A-Fa-f](\.[0-7])?")


def aliases_by_words(names: Sequence[str], mapping: TableMapping, role: str) -> dict[str, str]:
    """Map source columns with a common name to dataset columns, in addition to :data:`KEY_ALIASES`.

    Otherwise ``Serial Number`` in an inventory would be kept as a custom column, and events that quote a serial number
    would not be matched to a GPU.
    """
    free = [name for name in names if name not in mapping.columns]
    aliases = {name: KEY_ALIASES[known] for name in free for known in spellings(name) if known in KEY_ALIASES}
    claimed = {*mapped_targets(mapping), *aliases.values(), *(name.lower() for name in free)}
    words = {name: words_of(name) for name in free}
    for target, known_words in COLUMN_NAMES["keys"][role].items():
        of_target = (name for known in known_words for name in free if known in words[name] and name not in aliases)
        name = None if target in claimed else next(of_target, None)
        if name is not None:
            aliases[name] = target
    return {**KEY_ALIASES, **aliases}


def mapped_targets(mapping: TableMapping) -> set[str]:
    """Return the dataset columns that a mapping assigns, including constants."""
    return {*(target for mapped in mapping.columns.values() for target in _targets(mapped)), *mapping.constants}


def words_of(name: str) -> set[str]:
    """Return the lowercase words of a column name, with and without decoration added by exports."""
    return {" ".join(split_words(form)) for form in forms_of(name)}


def forms_of(name: str) -> list[str]:
    """Return a column name, and its variants without decoration added by exports."""
    forms = [name]
    for form in forms:
        forms += [match[1] for pattern in _AFFIXES if (match := pattern.fullmatch(form.strip())) is not None]
    return forms


def split_words(name: str) -> list[str]:
    """Split a name into lowercase words."""
    plain = _UNIT_NAME.sub(lambda unit: unit[0].lower(), name.replace("%", " pct "))
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", plain)
    return [word for word in re.split(r"[\W_]+", spaced.lower()) if word]


def are_pci_addresses(column: pa.ChunkedArray) -> bool | None:
    """Whether all values of a column are PCI addresses; None if it has no text."""
    texts = pc.unique(column.drop_null()).to_pylist() if pa.types.is_string(column.type) else []
    return all(_PCI_ADDRESS.fullmatch(text.strip()) for text in texts) if texts else None


ELAPSED: Final = "elapsed"
"""Column with the duration of a job, from which a missing start or end is computed."""

_JOB_FACTS: Final = frozenset({"job", "node", "started_at", "ended_at", "gpus", "outcome"})


def names_of_jobs(names: Sequence[str], mapping: TableMapping) -> tuple[dict[str, str], Callable[[str], bool]]:
    """Return the aliases of a job table's columns, and a predicate for ignored columns.

    If a table has all relevant job columns, as sacct's does, the others are ignored.
    """
    aliases = aliases_by_words(names, mapping, "jobs")
    has = {aliases.get(name, name.lower()) for name in names} | mapped_targets(mapping)
    if ELAPSED in has and has & {"started_at", "ended_at"}:
        has |= {"started_at", "ended_at"}
    return aliases, (lambda _name: True) if has >= _JOB_FACTS else nothing_left_out


def left_out_of_samples(name: str) -> bool:
    """Whether a sample column is known but unused: an inventory attribute, or a metric that is not a channel."""
    return is_inventory(name) or is_unused(split_header(name)[0])


def is_inventory(name: str) -> bool:
    """Whether a sample column is an attribute that the inventory has."""
    known = (EXACT_NAMES[form].target for form in spellings(split_header(name)[0]) if form in EXACT_NAMES)
    return name in _STATIC or any(target in _STATIC for target in known)


def source_names(channels: Mapping[str, Channel]) -> dict[str, str]:
    """Map source names to channels, including names that imply another unit."""
    converted = {name: row.target for name, row in EXACT_NAMES.items() if row.unit and row.target in channels}
    return by_source_name(channels) | converted


def nothing_left_out(_name: str) -> bool:
    """Ignore no column."""
    return False


def missing_column(name: str, names: Sequence[str], location: str) -> InputError:
    """Return the error for a source without a required column."""
    return InputError(
        f"missing column {name!r}",
        location,
        f"Its columns are {list(names)}. {nearest_hint(name, names)} Map one in the mapping: "
        f"`columns: {{SOURCE: {name}}}`, or give a constant: `constants: {{{name}: …}}`.",
    )


def resolve_columns(
    names: Sequence[str],
    mapping: TableMapping,
    known: Sequence[str],
    location: str,
    required: Sequence[str] = (),
    *,
    aliases: Mapping[str, str] = KEY_ALIASES,
    ignored: Callable[[str], bool] = nothing_left_out,
    passed_on: Collection[str] = (),
    extras: bool = False,
    declare: bool = False,
) -> dict[str, str]:
    """Return the source column by dataset column, without constants.

    ``required``: dataset columns that the source or the constants must provide.
    ``aliases``: alternative names of columns.
    ``ignored``: predicate for source columns to skip.
    ``passed_on``: unknown columns exempt from ``ignore_others``.
    ``extras``: whether unknown columns keep their own names.
    ``declare``: whether the error for an unknown column suggests declaring a channel.
    Source columns of the mapping may be missing, see :func:`refuse_absent`.
    Raises ``InputError`` if the mapping names an unknown target, two source columns map to one target, or a column is
    unknown or missing.
    """
    targets = [target for mapped in mapping.columns.values() for target in _targets(mapped)]
    renamed = (*targets, *mapping.constants, *mapping.scale, *mapping.offset, *mapping.values, *mapping.drop_without)
    for target in renamed:
        if target not in known and not extras:
            hint = " A custom channel must be declared in params `channels:`." if declare else ""
            raise InputError(
                f"the mapping names an unknown target column {target!r}",
                f"{location}, mapping",
                (nearest_hint(target, known) or f"The columns are {list(known)}.") + hint,
            )
    unknown = unknown_columns(names, mapping, known, aliases, ignored, passed_on)
    if unknown and not extras:
        further = f" and {len(unknown) - 1} more: {list(unknown[1:])}" if len(unknown) > 1 else ""
        channel = f"declare it in params `channels: {{{unknown[0]}: {{kind: gauge}}}}`, or " if declare else ""
        raise InputError(
            f"unknown column {unknown[0]!r}{further}",
            location,
            f"{nearest_hint(unknown[0], [*known, *aliases])} Otherwise {channel}map it to null in the mapping to leave "
            "it out, or set `ignore_others: true` there for all such columns.".strip(),
        )
    source: dict[str, str] = {}
    for name in names:
        mapped = _mapped(name, names, mapping, known, aliases)
        if mapped == _UNKNOWN:
            mapped = name if name in unknown else None
        for target in _targets(mapped):
            by_name = mapping.columns.keys().isdisjoint({name, source.get(target, name)}) and target not in _KEYS
            if target in source and not by_name:  # else one value under two names, like nvidia-smi's power.draw
                raise InputError(
                    f"two source columns map to {target!r}: {source[target]!r} and {name!r}",
                    location,
                    "Map one of them to null in the mapping.",
                )
        source = {
            **{target: name for target in _targets(mapped) if target not in mapping.constants},
            **source,
        }
    for name in (*required, *mapping.drop_without):
        if name not in source and name not in mapping.constants:
            raise missing_column(name, names, location)
    return source


_KEYS: Final = frozenset({"timestamp", "node", "gpu"})
_UNKNOWN: Final = ""
_INDEX: Final = re.compile(r"__index_level_\d+__|Unnamed: \d+|")
"""Names that pandas gives an exported index."""


def refuse_absent(mapping: TableMapping, names: Collection[str], location: str) -> None:
    """Raise ``InputError`` if the mapping names a source column that is not in ``names``."""
    for column in mapping.columns:
        if column not in names:
            problem = f"the mapping names a source column {column!r} that is not there"
            raise InputError(problem, location, nearest_hint(column, list(names)) or f"It has {list(names)}.")


def unknown_columns(
    names: Sequence[str],
    mapping: TableMapping,
    known: Sequence[str],
    aliases: Mapping[str, str] = KEY_ALIASES,
    ignored: Callable[[str], bool] = nothing_left_out,
    passed_on: Collection[str] = (),
) -> list[str]:
    """Return the source columns that are neither known nor ignored; see :func:`resolve_columns`."""
    unknown = [name for name in names if _mapped(name, names, mapping, known, aliases) == _UNKNOWN]
    unknown = [name for name in unknown if not ignored(name) and not _INDEX.fullmatch(name)]
    return [name for name in unknown if name in passed_on or not mapping.ignore_others]


def targets_of(
    names: Sequence[str], mapping: TableMapping, known: Sequence[str], aliases: Mapping[str, str]
) -> dict[str, str]:
    """Return the source column by dataset column, known or mapped, without validation."""
    sources: dict[str, str] = {}
    for name in names:
        mapped = _mapped(name, names, mapping, known, aliases)
        for target in () if mapped == _UNKNOWN else _targets(mapped):
            sources.setdefault(target, name)
    return sources


def _targets(mapped: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (mapped,) if isinstance(mapped, str) else mapped or ()


def _mapped(
    name: str, names: Sequence[str], mapping: TableMapping, known: Sequence[str], aliases: Mapping[str, str]
) -> str | tuple[str, ...] | None:
    """Return the target of a source column, None to ignore it, or ``_UNKNOWN``."""
    if name in mapping.columns:
        return mapping.columns[name]
    if name == "gpu" and any(aliases.get(other) == "gpu" and other not in mapping.columns for other in names):
        # DCGM's label `gpu` is the index within the node; the GPU id is `UUID`.
        return "slot" if "slot" in known and "slot" not in names else None
    if name in known:
        return name
    if name.endswith(")") and aliases.get(name) in known:  # NODELIST(REASON)
        return aliases[name]
    for form in forms_of(name):
        for spelling in spellings(split_header(form)[0]):
            target = aliases.get(spelling, spelling)
            if target in known and spelling != "gpu":  # `GPU` may also be an index
                return target
    return _UNKNOWN


_NO_TEXTS: Final = pa.array(
    ["", "<<<NULL>>>", "<nil>", "(null)", "-", "--", "nan", "NaN", "null", "NULL", "None", "N/A", "n/a"]
    + [f"[{word}]" for text in sorted(NO_VALUE_WORDS) for word in (text.upper(), text.title(), text.capitalize(), text)]
    + ["[GPU is lost]", "[GPU requires reset]"]
)


def as_text(column: pa.ChunkedArray | None, length: int) -> npt.NDArray[np.object_]:
    """Return a column as stripped strings, None where it is null, empty or a placeholder for a missing value.

    Integral floats lose their ``.0``: CSV tools write XID 79 in a column with gaps as ``79.0``.
    """
    if column is None:
        return np.full(length, None, dtype=object)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_floating(column.type):
        numbers = (None if value is None or math.isnan(value) else value for value in column.to_pylist())
        texts = [str(int(value)) if value is not None and value.is_integer() else value for value in numbers]
        return np.array([None if text is None else str(text) for text in texts], dtype=object)
    text = pc.utf8_trim_whitespace(column.cast(pa.string()))
    text = pc.if_else(pc.is_in(text, value_set=_NO_TEXTS), None, text)
    return np.array(text.to_numpy(zero_copy_only=False), dtype=object)


def as_counts(column: pa.ChunkedArray | None, length: int) -> npt.NDArray[np.int64]:
    """Return the number of events or samples per row, clipped to int32 and at least 1; 1 where unreadable."""
    if column is None:
        return np.ones(length, np.int64)
    numbers = pd.to_numeric(column.to_pandas(), errors="coerce").to_numpy(np.float64, na_value=np.nan)
    return np.clip(np.nan_to_num(numbers, nan=1.0, posinf=1.0, neginf=1.0), 1, 2**31 - 1).astype(np.int64)
