"""``predrain act``: run the controller once or in a loop, as a dry run, stop it, or undo everything."""

import os
import secrets
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foundation.text import percent, quantity
from foundation.version import VERSION
from predrain.act.assembly import SchedulerKind
from predrain.console import FAILED, print_json, printable, until_stopped
from predrain.options import JsonOption, check_scores, duration_option

if TYPE_CHECKING:
    from predrain.act.assembly import ChosenScheduler
    from scheduler.controller.controller import Controller
    from scheduler.controller.settings import ActSettings
    from scheduler.ledger.sqlite_ledger import SqliteLedger
    from scheduler.ports.protocols import FactSource, RiskSource
    from scheduler.ports.report import RoundReport

DEFAULT_SETTINGS = Path("act.yaml")
"""Default settings file, in the current folder."""

_MAX_LISTED = 20
"""Maximum number of nodes listed by name; the rest is counted."""


def act(
    scheduler: Annotated[
        SchedulerKind, typer.Option(help="Scheduler to act on; `file` is a cluster described in a file.")
    ] = SchedulerKind.FILE,
    cluster: Annotated[
        Path | None, typer.Option(help="Cluster file for --scheduler file; markers are written to it.")
    ] = None,
    scores: Annotated[Path | None, typer.Option(help="Output directory of `predrain score`.")] = None,
    events: Annotated[
        Path | None,
        typer.Option(
            help="Dataset or its events.parquet: XIDs and diagnostics for the hard rules, repairs, and "
            "(with inventory.parquet in the same folder) alert outcomes."
        ),
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option(help="Settings file, such as deploy/act/act.yaml. Default: ./act.yaml."),
    ] = None,
    ledger: Annotated[Path, typer.Option(help="Ledger file, created if missing.")] = Path("ledger.db"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print every field that would be written; write nothing.")
    ] = False,
    loop: Annotated[bool, typer.Option("--loop", help="Run until SIGTERM; one replica is active at a time.")] = False,
    kill: Annotated[
        bool, typer.Option("--kill", help="Set the kill switch: block all new actions. Releases continue.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Clear --kill and --release-all.")] = False,
    release_all: Annotated[
        bool,
        typer.Option(
            "--release-all", help="Remove all predrain taints and labels, and block new actions until --resume."
        ),
    ] = False,
    wait: Annotated[
        str | None,
        typer.Option(help="With --release-all: time to wait until all markers are removed, such as 10m."),
    ] = None,
    reset_breaker: Annotated[bool, typer.Option("--reset-breaker", help="Close the circuit breaker.")] = False,
    listen: Annotated[
        str | None, typer.Option(help="With --loop: host:port of /metrics and /healthz; port 0 selects a free port.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Set taints and drains from the newest scores, within budgets and stages, and remove them at expiry.

    Exit code 0: every action was confirmed or no longer needed, or another replica is active. Exit code 1: an action
    failed. A checkpoint request that fails is only reported: the job is moved at its deadline.

    Example: predrain act --cluster cluster.json --scores scores --settings act.yaml --dry-run
    """
    by_hand = kill or resume or release_all or reset_breaker
    _go_together(
        {"--kill": kill, "--resume": resume, "--release-all": release_all, "--reset-breaker": reset_breaker},
        loop=loop, dry_run=dry_run, listen=listen, wait=wait,
    )  # fmt: skip
    if cluster is not None and scheduler is not SchedulerKind.FILE:
        raise typer.BadParameter("requires --scheduler file", param_hint="--cluster")
    settings = settings or (DEFAULT_SETTINGS if DEFAULT_SETTINGS.is_file() else None)
    if not by_hand:
        _all_there(scheduler, cluster, scores, settings)
    from contextlib import closing

    from predrain.act.assembly import choose_scheduler

    settings_read, unusable = _read_settings(scheduler, settings)
    chosen = choose_scheduler(
        scheduler, cluster, settings_read, waits=not loop and not dry_run and wait is None, follows=loop,
        by_hand=by_hand or unusable is not None,
    )  # fmt: skip
    switches: dict[str, Any] = {}
    if by_hand and not dry_run:
        switches = _switch(chosen, kill=kill, resume=resume, release_all=release_all, reset_breaker=reset_breaker)
        if not release_all:
            if as_json:
                print_json(switches)
            return
    with closing(_ledger(ledger, chosen.cluster, settings_read, dry_run=dry_run, undo=release_all)) as record:
        controller = _controller(chosen, (scores, events), settings_read, record, undo=release_all, unusable=unusable)
        if dry_run:
            if controller.unusable is not None:
                sys.stderr.write(f"predrain act: {controller.unusable}\n")
                raise typer.Exit(FAILED)
            from scheduler.ports.readings import Switches

            report = controller.rehearse(Switches(release_all=True) if release_all else None)
            _show(report, as_json)
        elif loop and controller.unusable is None:
            report = _follow(controller, settings_read, listen, as_json)
        else:  # with invalid settings, run one round; the next process reads them again
            report = controller.round()
            _show(report, as_json, switches)
            if wait is not None:
                report = _until_released(controller, chosen, duration_option(wait, "--wait"))
            controller.stop()
    is_released = release_all and not dry_run and report.active and _all_released(chosen)
    is_stored = bool(switches) or dry_run or not by_hand
    if (report.failed and not is_released) or not is_stored:
        raise typer.Exit(FAILED)


def _go_together(
    switches: Mapping[str, bool], *, loop: bool, dry_run: bool, listen: str | None, wait: str | None
) -> None:
    if sum(switches[name] for name in ("--kill", "--resume", "--release-all")) > 1:
        raise typer.BadParameter("give one of --kill, --resume and --release-all")
    if loop and (dry_run or any(switches.values())):
        raise typer.BadParameter(f"--loop cannot be combined with --dry-run, {', '.join(switches)}")
    if dry_run and any(on for name, on in switches.items() if name != "--release-all"):
        raise typer.BadParameter("--dry-run cannot be combined with --kill, --resume or --reset-breaker")
    if listen is not None and not loop:
        raise typer.BadParameter("requires --loop", param_hint="--listen")
    if wait is not None and (dry_run or not switches["--release-all"]):
        raise typer.BadParameter("requires --release-all, without --dry-run", param_hint="--wait")


def _until_released(controller: "Controller", chosen: "ChosenScheduler", wait: timedelta) -> "RoundReport":
    """Run rounds until no marker is left; raise ``InputError`` with the remaining nodes at the timeout."""
    import time

    from foundation.errors import InputError
    from scheduler.ports.errors import SchedulerError

    until = time.monotonic() + wait.total_seconds()
    while True:
        marked_nodes, read_error = [], None
        try:
            marked_nodes = _marked(chosen)
        except SchedulerError as error:
            read_error = str(error)
        if not marked_nodes and read_error is None:
            return controller.round()
        if time.monotonic() > until:
            names = ", ".join(marked_nodes[:_MAX_LISTED])
            problem = read_error or f"markers are left on {quantity(len(marked_nodes), 'node')} ({names})"
            raise InputError(problem, chosen.location, "Check the log of the active replica, and retry.")
        time.sleep(min(2.0, wait.total_seconds() / 4))
        controller.round()


def _marked(chosen: "ChosenScheduler") -> list[str]:
    """Return the nodes that have markers; raises ``SchedulerError`` if the fleet cannot be read."""
    return sorted(node.view.name for node in chosen.adapter.read_fleet().nodes if node.view.marks.level)


def _all_released(chosen: "ChosenScheduler") -> bool:
    from scheduler.ports.errors import SchedulerError

    try:
        return not _marked(chosen)
    except SchedulerError:
        return False


def _read_settings(scheduler: SchedulerKind, file: Path | None) -> "tuple[ActSettings, str | None]":
    """Return the settings, and None or why they are invalid; invalid ones only define how to reach the scheduler."""
    from foundation.errors import InputError
    from scheduler.controller.settings import ActSettings, read_scheduler_settings, read_settings

    if file is None:
        return ActSettings(), None
    try:
        return read_settings(file), None
    except InputError as error:
        if scheduler is SchedulerKind.FILE:
            return ActSettings(), str(error)
        return read_scheduler_settings(file), str(error)


def _all_there(scheduler: SchedulerKind, cluster: Path | None, scores: Path | None, settings: Path | None) -> None:
    """Report all missing options together; stopping and releasing need the scheduler only."""
    missing = []
    if scheduler is SchedulerKind.FILE and cluster is None:
        missing.append("--cluster FILE (or --scheduler kubernetes or slurm)")
    if scores is None:
        missing.append("--scores FOLDER (from `predrain score`)")
    if settings is None:
        missing.append(
            f"--settings FILE with policy.thresholds and policy.stages (default: {DEFAULT_SETTINGS} in this folder; "
            "template: deploy/act/act.yaml)"
        )
    if missing:
        raise typer.BadParameter(f"missing required options: {', '.join(missing)}")


def _switch(
    chosen: "ChosenScheduler", *, kill: bool, resume: bool, release_all: bool, reset_breaker: bool
) -> dict[str, Any]:
    """Set the switches, report them, and return them for the JSON output.

    Returns: empty if they cannot be stored; release-all continues then, since this process can release all markers.
    """
    from dataclasses import replace

    from foundation.errors import InputError
    from scheduler.ports.clock import SystemClock
    from scheduler.ports.codec import plain_of
    from scheduler.ports.errors import SchedulerError

    try:
        switches = chosen.adapter.read_switches()
        if resume:
            switches = replace(switches, kill=False, release_all=False)
        if kill or release_all:
            switches = replace(switches, kill=kill or switches.kill, release_all=release_all or switches.release_all)
        if reset_breaker:
            switches = replace(switches, reset_breaker_at=SystemClock().now())
        result = chosen.adapter.set_switches(switches)
        failure = None if result.confirmed else f"cannot set the switches: {result.message}"
    except SchedulerError as error:
        failure = f"the switches cannot be read: {error}"
    if failure is not None and release_all:
        sys.stderr.write(f"predrain act: {failure}; other controllers may set new markers. Run it again.\n")
        return {}
    if failure is not None:
        raise InputError(failure, chosen.location, "Try again.")
    state = ["kill switch set" if switches.kill else "kill switch cleared"]
    state += ["release all"] if switches.release_all else []
    state += ["breaker closed by manual reset"] if reset_breaker else []
    sys.stderr.write(f"predrain act: {', '.join(state)}\n")
    return {"switches": plain_of(switches)}


def _controller(
    chosen: "ChosenScheduler",
    sources: tuple[Path | None, Path | None],
    settings: "ActSettings",
    record: "SqliteLedger",
    *,
    undo: bool,
    unusable: str | None,
) -> "Controller":
    """Create the controller.

    ``undo``: release everything: neither scores nor events are used, and invalid settings are only reported.
    ``unusable``: why the settings are invalid. The controller reports this, and any other unusable input, and then only
    releases expired markers.
    """
    from foundation.running import Patience
    from predrain.act.assembly import evacuation_of, facts_of
    from scheduler.controller.controller import Controller
    from scheduler.controller.scores_reader import ScoresReader
    from scheduler.ports.clock import SystemClock
    from scheduler.ports.errors import described
    from scheduler.ports.risks import MemoryFacts, MemoryRisks

    scores, events = (None, None) if undo else sources
    sources_limit = Patience(settings.controller.max_round_duration.total_seconds())
    if undo and unusable is not None:
        sys.stderr.write(f"predrain act: {unusable} All markers are still released.\n")
        unusable = None
    clock = SystemClock()
    risks: RiskSource = MemoryRisks()
    facts: FactSource = MemoryFacts()
    evacuation = None
    try:
        if unusable is None:
            sources_limit.call("the scores", lambda: check_scores(scores))
            if not undo:
                _refuse_unknown_groups(settings, chosen)
            evacuation = evacuation_of(chosen, settings, clock, undo=undo)
            rules = settings.policy.rules
            facts = sources_limit.call("the events", lambda: facts_of(events, evacuation, record, rules, scores))
            risks = risks if scores is None else ScoresReader(scores, clock, settings.controller.max_score_lifetime)
    except Exception as error:  # a release needs none of it
        unusable = None if undo else described(error)
    return Controller(
        chosen.adapter, risks, facts, record, clock, settings.policy, settings.controller,
        holder=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}", code=VERSION,
        evacuation=evacuation, unusable=unusable, releases_all=undo,
    )  # fmt: skip


def _refuse_unknown_groups(settings: "ActSettings", chosen: "ChosenScheduler") -> None:
    """Raise ``InputError`` for a pinned group without nodes: a misspelt group would not be pinned to its stage."""
    from foundation.errors import InputError
    from foundation.text import nearest_hint

    if not settings.policy.stages.pinned:
        return
    groups = {reading.view.group_key for reading in chosen.adapter.read_fleet().nodes}
    for group in settings.policy.stages.pinned.keys() - groups if groups else ():
        advice = nearest_hint(group, groups, f"Groups are {', '.join(sorted(groups))}.")
        raise InputError(f"policy.stages.pinned names {group!r}, but no node is in this group", chosen.location, advice)


def _ledger(file: Path, cluster: str, settings: "ActSettings", *, dry_run: bool, undo: bool) -> "SqliteLedger":
    from foundation.errors import InputError
    from scheduler.ledger.sqlite_ledger import SqliteLedger
    from scheduler.ports.errors import LedgerError

    if dry_run:
        return SqliteLedger(None)  # a dry run evaluates no past alerts and records nothing
    longest_s = settings.controller.max_round_duration.total_seconds()
    if not undo:
        return SqliteLedger(file, cluster, required=False, longest_s=longest_s)
    try:
        return SqliteLedger(file, cluster, longest_s=longest_s)
    except (InputError, LedgerError) as error:
        sys.stderr.write(f"predrain act: {error} All markers are still released, without a record in the ledger.\n")
        return SqliteLedger(None)


def _follow(controller: "Controller", settings: "ActSettings", listen: str | None, as_json: bool) -> "RoundReport":
    import contextlib
    import time
    from datetime import UTC, datetime

    from scheduler.controller.metrics import RoundMetrics, listening
    from scheduler.ports.clock import SystemClock
    from scheduler.ports.report import RoundReport

    interval = settings.controller.interval
    longest = settings.controller.max_round_duration + settings.evacuation.max_round_duration
    metrics = RoundMetrics(SystemClock(), interval, longest)
    report = RoundReport(datetime.now(UTC))
    last_shown: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.callback(controller.stop)
        if listen is not None:
            port = stack.enter_context(listening(metrics, listen))
            sys.stderr.write(f"predrain act: metrics on port {port}\n")
        for _ in until_stopped(interval):
            started_s = time.monotonic()
            report = controller.round()
            metrics.note(report, time.monotonic() - started_s)
            lines = [str(report.active), *report.errors, *report.notes, *(step.line for step in report.work)]
            if report.steps or lines != last_shown:  # an unchanged state is not repeated every minute
                _show(report, as_json)
            last_shown = lines
    return report


def _show(report: "RoundReport", as_json: bool, extra: Mapping[str, Any] | None = None) -> None:
    if as_json:
        print_json({**report.to_json(), **(extra or {})})
        return
    for line in _lines(report):
        sys.stdout.write(printable(line) + "\n")
    for error in report.errors:
        sys.stderr.write(f"predrain act: error: {printable(error)}\n")
    sys.stdout.flush()


def _lines(report: "RoundReport") -> list[str]:
    content: dict[str, Any] = report.to_json()
    inactive = "not active" if report.errors else "standby: another replica holds the lease"
    lines = [f"{report.at:%Y-%m-%d %H:%M:%S} UTC" + ("" if report.active else f": {inactive}")]
    reasons_of: dict[str, tuple[str, ...]] = {}
    for step in report.steps:
        action = step.action
        message = f": {step.message}" if step.message else ""
        lines.append(f"{step.outcome:<8} {action.verb} {action.node} ({action.tier}){message}")
        if reasons_of.get(action.node) != action.reasons:  # the same for each step on a node
            lines += [f"         why: {reason}" for reason in action.reasons]
        reasons_of[action.node] = action.reasons
        lines += [f"         {write.message}" for write in step.writes]
    lines += [step.line for step in report.work]
    lines += [f"         {write.message}" for step in report.work for write in step.writes]
    lines += [f"over budget: {node}: {why}" for node, why in content["over_budget"].items()]
    lines += [f"breaker open: {cause}" for cause in content["breaker"].values()]
    if content["breaker"]:
        lines.append("         closes when its cause is gone for policy.breaker.quiet, or by --reset-breaker")
    lines += [f"fleet: {reason}" for reason in content["fleet"]]
    lines += [f"note: {note}" for note in report.notes]
    lines += _at_risk(report)
    if not report.steps and not report.work and report.active and report.plan is not None:
        lines.append("nothing to do")
    return lines


def _at_risk(report: "RoundReport") -> list[str]:
    """List the nodes at risk without an action, with their current level and why it is not higher."""
    at_risk = report.at_risk()
    lines = []
    for node in at_risk[:_MAX_LISTED]:
        risk = "unknown" if node.risk is None else f"{percent(node.risk)}"
        level = f"stays {node.target.name.lower()}"
        if node.target < node.wanted:
            level += f" instead of {node.wanted.name.lower()}"
        lines.append(f"at risk: {node.node} ({node.tier}, {risk}) {level}: {'; '.join(node.reasons)}")
    further = len(at_risk) - len(lines)
    return [*lines, f"at risk: {further} more nodes, see at_risk in --json"] if further else lines
