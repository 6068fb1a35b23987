"""Looking at what ``predrain collect exporters`` wrote of itself and its targets: ``state/exporters.json``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from telemetry.config import format_duration, parse_duration
from telemetry.doctor.observation import Finding, Observation
from telemetry.errors import InputError

_SHOWN: Final = 5
_SKEW_S: Final = 5.0
_SLOW_S: Final = 5.0
_FAILING_SHARE: Final = 0.05  # of a target's scrapes: more than an exporter's restarts explain
_SILENT_INTERVALS: Final = 5.0
_FEWER_SHARE: Final = 0.9

_DO: Final[Mapping[str, str]] = {
    "refused": "Nobody listens there: start the exporter, or take the target off the list.",
    "unreachable": "Check the node, its name and the network.",
    "timeout": "Look at the node: a driver that hangs makes the exporter hang. Drain it if it stays so.",
    "tls": "Give the right --ca-file, or mend the certificate.",
    "status": "Look at the exporter's log, and at the credentials.",
    "redirect": "Give the address behind the redirect, or its credentials.",
    "truncated": "Look at the exporter's log: its pages end too early.",
    "too_large": "Look at the page: it is larger than any of a real node.",
    "protocol": "Check the port: what answers there does not speak HTTP.",
    "parse": "Check the path: what answers there is no exporter's page.",
    "empty": "The exporter sees no GPU: restart it after the driver is loaded.",
}


def observe_collector(path: Path, *, now: datetime) -> Observation:
    """Look at a collector's state file.

    ``path``: ``DATASET.live/state/exporters.json``.
    Raises ``InputError`` if there is none, or it is not one.
    """
    state = _read(path)
    collectors: dict[str, Any] = state["collectors"]
    targets: dict[str, Any] = state["targets"]
    gpus = {gpu: count for target in targets.values() for gpu, count in target["gpus"].items()}
    rates = [target["failures_total"] / target["scrapes"] for target in targets.values() if target["scrapes"]]
    facts = {
        "collectors": ", ".join(sorted(collectors)) or "none",
        "targets": f"{len(targets):,}",
        "scrapes that failed": f"{sum(rates) / len(rates):.1%}" if rates else "none yet",
        "channels a GPU": _spread(list(gpus.values())),
    }
    return Observation(
        kind="collector",
        where=str(path),
        at=now,
        units=len(gpus),
        nodes=len(targets),
        models={},
        channels={},
        judged=False,
        facts=facts,
        findings=(*_of_collectors(collectors, now), *_of_targets(targets)),
        unknown=tuple(sorted({name for target in targets.values() for name in target["unexplained"]})),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(
            "no collector of exporters has written its state there",
            str(path),
            "Give DATASET.live or its state/exporters.json of a running `predrain collect exporters`.",
        ) from None
    except (ValueError, OSError) as error:
        raise InputError(f"the state cannot be read: {error}", str(path), "Give state/exporters.json.") from error
    parts = [content.get(part) for part in ("collectors", "targets")] if isinstance(content, dict) else []
    whole = [part for part in parts if isinstance(part, dict) and all(isinstance(each, dict) for each in part.values())]
    if len(whole) != 2:
        raise InputError("the file is not a collector's state", str(path), "Give state/exporters.json.")
    defaults: dict[str, Any] = {
        "gpus": {}, "unexplained": [], "problems": {}, "failures_total": 0, "failures_in_row": 0, "scrapes": 0,
        "hung": False, "last_failure_kind": None, "last_failure": None, "last_success_at": None,
        "scrape_duration_s": None, "clock_skew_s": None, "page_age_s": None,
    }  # fmt: skip
    return {"collectors": whole[0], "targets": {name: defaults | target for name, target in whole[1].items()}}


def _spread(counts: list[int]) -> str:
    if not counts:
        return "no GPU was seen"
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _of_collectors(collectors: Mapping[str, Any], now: datetime) -> list[Finding]:
    found = []
    for name, collector in sorted(collectors.items()):
        interval_s = float(collector.get("interval_s", 30.0))
        silent_s = _age_s(collector.get("seen_at"), now)
        if silent_s is None or silent_s > _SILENT_INTERVALS * interval_s:
            since = "for ever" if silent_s is None else f"for {_rounded(silent_s)}"
            found.append(
                Finding(f"the collector {name} has been silent {since}", "Start it again, or look at its log.")
            )
            continue
        if collector.get("problem"):
            found.append(Finding(f"{name} cannot land its rows: {collector['problem']}", "Make room on the disk."))
        dropped = int(collector.get("rows_dropped", 0))
        if dropped:
            found.append(Finding(f"{name} had to drop {dropped:,} rows", "Make room on the disk it lands on."))
        late, scrapes = int(collector.get("late", 0)), int(collector.get("scrapes", 0))
        if scrapes and late / scrapes > _FAILING_SHARE:
            found.append(
                Finding(
                    f"{late / scrapes:.0%} of the scrapes of {name} start late",
                    "Give it a whole core, a longer --interval, or a second collector to share the targets.",
                )
            )
        if collector.get("clock_jumps"):
            found.append(
                Finding(f"the clock of {name} was set {collector['clock_jumps']} times", "Check time synchronisation.")
            )
    return found


def _of_targets(targets: Mapping[str, Any]) -> list[Finding]:
    if not targets:
        return [Finding("no target was scraped", "Look at the collector's --targets.")]
    found = []
    down: dict[str, list[str]] = {}
    for name, target in sorted(targets.items()):
        if target["failures_in_row"]:
            down.setdefault(str(target["last_failure_kind"]), []).append(name)
    for kind, names in sorted(down.items(), key=lambda item: -len(item[1])):
        detail = f" ({targets[names[0]]['last_failure']})" if targets[names[0]]["last_failure"] else ""
        found.append(
            Finding(f"{_named(names)} cannot be scraped now: {kind}{detail}", _DO.get(kind, "Look at the node."))
        )
    groups: tuple[tuple[str, str, list[str]], ...] = (
        (
            "often cannot be scraped",
            "Look at those nodes: an exporter that comes and goes precedes a GPU that is lost.",
            [
                name
                for name, each in targets.items()
                if not each["failures_in_row"]
                and each["scrapes"]
                and each["failures_total"] / each["scrapes"] > _FAILING_SHARE
            ],
        ),
        (
            "give the same page for ever",
            "Restart the exporter; if it freezes again, drain the node.",
            [name for name, each in targets.items() if each["hung"]],
        ),
        (
            "answer slowly",
            "Look at those nodes: a slow driver precedes a GPU that falls off the bus.",
            [name for name, each in targets.items() if (each["scrape_duration_s"] or 0.0) > _SLOW_S],
        ),
        (
            "have a clock that is off ours",
            "Check time synchronisation there.",
            [name for name, each in targets.items() if abs(each["clock_skew_s"] or 0.0) > _SKEW_S],
        ),
        (
            "have GPUs with fewer channels than the others",
            "Compare counter file, driver and MIG: `predrain doctor http://NODE:9400/metrics`.",
            _with_fewer_channels(targets),
        ),
    )
    found += [Finding(f"{_named(sorted(names))} {what}", do) for what, do, names in groups if names]
    problems: Counter[str] = Counter()
    for target in targets.values():
        problems.update(target["problems"])
    if problems:
        told = ", ".join(f"{why} ({count:,})" for why, count in problems.most_common(_SHOWN))
        found.append(Finding(f"parts of pages were left out: {told}", problem=False))
    return found


def _with_fewer_channels(targets: Mapping[str, Any]) -> list[str]:
    counts = [count for target in targets.values() for count in target["gpus"].values()]
    usual = Counter(counts).most_common(1)[0][0] if counts else 0
    return [
        name
        for name, target in targets.items()
        if any(count < _FEWER_SHARE * usual for count in target["gpus"].values())
    ]


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"{len(names):,} of the targets ({', '.join(names[:_SHOWN])}{more})"


def _age_s(instant: object, now: datetime) -> float | None:
    try:
        return (now - datetime.fromisoformat(str(instant))).total_seconds()
    except (ValueError, TypeError):
        return None


def _rounded(seconds: float) -> str:
    if seconds >= 7200:
        return format_duration(parse_duration(f"{round(seconds / 3600)}h"))
    return format_duration(parse_duration(f"{round(seconds / 60)}m")) if seconds >= 120 else f"{seconds:.0f}s"
