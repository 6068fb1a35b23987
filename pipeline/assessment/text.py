"""An assessment in words and tables: as text for a terminal, and as a page that needs nothing else."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup, escape

from foundation.files import disk_errors, write_bytes
from pipeline.report.plots import net_by_job_size
from pipeline.report.report import render
from pipeline.report.tables import Cell, Table
from pipeline.report.wording import NONE, between, count, join, number, percent

ANSWERS: Final = {
    "yes": "YES. Failures are predictable here.",
    "weakly": "WEAKLY. Alerts are better than chance, but catch less than a fifth of the failures, or no more than "
    "counting past failures.",
    "no": "NO. Failures are not predictable from this telemetry: alerts are not better than chance, and fewer than a "
    "fifth of the failures can be caught.",
    "too few failures": "TOO FEW FAILURES TO TELL. About {more} more are needed in the replayed period.",
    "cannot tell": "CANNOT TELL. Telemetry was collected because of failures, so precision measured on it does not "
    "generalize to the fleet.",
    "no failures": "NO FAILURES in the data, so no result is possible. About {more} are needed.",
}
RUNGS: Final = {
    "publish": "publish the risk",
    "avoid": "keep large jobs off nodes at risk while others are free",
    "probe": "run a diagnostic on idle nodes, riskiest first",
    "checkpoint": "ask jobs on nodes at risk for a checkpoint",
    "swap": "take nodes at risk out when their jobs end",
    "drain": "drain nodes at risk",
}


def verdict_text(content: dict[str, Any], out: Path, dataset: str, params: Sequence[Path]) -> str:
    """Write the verdict.

    ``content``: as :func:`pipeline.assessment.workflow.assess_fleet` returns it.
    ``params``: the files that it was made with.
    """
    contents, todos = data(content["data"])
    lines = [f"What the data holds{' (a simulated fleet)' if content['data']['simulated'] else ''}"]
    lines += [f"  {line}" for line in contents] + [f"    {todo}" for todo in todos]
    lines += ["", f"Are failures predictable here?  {answer(content)}"]
    lines += [f"  {line}" for line in figures(content["predictable"])]
    for table, notes in ((ladder(content), policy_notes), *((table, None) for table in detail_tables(content))):
        if table is not None:
            lines += [
                "",
                table.caption,
                *(f"  {line}" for line in table.lines()),
                *(f"  {note}" for note in (notes(content) if notes else ())),
            ]
    first, *reasons = recommendation(content)
    lines += ["", f"{first} Settings: {out / 'act.yaml'}", *(f"  {reason}" for reason in reasons), ""]
    lines += ["What to do next", *(f"  {line}" for line in commands(content, out, dataset, params))]
    return "\n".join(lines) + "\n"


def verdict_lines(content: dict[str, Any]) -> list[str]:
    """Say in three lines whether failures are predictable, what each action comes to, and what is recommended."""
    rows = [f"{row['rung']} {row['net']:,.0f} ({_interval(row)})" for row in content["ladder"][1:]]
    nets = ", ".join(rows) or "no replay was possible"
    return [
        answer(content),
        f"Net GPU-hours by action, with 95 % intervals: {nets}.",
        " ".join(recommendation(content)),
    ]


def write_page(content: dict[str, Any], out: Path, dataset: str, params: Sequence[Path]) -> Path:
    """Write ``OUT/index.html``; arguments as :func:`verdict_text` takes them."""
    contents, _ = data(content["data"])
    rungs, picture = ladder(content), net_by_job_size(content)
    page = render(
        "assessment.html.j2",
        words=_words,
        dataset=dataset,
        simulated=content["data"]["simulated"],
        answer=answer(content),
        recommendation=recommendation(content),
        ladder=rungs,
        picture=picture and (Markup(picture.svg), picture.caption),  # noqa: S704 - escaped there
        settings=str(out / "act.yaml"),
        thresholds=thresholds(content["settings"]),
        commands=commands(content, out, dataset, params),
        figures=figures(content["predictable"]),
        details=detail_tables(content),
        held=contents,
        to_do=content["data"]["to_do"],
        assumptions=[*policy_notes(content), *assumptions(content)] if rungs else [],
    )
    target = out / "index.html"
    with disk_errors(target):
        write_bytes(target, page.encode())
    return target


def _words(line: str) -> Markup:
    """Escape a line, and format text in backticks as code."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(line))))  # noqa: S704 - escaped


def data(data: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Say what the data holds, and what is missing in them."""
    failures = ", ".join(f"{size} {name}" for name, size in data["failures"].items()) or "none"
    lines = [
        f"{count(data['units'])} {data['unit']}s on {count(data['nodes'])} nodes, {data['days']:g} days, "
        f"{count(data['samples'])} samples, {count(data['jobs'])} jobs",
        f"failures of nodes: {data['node_failures']} ({failures})"
        + f"; of {data['unit']}s: {data['unit_failures']}" * (data["unit_failures"] > data["node_failures"]),
    ]
    if data["set_aside"]:
        reasons = ", ".join(f"{reason} {count(rows)}" for reason, rows in data["set_aside"].items())
        lines.append(f"set aside, in the dataset's `quarantine/`: {reasons}")
    repairs = data["repairs"]
    if repairs["without_gpu"]:
        lines.append(
            f"{count(repairs['without_gpu'])} of {count(repairs['all'])} repairs name no GPU: each ends the open "
            "incidents of all GPUs of its node and confirms a doubtful XID only where a single GPU, or one node "
            "incident, can be meant; name the GPU or slot in the tickets"
        )
    if data["missing_channels"]:
        lines.append(
            f"{len(data['missing_channels'])} channels missing; `predrain doctor` shows how to switch them on:"
        )
    return lines, [todo["what"] + f"; unseen: {todo['shows']}" * bool(todo["shows"]) for todo in data["to_do"]]


def answer(content: dict[str, Any]) -> str:
    """Say whether failures are predictable."""
    predictable = content["predictable"]
    return ANSWERS[predictable["answer"]].format(more=predictable["more"])


def figures(verdict: dict[str, Any]) -> list[str]:
    """Say what the answer rests on."""
    lines = [verdict["reason"]] if verdict["reason"] else []
    if verdict["precision"][0] is not None:
        lines += [
            f"precision of alerts, if each drained its node: {_bounded(verdict['precision'])}, drawing nodes at random "
            f"{_percent(verdict['chance'])}",
            f"caught {_bounded(verdict['recall'])} of the {verdict['failures']} failures of nodes that were replayed",
            f"more than counting past failures at as many alerts: {_bounded(verdict['more_than_counting'])}",
        ]
    if verdict["lead_hours"][1] is not None:
        early, half, late = (f"{value:.0f} h" for value in verdict["lead_hours"])
        lines.append(f"lead time: half of them {half} or more ahead (quartiles {early} and {late})")
    if verdict["without_precursor"] is not None:
        lines.append(f"without any precursor that a model saw: {_percent(verdict['without_precursor'])}")
    return lines


def ladder(content: dict[str, Any]) -> Table | None:
    """Tabulate the rungs of the ladder; None where nothing was replayed."""
    rows, jobs = content["ladder"], content.get("jobs", {})
    if not rows:
        return None
    caption = (
        f"What each action would have saved, in GPU-hours (jobs: {jobs['from']}, mean gang "
        f"{number(jobs['mean_gpus_by_gpu_hours'], 0)} GPUs, a checkpoint every {jobs['checkpoint_every']})"
    )
    header = ("rung", "actions", "right", "pays from", "precision at least", "saved", "spent", "net", "95 % interval")
    cells = [
        (
            row["rung"], f"{row['actions']}", f"{row['right']} of {row['known']}", _percent(row["break_even"], "never"),
            _percent(row["precision_low"], NONE), f"{row['gpu_hours_saved']:,.0f}", f"{row['gpu_hours_spent']:,.0f}",
            f"{row['net']:,.0f}", _interval(row),
        )
        for row in rows
    ]  # fmt: skip
    return replace(_table(caption, header, cells), strong=_sure(rows))


def detail_tables(content: dict[str, Any]) -> list[Table]:
    """Tabulate probes, sizes of jobs, and ways to drain."""
    if not content["ladder"]:
        return []
    probes = [
        (
            "by risk" if row["guided"] else "in turn",
            NONE if row["min_lift"] is None else f"{row['min_lift']:g} times the mean",
            "by family" if row["share_found"] is None else percent(row["share_found"]),
            f"{row['probes']:,}", f"{row['found']}", f"{row['net']:,.0f}", _interval(row),
        )
        for row in content["probing"]
    ]  # fmt: skip
    header = ("order", "only from a risk of", "finds", "probes", "failures found", "net", "95 % interval")
    tables = [
        _table("Probes of idle nodes, by what a diagnostic finds of the failures of the next days", header, probes)
    ]
    sizes = content.get("by_job_size")
    if sizes:
        rungs = [row["rung"] for row in sizes[0]["ladder"][1:]]
        rows = [
            (
                "sizes of a trace" if size["gpus_per_job"] is None else f"{size['gpus_per_job']:,} GPUs",
                *(f"{row['net']:,.0f} ({_interval(row)})" for row in size["ladder"][1:]),
                ", ".join(size["recommended"]),
            )
            for size in sizes
        ]  # fmt: skip
        by_size = "Net GPU-hours of each action with jobs all of one size, with 95 % intervals"
        tables.append(_table(by_size, ("jobs of", *rungs, "recommended"), rows))
    drains = [
        (
            row["policy"], f"{row['drains']}", f"{row['right']} of {row['known']}", f"{row['caught']}",
            *(f"{row[name]:,.0f}" for name in ("saved", "repairs", "spent", "net")), _interval(row),
        )
        for row in content["policies"]
    ]  # fmt: skip
    columns = (
        "drains, by diagnostic",
        "drains",
        "right",
        "caught",
        "saved",
        "repairs",
        "spent",
        "net",
        "95 % interval",
    )
    return [*tables, replace(_table("Drains in comparison", columns, drains), strong=_sure(content["policies"]))]


def policy_notes(content: dict[str, Any]) -> list[str]:
    """Say what the table of actions rests on."""
    jobs, replayed = content["jobs"], content["replayed"]
    lines = [
        "`pays from`: the precision at which an action breaks even with these jobs. `saved` includes planned repairs, "
        f"taken to be {jobs['planned_repair_saves_hours']:g} hours of the node shorter than unplanned ones. "
        "The interval of a marked row (*) is above 0.",
    ]
    if replayed["held_back"]:
        lines.append(
            f"Disruption budgets held back {count(replayed['held_back'])} drains: a tenth of the fleet's "
            f"{count(replayed['nodes'])} nodes may be out of service at the same time, including repairs."
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
        "Each group of nodes is in its stage as if it had earned it. Thresholds come from costs and from the usual "
        "risk, never from outcomes.",
        "A diagnostic finds a share of the failures of the next days: "
        + ", ".join(f"{name.replace('_', ' and ')} {percent(share)}" for name, share in content["found"].items())
        + ". These shares are assumptions.",
        f"A probe takes {costs['probe']} of an idle node, at {percent(content['idle_cost'])} of a GPU-hour, and "
        "delays a job that preempts it by a minute.",
        "Intervals are bootstraps by node of 95 %; rows whose interval lies above 0 stand out.",
    ]


def recommendation(content: dict[str, Any]) -> list[str]:
    """Say what is recommended, and why."""
    chosen, net = content["recommended"], content["recommended_net"]
    lines = [f"Recommended: {', '.join(chosen)} ({join([RUNGS[rung] for rung in chosen])})."]
    if len(chosen) > 1:
        lines.append(
            f"Net {net['value']:,.0f} GPU-hours ({net['low']:,.0f} to {net['high']:,.0f}): each fifth of the nodes is "
            "evaluated with the actions that paid on the others."
        )
    elif content["ladder"]:
        lines.append("No other action has a significant net gain here.")
    guided = [row for row in content.get("probing", ()) if row["guided"] and row["share_found"] is not None]
    if guided and content["predictable"]["answer"] in ("yes", "weakly"):
        least = min((row["share_found"] for row in guided if row["net_low"] > 0), default=None)
        shares = join([percent(row["share_found"]) for row in guided])
        pays = "from none of these on" if least is None else f"from {percent(least)} on"
        lines.append(f"Of diagnostics that find {shares} of the failures, probes by risk pay {pays}.")
    if content["ladder"] and content["predictable"]["answer"] not in ("yes", "weakly"):
        unguided = next(row for row in content["probing"] if not row["guided"] and row["share_found"] is None)
        lines.append(
            "Without predictions, unguided probing of idle nodes is the only action that could pay: "
            f"{unguided['probes']:,} probes find {unguided['found']} failures, net {unguided['net']:,.0f} GPU-hours "
            f"({_interval(unguided)})."
        )
    return lines


def thresholds(settings: dict[str, Any]) -> str:
    """Say what the recommended settings hold."""
    tiers = [
        f"{name} from a risk of {percent(risk)}" for name, risk in settings["thresholds"].items() if risk is not None
    ]
    return f"stage {settings['stage']} at most; {', '.join(tiers)}"


def commands(content: dict[str, Any], out: Path, dataset: str, params: Sequence[Path]) -> list[str]:
    """Give the three commands that come next, or what is missing for them."""
    if content["predictable"]["answer"] == "cannot tell":
        return ["import the telemetry of all nodes over one period, whether they failed or not, then run this again"]
    if not content["ladder"]:
        return ["record failures (tickets, kernel logs, a longer history), then run this again"]
    folder, source, settings = (shlex.quote(str(path)) for path in (out, dataset, out / "act.yaml"))
    given = "".join(f" --params {shlex.quote(str(path))}" for path in params)
    kind = content["settings"]["scheduler"]
    scheduler = f"{kind} --cluster cluster.json" if kind == "file" else kind
    acts = f"--settings {settings} --events {source} --dry-run"
    return [
        f"predrain train --matrix {folder}/matrix --backtest {folder}/replay{given} --out {folder}/bundle",
        f"predrain score --dataset {source} --model {folder}/bundle{given} --params {settings} --out {folder}/scores",
        f"predrain act --scheduler {scheduler} --scores {folder}/scores {acts}",
    ]


def _table(caption: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    return Table(caption, header, tuple(tuple(Cell(cell) for cell in row) for row in rows))


def _sure(rows: Sequence[dict[str, Any]]) -> frozenset[int]:
    """Return the positions of rows that are sure to save, but for the oracle's."""
    named = [str(row.get("rung", row.get("policy"))) for row in rows]
    return frozenset(
        at for at, row in enumerate(rows) if (row["net_low"] or 0) > 0 and not named[at].startswith("oracle")
    )


def _interval(row: dict[str, Any]) -> str:
    return "" if row["net_low"] is None else f"{row['net_low']:,.0f} to {row['net_high']:,.0f}"


def _bounded(value: Any) -> str:
    middle, low, high = value
    if low is None:
        return _percent(middle)
    return f"{_percent(middle)} {between(percent(low), percent(high))}"


def _percent(value: float | None, unknown: str = "unknown") -> str:
    return unknown if value is None else percent(value)
