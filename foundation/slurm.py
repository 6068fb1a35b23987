"""Slurm's JSON across its versions, whose numbers became objects and states lists; its texts of nodes and GPUs."""

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from foundation.text import storable

_NO_VALUE: Final = frozenset({0, 0xFFFFFFFE, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFE, 0xFFFFFFFFFFFFFFFF})
# NO_VAL and INFINITE of slurm.h, which older versions print as numbers; time 0 is "never".


class SlurmFormatError(ValueError):
    """Output of a Slurm command that is not what we know."""


def read_rows(report: str, key: str) -> list[Any]:
    """Return what a report lists under ``key``; entries may be damaged, see :func:`check_row`.

    Raises ``SlurmFormatError`` if the report is no JSON, is nested too deeply, or has no such list.
    """
    try:
        # Debug lines of plugins may come before the report.
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
    """Return a row that is an object whose named numbers are finite and fit into 64 bits; else raise ``ValueError``."""
    if not isinstance(row, Mapping):
        raise ValueError("no JSON object")
    for name in numbers:
        value = row.get(name)
        value = value.get("number") if isinstance(value, Mapping) else value
        if isinstance(value, int | float) and not abs(value) < 1 << 64:  # so for NaN, too
            raise ValueError(f"{name} is not a 64-bit number")
    return row


def number(value: object) -> int | None:
    """Return a whole number, from itself or from ``{"set": …, "infinite": …, "number": …}``; None for "no value"."""
    if isinstance(value, Mapping):
        if value.get("set") is False or value.get("infinite") is True:
            return None
        value = value.get("number")
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1 << 65:
        return None
    return int(value)


def instant(value: object) -> datetime | None:
    """Return an aware instant from seconds since 1970; None for "never" and "unknown"."""
    seconds = number(value)
    if seconds is None or seconds in _NO_VALUE or not 0 < seconds < 1 << 36:
        return None
    return datetime.fromtimestamp(seconds, UTC)


_SUFFIXES: Final = {
    "~": "POWERED_DOWN", "#": "POWERING_UP", "!": "POWER_DOWN", "%": "POWERING_DOWN", "$": "MAINT",
    "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED", "-": "PLANNED", "*": "NOT_RESPONDING",
}  # fmt: skip
# sinfo(1), NODE STATE CODES: flags as suffixes.


def states_of(value: object) -> list[str]:
    """Return states in upper case, from one text or a list of texts; a suffix such as of ``DOWN*`` as its state."""
    if isinstance(value, str):
        value = value.replace("+", " ").replace(",", " ").split()
    states = map(str, value) if isinstance(value, list) else ()
    names: list[str] = []
    for state in (storable(state).strip().upper() for state in states):
        name = state.rstrip("".join(_SUFFIXES))
        names += [name, *(_SUFFIXES[suffix] for suffix in state[len(name) :])]
    return [name for name in names if name]


def text(value: object) -> str | None:
    """Return a text that UTF-8 can hold; None for empty ones and Slurm's ways to write none."""
    if not isinstance(value, str) or value.strip().lower() in ("", "none", "(null)", "n/a", "unknown"):
        return None
    return storable(value.strip())


MAX_NODES: Final = 1_000_000
"""A list of more names is taken for damage; the largest clusters have some ten thousand nodes."""

_PART: Final = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")  # commas within brackets do not end one
_PIECE: Final = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_RANGE: Final = re.compile(r"(?P<low>\d+)(?:-(?P<high>\d+))?\Z")


def expand_hostlist(text: str) -> list[str]:
    """Return the names of a host list, in its order: ``gpu[08-10,12],login1``; ``[8-10]`` is 8, 9, 10.

    Raises ``ValueError`` if the brackets do not match, a range is none or falls, or it makes over :data:`MAX_NODES`
    names.
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
"""States of jobs that have no end."""

_TRES_GPU = re.compile(r"(?:^|,)gres/gpu=(\d+)")
_TRES_TYPED = re.compile(r"(?:^|,)gres/gpu:[^=,]+=(\d+)")
_GRES_GPU = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?::(?!\d+(?:,|$))[^:,()=]+)?(?:[:=](\d+)|(?=,|$))")
_SHARED = re.compile(r"(?:^|,)(?:gres[:/])?(?:shard|mps)(?::[^:,()=]+)*[:=]0*[1-9]")
_MIG = re.compile(r"gpu:[^:,()=]*\d+g\.\d+gb[^:,()=]*[:=]0*[1-9]", re.IGNORECASE)


def state_of(written: str) -> str:
    """Return the state in a text of sacct: of ``CANCELLED by 1000`` the first word; a narrow column ends in ``+``."""
    return (written.split() or [""])[0].rstrip("+").upper()


def gpus_of(resources: str) -> int:
    """Return the GPUs in AllocTRES (``cpu=8,gres/gpu=4,gres/gpu:h100=4``) or gres (``gpu:h100:4(IDX:0-3)``).

    TRES give the sum next to its parts by type, or, where the sum is not accounted for, the parts alone. Shards, MPS
    and MIG instances are parts of GPUs, which :func:`shares_a_gpu` tells.
    """
    whole = _TRES_GPU.search(resources)
    if whole is not None:
        return int(whole[1])
    typed = _TRES_TYPED.findall(resources) or _GRES_GPU.findall(re.sub(r"\([^)]*\)", "", resources))
    return sum(int(count or 1) for count in typed)  # `--gres=gpu` asks for one


def shares_a_gpu(resources: str) -> bool:
    """Whether AllocTRES or gres are parts of GPUs only: shards, MPS or MIG instances.

    Which GPU, and how many jobs are on it, Slurm does not say: such a job counts as one of one GPU on each node.
    """
    if _MIG.search(resources):
        return True
    return _SHARED.search(re.sub(r"\([^)]*\)", "", resources)) is not None and gpus_of(resources) == 0


def spread_gpus(resources: str, total: int, nodes: int) -> tuple[int | None, ...]:
    """Return the GPUs on each node: an even share of the sum, one where jobs share a GPU."""
    if shares_a_gpu(resources):
        return (1,) * nodes
    return (total // nodes if nodes and total % nodes == 0 else None,) * nodes
