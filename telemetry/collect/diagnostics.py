"""``dcgmi diag -j`` of DCGM 3 and 4 to one verdict a GPU: pass, fail, or inconclusive.

Only a run in which every test that a GPU got came out as "Pass" is a pass. A failed test is a fail. Warnings, tests
skipped or not run, GPUs without a result, and runs that were cut short are inconclusive: they cleared nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Verdict = Literal["pass", "fail", "inconclusive"]
"""Codes of ``diagnostic`` events."""

_REPORTS: Final = ("DCGM Diagnostic", "DCGM GPU Diagnostic")  # DCGM 4 and 3
_PASS: Final = frozenset({"pass", "passed"})
_FAIL: Final = frozenset({"fail", "failed"})
_WHOLE: Final = ""
# Index of a result that names no GPU: it is about the node, as most tests of the software are.


@dataclass(frozen=True, slots=True)
class GpuVerdict:
    """What a run says of one GPU.

    ``index``: DCGM's number of the GPU; empty for the node, where the run says nothing of GPUs.
    ``detail``: the tests that decided. Of an inconclusive run it has no word for a success or a failure, so that nobody
    who searches it for one is misled.
    """

    index: str
    serial: str | None
    code: Verdict
    detail: str | None


@dataclass(slots=True)
class _Tests:
    failed: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    passed: int = 0


def read_diagnostics(report: str, *, may_skip: Collection[str] = ()) -> list[GpuVerdict]:
    """Read the output of one run.

    ``report``: JSON, cut short or not; what is around it is left out.
    ``may_skip``: names of tests (without case) that do not count when they were skipped or not run, such as ``eud``,
    which needs a package of its own.
    Returns: by index; a single one with an empty index where nothing can be told of any GPU.
    """
    content = _object(report)
    if content is None:
        return [GpuVerdict(_WHOLE, None, "inconclusive", "the report is not whole")]
    gpus = _gpus(content)
    body = next((content[name] for name in _REPORTS if isinstance(content.get(name), Mapping)), None)
    tests: dict[str, _Tests] = {index: _Tests() for index in gpus}
    everywhere = _Tests()
    allowed = {name.lower() for name in may_skip}
    for name, index, status in _results({} if body is None else body):
        each = everywhere if index == _WHOLE else tests.setdefault(index, _Tests())
        if status in _PASS:
            each.passed += 1
        elif status in _FAIL:
            each.failed.append(name)
        elif not (name.lower() in allowed and status in ("skip", "skipped", "not run", "notrun")):
            each.odd.append(f"{name}: {_neutral(status)}")
    cut = body is None or _aborted(content) or _aborted(body)
    if not tests:
        return [GpuVerdict(_WHOLE, None, "inconclusive", "the run was cut short" if cut else "no GPU was tested")]
    order = sorted(tests, key=lambda index: (len(index), index))
    return [GpuVerdict(index, gpus.get(index), *_verdict(tests[index], everywhere, cut=cut)) for index in order]


def _verdict(own: _Tests, everywhere: _Tests, *, cut: bool) -> tuple[Verdict, str | None]:
    if own.failed:
        return "fail", "failed: " + ", ".join(dict.fromkeys(own.failed))
    why: list[str] = ["the run was cut short"] if cut else []
    # A failed test of the node (a library missing, a setting) says nothing of this GPU, but the run cleared nothing.
    why += [f"{name}: not met on the node" for name in everywhere.failed]
    why += dict.fromkeys([*own.odd, *everywhere.odd])
    if not own.passed and not why:
        why = ["no test of this GPU"]
    return ("inconclusive", "; ".join(why)) if why else ("pass", None)


def _object(report: str) -> dict[str, Any] | None:
    start = report.find("{")
    if start < 0:
        return None
    try:
        content, _ = json.JSONDecoder().raw_decode(report, start)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _gpus(content: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the serial number of every GPU of the run by index."""
    found: dict[str, str | None] = {}
    ids = content.get("GPU Device IDs")  # DCGM 3: device ids in the order of the GPUs
    if isinstance(ids, list):
        found |= {str(index): None for index in range(len(ids))}
    serials = content.get("GPU Device Serials")
    if isinstance(serials, Mapping):
        found |= {str(index): _serial(serial) for index, serial in serials.items()}
    for group in _list(content.get("entity_groups")):  # DCGM 4
        if str(group.get("entity_group", "")).upper() == "GPU":
            for entity in _list(group.get("entities")):
                if "entity_id" in entity:
                    found[str(entity["entity_id"])] = _serial(entity.get("serial_num"))
    return found


def _serial(value: object) -> str | None:
    return value.strip() if isinstance(value, str) and value.strip() not in ("", "N/A") else None


def _results(body: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield test, GPU index (empty: the node) and status in lower case."""
    for category in _list(body.get("test_categories")):
        for test in _list(category.get("tests")):
            name = str(test.get("name") or "unnamed test")
            for result in _list(test.get("results")):
                status = " ".join(str(result.get("status", "")).lower().split())
                for index in _indices(result):
                    yield name, index, status


def _indices(result: Mapping[str, Any]) -> list[str]:
    if "entity_id" in result or "entity_group" in result:
        group = str(result.get("entity_group", "GPU")).upper()
        return [str(result["entity_id"])] if group == "GPU" and "entity_id" in result else [_WHOLE]
    for key in ("gpu_id", "gpu_ids"):
        if key in result:
            value = result[key]
            parts = value if isinstance(value, list) else str(value).split(",")
            found = [str(part).strip() for part in parts if str(part).strip()]
            return found or [_WHOLE]
    return [_WHOLE]


def _aborted(content: Mapping[str, Any]) -> bool:
    return any(content.get(key) for key in ("runtime_error", "error", "errors"))


def _neutral(status: str) -> str:
    """Return a status in our own words: what we do not know may say anything."""
    if status.startswith("warn"):
        return "warning"
    if status in ("skip", "skipped"):
        return "skipped"
    return "not run" if status in ("not run", "notrun", "") else "no known result"


def _list(value: object) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
