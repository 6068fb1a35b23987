"""Formats an assessment as text for a terminal, and as a self-contained HTML page."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup, escape

from foundation.files import disk_errors, write_bytes
from foundation.text import quantity
from pipeline.report.plots import net_by_job_size
from pipeline.report.report import render
from pipeline.report.tables import Cell, Table
from pipeline.report.wording import NONE, count, interval_text, join, number, percent

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
    "publish": "label nodes with their risk",
    "avoid": "keep large jobs off nodes at risk while others are free",
    "probe": "run a diagnostic on idle nodes, riskiest first",
    "checkpoint": "request checkpoints from jobs on nodes at risk",
    "swap": "take nodes at risk out of service when their jobs end",
    "drain": "drain nodes at risk",
}


def verdict_text(content: dict[str, Any], out: Path, dataset: str, params: Sequence[Path]) -> str:
    """Format an assessment as text.

    ``content``: from :func:`pipeline.assessment.workflow.assess_fleet`.
    ``params``: the parameter files of the assessment.
    """
    contents, todos = data(content["data"])
    lines = [f"Data{' (a simulated fleet)' if content['data']['simulated'] else ''}"]
    lines += [f"  {line}" for line in contents] + [f"    {todo}" for todo in todos]
    lines += ["", f"Are failures predictable here?  {answer_text(content)}"]
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
    lines += ["Next steps", *(f"  {line}" for line in commands(content, out, dataset, params))]
    return "\n".join(lines) + "\n"


def verdict_lines(content: dict[str, Any]) -> list[str]:
    """Summarize in three lines: whether failures are predictable, net GPU-hours by action, and the recommendation."""
    rows = [f"{row['rung']} {row['net']:,.0f} ({_interval(row)})" for row in content["ladder"][1:]]
    nets = ", ".join(rows) or "no replay was possible"
    return [
        answer_text(content),
        f"Net GPU-hours of each action alone, with 95 % intervals: {nets}.",
        " ".join(recommendation(content)),
    ]


def write_page(content: dict[str, Any], out: Path, dataset: str, params: Sequence[Path]) -> Path:
    """Write ``OUT/index.html``; arguments as for :func:`verdict_text`."""
    contents, _ = data(content["data"])
    rungs, picture = ladder(content), net_by_job_size(content)
    page = render(
        "assessment.html.j2",
        words=_with_code,
        dataset=dataset,
        simulated=content["data"]["simulated"],
        answer=answer_text(content),
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


def _with_code(line: str) -> Markup:
    """Escape a line, and format text in backticks as code."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(line))))  # noqa: S704 - escaped


def data(data: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Describe the data, and what is missing from it."""
    failures = ", ".join(f"{size} {name}" for name, size in data["failures"].items()) or "none"
    lines = [
        f"{quantity(data['units'], _unit(data))} on {quantity(data['nodes'], 'node')}, {data['days']:g} days, "
        f"{quantity(data['samples'], 'sample')}, {quantity(data['jobs'], 'job')}",
        f"node failures: {data['node_failures']} ({failures})"
        + f"; {_unit(data)} failures: {data['unit_failures']}" * (data["unit_failures"] > data["node_failures"]),
    ]
    if data["set_aside"]:
        reasons = ", ".join(f"{reason} {count(rows)}" for reason, rows in data["set_aside"].items())
        lines.append(f"quarantined (`quarantine/` of the dataset): {reasons}")
    repairs = data["repairs"]
    if repairs["without_gpu"]:
        lines.append(
            f"{count(repairs['without_gpu'])} of {count(repairs['all'])} repairs name no GPU: each ends the open "
            "incidents of all GPUs of its node, and confirms an uncertain XID only if it can refer to a single GPU or "
            "node incident. Name the GPU or slot in the tickets"
        )
    if data["missing_channels"]:
        lines.append(
            f"{len(data['missing_channels'])} channels are missing; `predrain doctor` shows how to enable them:"
        )
    return lines, [todo["what"] + f"; without it: {todo['shows']}" * bool(todo["shows"]) for todo in data["to_do"]]


def _unit(data: dict[str, Any]) -> str:
    return "GPU" if data["unit"] == "gpu" else "node"


def answer_text(content: dict[str, Any]) -> str:
    """Return whether failures are predictable, as a sentence."""
    predictable = content["predictable"]
    return ANSWERS[predictable["answer"]].format(more=predictable["more"])


def figures(verdict: dict[str, Any]) -> list[str]:
    """List the metrics behind the answer."""
    lines = [verdict["reason"]] if verdict["reason"] else []
    if verdict["precision"][0] is not None:
        lines += [
            f"precision if each alert drains its node: {_bounded(verdict['precision'])}; random nodes: "
            f"{_percent(verdict['chance'])}",
            f"recall: {_bounded(verdict['recall'])} of the {verdict['failures']} replayed node failures",
            f"recall minus that of counting past failures, at equal alerts: {_bounded(verdict['more_than_counting'])}",
        ]
    if verdict["lead_hours"][1] is not None:
        earliest, half, latest = (f"{value:.0f} h" for value in verdict["lead_hours"])
        lines.append(f"median lead time: {half} (quartiles {earliest} and {latest})")
    if verdict["without_precursor"] is not None:
        lines.append(f"estimated share of failures without a precursor: {_percent(verdict['without_precursor'])}")
    return lines


def ladder(content: dict[str, Any]) -> Table | None:
    """Tabulate the rungs of the ladder; None if nothing was replayed."""
    rows, jobs = content["ladder"], content.get("jobs", {})
    if not rows:
        return None
    caption = (
        f"GPU-hours that each action would have saved (jobs: {jobs['from']}, mean size "
        f"{number(jobs['mean_gpus_by_gpu_hours'], 0)} GPUs by GPU-hours, a checkpoint every {jobs['checkpoint_every']})"
    )
    header = ("rung", "actions", "right", "break-even", "precision at least", "saved", "spent", "net", "95 % interval")
    cells = [
        (
            row["rung"], f"{row['actions']}", f"{row['right']} of {row['known']}", _percent(row["break_even"], "never"),
            _percent(row["precision_low"], NONE), f"{row['gpu_hours_saved']:,.0f}", f"{row['gpu_hours_spent']:,.0f}",
            f"{row['net']:,.0f}", _interval(row),
        )
        for row in rows
    ]  # fmt: skip
    return replace(_table(caption, header, cells), strong=_significant(rows))


def detail_tables(content: dict[str, Any]) -> list[Table]:
    """Tabulate probes, job sizes and drain policies."""
    if not content["ladder"]:
        return []
    probes = [
        (
            "by risk" if row["guided"] else "round-robin",
            NONE if row["min_lift"] is None else f"{row['min_lift']:g} times the mean",
            "by class" if row["share_found"] is None else percent(row["share_found"]),
            f"{row['probes']:,}", f"{row['found']}", f"{row['net']:,.0f}", _interval(row),
        )
        for row in content["probing"]
    ]  # fmt: skip
    header = ("order", "minimum risk", "finds", "probes", "failures found", "net", "95 % interval")
    tables = [_table("Probes of idle nodes, by the share of failures that a diagnostic finds", header, probes)]
    sizes = content.get("by_job_size")
    if sizes:
        rungs = [row["rung"] for row in sizes[0]["ladder"][1:]]
        rows = [
            (
                "trace" if size["gpus_per_job"] is None else f"{size['gpus_per_job']:,} GPUs",
                *(f"{row['net']:,.0f} ({_interval(row)})" for row in size["ladder"][1:]),
                ", ".join(size["recommended"]),
            )
            for size in sizes
        ]  # fmt: skip
        by_size = "Net GPU-hours of each action by job size, with 95 % intervals"
        tables.append(_table(by_size, ("job size", *rungs, "recommended"), rows))
    drains = [
        (
            row["policy"], f"{row['drains']}", f"{row['right']} of {row['known']}", f"{row['caught']}",
            *(f"{row[name]:,.0f}" for name in ("saved", "repairs", "spent", "net")), _interval(row),
        )
        for row in content["policies"]
    ]  # fmt: skip
    columns = ("policy", "drains", "right", "caught", "saved", "repairs", "spent", "net", "95 % interval")
    return [
        *tables,
        replace(_table("Drain policies compared", columns, drains), strong=_significant(content["policies"])),
    ]


def policy_notes(content: dict[str, Any]) -> list[str]:
    """Return the notes on the table of actions."""
    jobs, replayed = content["jobs"], content["replayed"]
    lines = [
        "`break-even`: the precision above which an action pays with these jobs. `saved` includes planned repairs, "
        f"assumed to take {jobs['planned_repair_saves_hours']:g} node-hours less than unplanned ones. "
        "A row is the action alone; rows marked * have an interval above 0.",
    ]
    if replayed["held_back"]:
        lines.append(
            f"Disruption budgets prevented {quantity(replayed['held_back'], 'drain')}: at most a tenth of the "
            f"{count(replayed['nodes'])} nodes can be out of service, including those in repair."
        )
    return lines


def assumptions(content: dict[str, Any]) -> list[str]:
    """List the assumptions of the replay."""
    jobs, costs = content["jobs"], content["costs"]
    move = f"a checkpoint of {costs['checkpoint']}" if jobs["checkpoint_on_request"] else "its unsaved work"
    return [
        "`saved`: a failure costs a job its work since the last checkpoint, on all its GPUs, and a restart of "
        f"{costs['restart']}. The probability that a failed GPU belongs to a job is the job's share of the node.",
        f"`spent`: a drain costs each moved job {move} and a restart, and the node its idle time. A diagnostic takes "
        f"{costs['verify']}.",
        "Failures occur at their recorded times. Jobs stay on their nodes. A moved job runs on a spare node without "
        "failures until its own node returns.",
        "Each group of nodes is in the stage of the evaluated action. Thresholds come from costs and the mean risk, "
        "never from outcomes.",
        "Assumed shares of the coming failures that a diagnostic finds: "
        + ", ".join(f"{name.replace('_', ' and ')} {percent(share)}" for name, share in content["found"].items())
        + ".",
        f"A probe takes {costs['probe']} on an idle node, at {percent(content['idle_cost'])} of the GPU-hours, and "
        "delays a job that preempts it by a minute.",
        "Intervals are 95 % bootstrap intervals by node.",
    ]


def recommendation(content: dict[str, Any]) -> list[str]:
    """Return the recommendation and its reasons."""
    chosen, net = content["recommended"], content["recommended_net"]
    lines = [f"Recommended: {', '.join(chosen)} ({join([RUNGS[rung] for rung in chosen])})."]
    if len(chosen) > 1:
        lines.append(
            f"The set nets {net['value']:,.0f} GPU-hours ({net['low']:,.0f} to {net['high']:,.0f}), cross-validated: "
            "each fifth of the nodes uses the actions that paid on the others."
        )
        unclear = [row["rung"] for row in content["ladder"] if row["rung"] in chosen[1:] and row["net_low"] <= 0]
        if unclear:
            lines.append(
                f"The net of {join(unclear)} alone is not significant, but of the tested sets, this one has the "
                "highest lower bound of the net."
            )
    elif content["ladder"]:
        lines.append("No other action has a significant net gain here.")
    guided = [row for row in content.get("probing", ()) if row["guided"] and row["share_found"] is not None]
    if guided and content["predictable"]["answer"] in ("yes", "weakly"):
        min_share = min((row["share_found"] for row in guided if row["net_low"] > 0), default=None)
        shares = join([percent(row["share_found"]) for row in guided])
        pays = "do not pay" if min_share is None else f"pay with a diagnostic that finds at least {percent(min_share)}"
        lines.append(f"Probes by risk {pays} of the failures (evaluated: {shares}).")
    if content["ladder"] and content["predictable"]["answer"] not in ("yes", "weakly"):
        unguided = next(row for row in content["probing"] if not row["guided"] and row["share_found"] is None)
        lines.append(
            "Without predictions, only round-robin probes of idle nodes could pay: "
            f"{quantity(unguided['probes'], 'probe')} found {quantity(unguided['found'], 'failure')}, "
            f"net {unguided['net']:,.0f} GPU-hours ({_interval(unguided)})."
        )
    return lines


def thresholds(settings: dict[str, Any]) -> str:
    """Summarize the recommended settings."""
    tiers = [
        f"{name} at a risk of {percent(risk)}" for name, risk in settings["thresholds"].items() if risk is not None
    ]
    return f"highest stage {settings['stage']}; {', '.join(tiers)}"


def commands(content: dict[str, Any], out: Path, dataset: str, params: Sequence[Path]) -> list[str]:
    """Return the next three commands, or what to do first if the data does not allow them."""
    if content["predictable"]["answer"] == "cannot tell":
        return ["import the telemetry of all nodes for one period, whether they failed or not, and assess again"]
    if not content["ladder"]:
        return ["record failures (tickets, kernel logs, a longer history), and assess again"]
    folder, source, settings = (shlex.quote(str(path)) for path in (out, dataset, out / "act.yaml"))
    options = "".join(f" --params {shlex.quote(str(path))}" for path in params)
    kind = content["settings"]["scheduler"]
    scheduler = f"{kind} --cluster cluster.json" if kind == "file" else kind
    acts = f"--settings {settings} --events {source} --dry-run"
    return [
        f"predrain train --matrix {folder}/matrix --backtest {folder}/replay{options} --out {folder}/bundle",
        f"predrain score --dataset {source} --model {folder}/bundle{options} --params {settings} --out {folder}/scores",
        f"predrain act --scheduler {scheduler} --scores {folder}/scores {acts}",
    ]


def _table(caption: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    return Table(caption, header, tuple(tuple(Cell(cell) for cell in row) for row in rows))


def _significant(rows: Sequence[dict[str, Any]]) -> frozenset[int]:
    """Return the positions of rows with a significant net gain, except the oracle's."""
    named = [str(row.get("rung", row.get("policy"))) for row in rows]
    return frozenset(i for i, row in enumerate(rows) if (row["net_low"] or 0) > 0 and not named[i].startswith("oracle"))


def _interval(row: dict[str, Any]) -> str:
    return "" if row["net_low"] is None else f"{row['net_low']:,.0f} to {row['net_high']:,.0f}"


def _bounded(value: Any) -> str:
    middle, low, high = value
    if low is None:
        return _percent(middle)
    return f"{_percent(middle)} {interval_text(percent(low), percent(high))}"


def _percent(value: float | None, unknown: str = "unknown") -> str:
    return unknown if value is None else percent(value)
