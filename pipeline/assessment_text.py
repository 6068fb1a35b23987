"""An assessment in words and tables, and as text for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pipeline.report.tables import Cell, Table
from pipeline.report.wording import NONE, between, count, join, number, percent

ANSWERS: Final = {
    "yes": "YES. Failures are predictable here.",
    "weakly": "WEAKLY. Alerts are better than chance, but do not catch a fifth of the failures, or not more than "
    "counting past failures would.",
    "no": "NO. Failures are not predictable from this telemetry: alerts are not better than chance, and fewer than a "
    "fifth of the failures can be caught.",
    "too few failures": "TOO FEW FAILURES TO TELL. About {more} more are needed in the replayed period.",
    "no failures": "NO FAILURES in the data, so nothing can be said. About {more} are needed.",
}
STAGES: Final = {
    "hard": "drain nodes (stage hard)",
    "soft": "keep new jobs off nodes at risk, and do not drain (stage soft)",
    "shadow": "do not drain; act on nothing, and record what would have been done (stage shadow)",
}
_FINDS: Final = {
    "drains": "without a diagnostic",
    "drains, a diagnostic that finds nothing": "with one that finds nothing",
    "drains, a diagnostic that finds all": "with one that finds all",
}


def verdict_text(content: dict[str, Any], out: Path, dataset: str, params: Sequence[Path]) -> str:
    """Write the verdict.

    ``content``: as :func:`pipeline.assessment.assess_fleet` returns it; ``params``: the files that it was made with.
    """
    held, todos = data(content["data"])
    lines = [f"What the data holds{' (a simulated fleet)' if content['data']['simulated'] else ''}"]
    lines += [f"  {line}" for line in held] + [f"    {todo}" for todo in todos]
    lines += ["", f"Are failures predictable here?  {answer(content)}"]
    lines += [f"  {line}" for line in figures(content["predictable"])]
    for table, notes in ((policies(content), policy_notes), (job_sizes(content), lambda _: ())):
        if table is not None:
            lines += ["", table.caption, *_text_of(table), *(f"  {note}" for note in notes(content))]
    first, *reasons = recommendation(content)
    lines += ["", f"{first} Settings: {out / 'recommended.yaml'}", *(f"  {reason}" for reason in reasons), ""]
    lines += ["What to do next", *(f"  {line}" for line in commands(content, out, dataset, params))]
    return "\n".join(lines) + "\n"


def data(data: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Say what the data holds, and what is missing in them."""
    failures = ", ".join(f"{size} {name}" for name, size in data["failures"].items()) or "none"
    lines = [
        f"{count(data['units'])} {data['unit']}s on {count(data['nodes'])} nodes, {data['days']:g} days, "
        f"{count(data['samples'])} samples, {count(data['jobs'])} jobs",
        f"failures: {sum(data['failures'].values())} ({failures})",
    ]
    if data["set_aside"]:
        reasons = ", ".join(f"{reason} {count(rows)}" for reason, rows in data["set_aside"].items())
        lines.append(f"set aside, in the dataset's `quarantine/`: {reasons}")
    repairs = data["repairs"]
    if repairs["without_gpu"]:
        lines.append(
            f"{count(repairs['without_gpu'])} of {count(repairs['all'])} repairs name no GPU: each ends the open "
            "incidents of all GPUs of its node, which changes the figures below; name the GPU or slot in the tickets"
        )
    if data["missing_channels"]:
        lines.append(
            f"{len(data['missing_channels'])} channels missing; `predrain doctor` shows how to switch them on:"
        )
    return lines, [todo["what"] + f"; unseen: {todo['shows']}" * bool(todo["shows"]) for todo in data["to_do"]]


def answer(content: dict[str, Any]) -> str:
    """Say whether failures are predictable."""
    judged = content["predictable"]
    return ANSWERS[judged["answer"]].format(more=judged["more"])


def figures(judged: dict[str, Any]) -> list[str]:
    """Say what the answer rests on."""
    lines = []
    if judged["precision"][0] is not None:
        lines += [
            f"precision of drains {_bounded(judged['precision'])}, drawing at random {_percent(judged['chance'])}",
            f"caught {_bounded(judged['recall'])} of the {judged['failures']} failures that were replayed",
            f"more than counting past failures at as many alerts: {_bounded(judged['more_than_counting'])}",
        ]
    if judged["lead_hours"][1] is not None:
        early, half, late = (f"{value:.0f} h" for value in judged["lead_hours"])
        lines.append(f"lead time: half of them {half} or more ahead (quartiles {early} and {late})")
    if judged["without_precursor"] is not None:
        lines.append(f"without any precursor that a model saw: {_percent(judged['without_precursor'])}")
    return lines


def policies(content: dict[str, Any]) -> Table | None:
    """Tabulate the policies that were replayed; None where none was."""
    rows, jobs = content.get("policies"), content.get("jobs", {})
    if not rows:
        return None
    caption = (
        f"What would have been saved, in GPU-hours (jobs: {jobs['from']}, mean gang "
        f"{number(jobs['mean_gpus_by_gpu_hours'], 0)} GPUs, a checkpoint every {jobs['checkpoint_every']})"
    )
    header = ("policy", "drains", "right", "caught", "saved", "repairs", "spent", "net", "95 % interval")
    cells = [
        (
            row["policy"], f"{row['drains']}", f"{row['right']} of {row['known']}", f"{row['caught']}",
            *(f"{row[name]:,.0f}" for name in ("saved", "repairs", "spent", "net")), _interval(row),
        )
        for row in rows
    ]  # fmt: skip
    sure = frozenset(
        at for at, row in enumerate(rows) if (row["net_low"] or 0) > 0 and not row["policy"].startswith("oracle")
    )
    return replace(_table(caption, header, cells), strong=sure)


def policy_notes(content: dict[str, Any]) -> list[str]:
    """Say what the table of policies rests on."""
    jobs, replayed = content["jobs"], content["replayed"]
    lines = [
        f"With these jobs a drain that a diagnostic follows is worth it {_worth(content['break_even'])} where what it "
        f"finds is repaired as planned, and {_worth(content['break_even_blind'])} where it finds nothing.",
        f"`repairs`: a planned repair is taken to be {jobs['planned_repair_saves_hours']:g} hours of the node shorter "
        "than an unplanned one.",
    ]
    if replayed["held_back"]:
        lines.append(
            f"Disruption budgets held back {count(replayed['held_back'])} drains: a tenth of the fleet's "
            f"{count(replayed['nodes'])} nodes may be out of service at once, those in repair included."
        )
    return lines


def assumptions(content: dict[str, Any]) -> list[str]:
    """Say what the replay takes for granted."""
    jobs, costs = content["jobs"], content["costs"]
    moved = f"a checkpoint of {costs['checkpoint']}" if jobs["checkpoint_on_request"] else "work since the last one too"
    return [
        "`saved`: a failure costs the whole gang its work since the last checkpoint and a restart of "
        f"{costs['restart']}; a GPU's failure hits a job by its share of the node.",
        f"`spent`: a drain costs each job that is moved {moved} and a restart, and the node its idle time; a "
        f"diagnostic takes {costs['verify']}.",
        "Failures come when they came. Jobs stay where they were; one that is moved runs on a spare node that does not "
        "fail, until its own node is back.",
        "Each group of nodes is in its stage as if it had earned it. Thresholds come from costs and from what stages "
        "ask for, never from outcomes.",
        "Intervals are bootstraps by node of 95 %; rows whose interval lies above 0 stand out.",
    ]


def job_sizes(content: dict[str, Any]) -> Table | None:
    """Tabulate what drains save by the size of jobs; None where that was not replayed."""
    sizes = content.get("by_job_size")
    if not sizes:
        return None
    rows = []
    for size in sizes:
        by_name = {row["policy"]: row for row in size["policies"]}
        nets = [f"{by_name[name]['net']:,.0f} ({_interval(by_name[name])})" for name in _FINDS]
        even = " to ".join(_percent(size[key], NONE) for key in ("break_even", "break_even_blind"))
        rows.append((f"{size['gpus_per_job']:,} GPUs", even, *nets))
    caption = (
        "Drains with jobs all of one size: the risk from which one is worth it (a diagnostic finds all, nothing), and "
        "the net GPU-hours with their 95 % interval"
    )
    return _table(caption, ("jobs of", "worth it from", "no diagnostic", "finds nothing", "finds all"), rows)


def recommendation(content: dict[str, Any]) -> list[str]:
    """Say what is recommended, and why."""
    chosen, rows = content["recommended"], {row["policy"]: row for row in content.get("policies", ())}
    lines = [f"Recommended: {STAGES[chosen['stage']]}."]
    share = chosen["diagnostic_finds_at_least"]
    if share is not None:
        lines.append(
            f"It is sure to pay if a diagnostic finds at least {percent(share)} of the faults that it is shown."
        )
    if chosen["rests_on_planned_repairs"]:
        lines.append(
            "It pays by `repairs` alone: what jobs of this size are spared does not make up for what is spent."
        )
    if content["predictable"]["answer"] == "yes" and chosen["stage"] != "hard":
        drains = [row for name, row in rows.items() if name.startswith("drains")]
        best = max(drains, key=lambda row: row["net"])
        lines.append(
            f"Drains are not sure to pay with these jobs: the best, `{best['policy']}`, nets {best['net']:,.0f} "
            f"GPU-hours ({_interval(best)})."
            if any(row["drains"] for row in drains)
            else "No drain was begun, so that none could pay."
        )
    if sizes := content.get("by_job_size"):
        tried = join([f"{size['gpus_per_job']:,}" for size in sizes])
        pays = [f"{words} at {join(sure)}" for policy, words in _FINDS.items() if (sure := _sure(sizes, policy))]
        lines.append(
            f"With jobs of one size drains are sure to pay {join(pays) or 'at none of them'} (tried: {tried} GPUs)."
        )
    return lines


def thresholds(chosen: dict[str, Any]) -> str:
    """Say what the recommended settings hold."""
    tiers = [
        f"{name} from a risk of {percent(risk)}" for name, risk in chosen["thresholds"].items() if risk is not None
    ]
    return f"stage {chosen['stage']} at most; {', '.join(tiers)}"


def commands(content: dict[str, Any], out: Path, dataset: str, params: Sequence[Path]) -> list[str]:
    """Give the three commands that come next, or what is missing for them."""
    if not content.get("policies"):
        return ["record failures (tickets, kernel logs, a longer history), then run this again"]
    folder, source, settings = (shlex.quote(str(path)) for path in (out, dataset, out / "recommended.yaml"))
    given = "".join(f" --params {shlex.quote(str(path))}" for path in params)
    acts = f"--settings {settings} --events {source} --dry-run"
    return [
        f"predrain train --matrix {folder}/matrix --backtest {folder}/replay{given} --out {folder}/bundle",
        f"predrain score --dataset {source} --model {folder}/bundle{given} --params {settings} --out {folder}/scores",
        f"predrain act --scheduler kubernetes --scores {folder}/scores {acts}",
    ]


def _table(caption: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    return Table(caption, header, tuple(tuple(Cell(cell) for cell in row) for row in rows))


def _text_of(table: Table) -> list[str]:
    rows = [table.header, *(tuple(cell.text for cell in row) for row in table.rows)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(table.header))]
    return [
        "  " + row[0].ljust(widths[0]) + "".join(f"  {cell:>{widths[at]}}" for at, cell in enumerate(row) if at)
        for row in rows
    ]


def _sure(sizes: Sequence[dict[str, Any]], policy: str) -> list[str]:
    """Name the sizes of jobs at which a policy is sure to save."""
    return [
        f"{size['gpus_per_job']:,}"
        for size in sizes
        if any(row["policy"] == policy and row["net_low"] > 0 for row in size["policies"])
    ]


def _interval(row: dict[str, Any]) -> str:
    return "" if row["net_low"] is None else f"{row['net_low']:,.0f} to {row['net_high']:,.0f}"


def _worth(even: float | None) -> str:
    return "never" if even is None else f"from a risk of {percent(even)}"


def _bounded(value: Any) -> str:
    middle, low, high = value
    if low is None:
        return _percent(middle)
    return f"{_percent(middle)} {between(percent(low), percent(high))}"


def _percent(value: float | None, unknown: str = "unknown") -> str:
    return unknown if value is None else percent(value)
