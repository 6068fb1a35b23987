"""An assessment as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pipeline.report.wording import between, count, number, percent

_ANSWERS: Final = {
    "yes": "YES. Failures are predictable here.",
    "weakly": "WEAKLY. Alerts are better than chance, but do not catch a fifth of the failures, or not more than "
    "counting past failures would.",
    "no": "NO. Failures are not predictable from this telemetry: alerts are not better than chance, and fewer than a "
    "fifth of the failures can be caught.",
    "too few failures": "TOO FEW FAILURES TO TELL. About {more} more are needed in the replayed period.",
    "no failures": "NO FAILURES in the data, so nothing can be said. About {more} are needed.",
}
_STAGES: Final = {
    "hard": "drain nodes (stage hard)",
    "soft": "keep new jobs off nodes at risk, and do not drain (stage soft)",
    "shadow": "do not drain; act on nothing, and record what would have been done (stage shadow)",
}
_COLUMNS: Final = ("policy", "drains", "right", "caught", "saved", "repairs", "spent", "net", "95 % interval")


def verdict_text(content: dict[str, Any], out: Path, dataset: str, params: Sequence[Path]) -> str:
    """Write the verdict.

    ``content``: as :func:`pipeline.assessment.assess_fleet` returns it; ``params``: the files that it was made with.
    """
    lines = [*_data(content["data"]), "", *_predictable(content["predictable"])]
    if content.get("policies"):
        lines += ["", *_policies(content)]
    return "\n".join([*lines, "", *_next(content, out, dataset, params)]) + "\n"


def _data(data: dict[str, Any]) -> list[str]:
    failures = ", ".join(f"{size} {name}" for name, size in data["failures"].items()) or "none"
    lines = [
        f"What the data holds{' (a simulated fleet)' if data['simulated'] else ''}",
        f"  {count(data['units'])} {data['unit']}s on {count(data['nodes'])} nodes, {data['days']:g} days, "
        f"{count(data['samples'])} samples, {count(data['jobs'])} jobs",
        f"  failures: {sum(data['failures'].values())} ({failures})",
    ]
    if data["missing_channels"]:
        lines.append(
            f"  {len(data['missing_channels'])} channels missing; `predrain doctor` shows how to switch them on:"
        )
        lines += [f"    {todo['what']}; unseen: {todo['shows']}" for todo in data["to_do"]]
    return lines


def _predictable(judged: dict[str, Any]) -> list[str]:
    lines = [f"Are failures predictable here?  {_ANSWERS[judged['answer']].format(more=judged['more'])}"]
    if judged["precision"][0] is not None:
        lines += [
            f"  precision of drains {_bounded(judged['precision'])}, drawing at random {_percent(judged['chance'])}",
            f"  caught {_bounded(judged['recall'])} of the {judged['failures']} failures that were replayed",
            f"  more than counting past failures at as many alerts: {_bounded(judged['more_than_counting'])}",
        ]
    if judged["lead_hours"][1] is not None:
        early, half, late = (f"{value:.0f} h" for value in judged["lead_hours"])
        lines.append(f"  lead time: half of them {half} or more ahead (quartiles {early} and {late})")
    if judged["without_precursor"] is not None:
        lines.append(f"  without any precursor that a model saw: {_percent(judged['without_precursor'])}")
    return lines


def _policies(content: dict[str, Any]) -> list[str]:
    jobs, even = content["jobs"], content["break_even"]
    rows = [_COLUMNS, *(_cells(row) for row in content["policies"])]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_COLUMNS))]
    held = content["replayed"]["held_back"]
    worth = "never" if even is None else f"from a risk of {percent(even)}"
    return [
        f"What would have been saved, in GPU-hours (jobs: {jobs['from']}, mean gang "
        f"{number(jobs['mean_gpus_by_gpu_hours'], 0)} GPUs, a checkpoint every {jobs['checkpoint_every']})",
        *(
            "  " + row[0].ljust(widths[0]) + "".join(f"  {cell:>{widths[at]}}" for at, cell in enumerate(row) if at)
            for row in rows
        ),
        f"  With these jobs a drain that a diagnostic follows is worth it {worth}. `repairs`: a planned repair "
        f"is taken to be {jobs['planned_repair_saves_hours']:g} hours of the node shorter than an unplanned one.",
        *(
            [
                f"  Disruption budgets held back {count(held)} drains: a tenth of the fleet's "
                f"{count(content['replayed']['nodes'])} nodes may be out of service at once, those in repair included."
            ]
            if held
            else []
        ),
    ]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    whole = (f"{row['drains']}", f"{row['right']} of {row['known']}", f"{row['caught']}")
    hours = (f"{row[name]:,.0f}" for name in ("saved", "repairs", "spent", "net"))
    low, high = row["net_low"], row["net_high"]
    return (row["policy"], *whole, *hours, "" if low is None else f"{low:,.0f} to {high:,.0f}")


def _next(content: dict[str, Any], out: Path, dataset: str, params: Sequence[Path]) -> list[str]:
    chosen, settings = content["recommended"], out / "recommended.yaml"
    given, acts = "".join(f" --params {path}" for path in params), f"--settings {settings} --events {dataset} --dry-run"
    lines = [f"Recommended: {_STAGES[chosen['stage']]}. Settings: {settings}"]
    share = chosen["diagnostic_finds_at_least"]
    if share is not None:
        lines.append(f"  It pays if a diagnostic finds at least {percent(share)} of the faults that it is shown.")
    if chosen["rests_on_planned_repairs"]:
        lines.append(
            "  It pays by `repairs` alone: at these jobs, what jobs are spared does not make up for what is spent."
        )
    return [
        *lines,
        "",
        "What to do next",
        f"  predrain train --matrix {out}/matrix --backtest {out}/replay{given} --out {out}/bundle",
        f"  predrain score --dataset {dataset} --model {out}/bundle{given} --params {settings} --out {out}/scores",
        f"  predrain act --scheduler kubernetes --scores {out}/scores {acts}",
    ]


def _bounded(value: Any) -> str:
    middle, low, high = value
    if low is None:
        return _percent(middle)
    return f"{_percent(middle)} {between(percent(low), percent(high))}"


def _percent(value: float | None) -> str:
    return "unknown" if value is None else percent(value)
