"""Parsers for Slurm: JSON of all versions (numbers became objects, states became lists), host lists, GPU counts."""

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from foundation.text import storable

_NO_VALUE: Final = frozenset({0, 0xFFFFFFFE, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFE, 0xFFFFFFFFFFFFFFFF})
# NO_VAL and INFINITE of slurm.h, which older versions print as numbers; a time of 0 is "never".

LOCAL: Final[Mapping[str, str]] = dict.fromkeys(("SACCT_LOCAL", "SCONTROL_LOCAL", "SINFO_LOCAL", "SQUEUE_LOCAL"), "1")
"""Environment of commands that list this cluster only: with ``fed_display`` they list all clusters of a federation."""


class SlurmFormatError(ValueError):
    """Unexpected output of a Slurm command."""


def read_rows(report: str, key: str) -> list[Any]:
    """Return the list under ``key`` of a JSON report; validate its entries with :func:`check_row`.

    Raises ``SlurmFormatError`` if the report is not JSON, is nested too deeply, has no such list, or has an empty list
    and errors.
    """
    try:
        # Plugins may print debug lines before the report.
        content = json.loads(report[max(report.find("{"), 0) :])
    except ValueError as error:
        raise SlurmFormatError(f"not JSON: {error}") from None
    except RecursionError:
        raise SlurmFormatError("not JSON: nested too deeply") from None
    rows = content.get(key) if isinstance(content, dict) else None
    if not isinstance(rows, list):
        raise SlurmFormatError(f"it has no list {key}")
    if not rows and content.get("errors"):
        raise SlurmFormatError(f"Slurm reports {str(content['errors'])[:300]}")
    return rows


def check_row(row: object, numbers: Iterable[str]) -> Mapping[str, Any]:
    """Return a row; raise ``ValueError`` if it is not an object or a named number is not finite or exceeds 64 bits."""
    if not isinstance(row, Mapping):
        raise ValueError("no JSON object")
    for name in numbers:
        value = row.get(name)
        value = value.get("number") if isinstance(value, Mapping) else value
        if isinstance(value, int | float) and not abs(value) < 1 << 64:  # also true of NaN
            raise ValueError(f"{name} is not a 64-bit number")
    return row


def number(value: object) -> int | None:
    """Parse an integer, plain or as ``{"set": …, "infinite": …, "number": …}``; None for "no value"."""
    if isinstance(value, Mapping):
        if value.get("set") is False or value.get("infinite") is True:
            return None
        value = value.get("number")
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1 << 65:
        return None
    return int(value)


def instant(value: object) -> datetime | None:
    """Convert seconds since 1970 to an aware datetime; None for "never" and "unknown"."""
    seconds = number(value)
    if seconds is None or seconds in _NO_VALUE or not 0 < seconds < 1 << 36:
        return None
    return datetime.fromtimestamp(seconds, UTC)


_SUFFIXES: Final = {
    "~": "POWERED_DOWN", "#": "POWERING_UP", "!": "POWER_DOWN", "%": "POWERING_DOWN", "$": "MAINT",
    "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED", "-": "PLANNED", "*": "NOT_RESPONDING",
}  # fmt: skip
# Suffixes of node states, see sinfo(1), NODE STATE CODES.


def states_of(value: object) -> list[str]:
    """Return states in upper case, from a string or a list; a suffix (``DOWN*``) becomes its state."""
    if isinstance(value, str):
        value = value.replace("+", " ").replace(",", " ").split()
    states = map(str, value) if isinstance(value, list) else ()
    names: list[str] = []
    for state in (storable(state).strip().upper() for state in states):
        name = state.rstrip("".join(_SUFFIXES))
        names += [name, *(_SUFFIXES[suffix] for suffix in state[len(name) :])]
    return [name for name in names if name]


def text(value: object) -> str | None:
    """Return a string that UTF-8 can encode; None for an empty one and Slurm's spellings of "none"."""
    if not isinstance(value, str) or value.strip().lower() in ("", "none", "(null)", "n/a", "unknown"):
        return None
    return storable(value.strip())


MAX_NODES: Final = 1_000_000
"""Limit on a host list; the largest clusters have some ten thousand nodes."""

_PART: Final = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")  # commas within brackets are no separators
_PIECE: Final = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_RANGE: Final = re.compile(r"(?P<low>\d+)(?:-(?P<high>\d+))?\Z")


def expand_hostlist(text: str) -> list[str]:
    """Expand a host list in order: ``gpu[08-10,12],login1``; ``[8-10]`` is 8, 9, 10.

    Raises ``ValueError`` for unbalanced brackets, an invalid or descending range, or over :data:`MAX_NODES` names.
    """
    if set("[]") & set(_PART.sub("", text)):
        raise ValueError(f"{text[:80]!r} has unbalanced brackets")
    names: list[str] = []
    for part in filter(None, map(str.strip, _PART.findall(text))):
        pieces = [[plain] if plain else _numbers(ranges) for ranges, plain in _PIECE.findall(part)]
        if len(names) + math.prod(map(len, pieces)) > MAX_NODES:
            raise ValueError(f"{text[:80]!r} represents over {MAX_NODES:,} nodes")
        names += map("".join, itertools.product(*pieces))
    return names


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for written in map(str.strip, ranges.split(",")):
        match = _RANGE.match(written)
        low, high = (0, -1) if match is None else (int(match["low"]), int(match["high"] or match["low"]))
        if match is None or not 0 <= high - low < MAX_NODES:
            raise ValueError(f"{written!r} is not a number range")
        numbers += [f"{number:0{len(match['low'])}d}" for number in range(low, high + 1)]
    return numbers


UNFINISHED: Final = frozenset({"RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STAGE_OUT", "RESIZING", "STOPPED"})
"""Job states without an end time."""

_TRES_GPU = re.compile(r"(?:^|,)gres/gpu=(\d+)")
_TRES_TYPED = re.compile(r"(?:^|,)gres/gpu:[^=,]+=(\d+)")
_GRES_GPU = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?::(?!\d+(?:,|$))[^:,()=]+)?(?:[:=](\d+)|(?=,|$))")
_SHARED = re.compile(r"(?:^|,)(?:gres[:/])?(?:shard|mps)(?::[^:,()=]+)*[:=]0*[1-9]")
_MIG = re.compile(r"gpu:[^:,()=]*\d+g\.\d+gb[^:,()=]*[:=]0*[1-9]", re.IGNORECASE)


def state_of(written: str) -> str:
    """Parse a state as sacct prints it: ``CANCELLED by 1000`` is CANCELLED; truncated columns end in ``+``."""
    return (written.split() or [""])[0].rstrip("+").upper()


def gpus_of(resources: str) -> int:
    """Return the number of GPUs in AllocTRES (``cpu=8,gres/gpu=4,gres/gpu:h100=4``) or gres (``gpu:h100:4(IDX:0-3)``).

    TRES list the total and the counts by type, or only the latter if the total is not accounted. For shards, MPS and
    MIG instances see :func:`shares_a_gpu`.
    """
    match = _TRES_GPU.search(resources)
    if match is not None:
        return int(match[1])
    typed = _TRES_TYPED.findall(resources) or _GRES_GPU.findall(re.sub(r"\([^)]*\)", "", resources))
    return sum(int(count or 1) for count in typed)  # `--gres=gpu` requests one


def shares_a_gpu(resources: str) -> bool:
    """Whether AllocTRES or gres hold only fractions of GPUs: shards, MPS or MIG instances.

    Slurm does not report which GPU is shared, so such a job counts as one GPU on each node.
    """
    if _MIG.search(resources):
        return True
    return _SHARED.search(re.sub(r"\([^)]*\)", "", resources)) is not None and gpus_of(resources) == 0


def spread_gpus(resources: str, total: int, nodes: int) -> tuple[int | None, ...]:
    """Return the GPUs on each node: the total split evenly (None if it does not divide), or 1 for a shared GPU."""
    if shares_a_gpu(resources):
        return (1,) * nodes
    return (total // nodes if nodes and total % nodes == 0 else None,) * nodes
