"""Puts together what ``predrain act`` needs to empty nodes and to learn what became of alerts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from predrain.act.scheduler_choice import AGENT

if TYPE_CHECKING:
    from predrain.act.scheduler_choice import ChosenScheduler
    from scheduler.controller.settings import ActSettings
    from scheduler.evacuation.engine import Evacuation
    from scheduler.evacuation.progress import Result
    from scheduler.evacuation.settings import CommandSettings, EvacuationSettings, WebhookSettings
    from scheduler.ledger.sqlite_ledger import SqliteLedger
    from scheduler.ports.protocols import Clock, FactSource
    from scheduler.ports.workloads import Hook, Verification


def evacuation_of(
    chosen: ChosenScheduler, given: ActSettings, ledger: SqliteLedger, clock: Clock, *, undo: bool
) -> Evacuation | None:
    """Make what empties nodes.

    ``undo``: everything is to be released: then what the settings ask for beyond the scheduler is no reason to stop.
    Returns: none where the scheduler cannot tell what runs on its nodes. Switched off it still reads results of
    diagnostics, so that what they say holds.
    Raises ``InputError`` if the settings ask for what this scheduler cannot do.
    """
    from scheduler.evacuation.engine import Evacuation
    from telemetry.errors import InputError

    settings = given.evacuation
    if chosen.workloads is None:
        if settings.enabled and not undo:
            raise InputError(
                "evacuation.enabled is true, and nothing tells what runs on the nodes",
                chosen.where,
                "Set it to false: the jobs of drained nodes then end by themselves.",
            )
        return None
    verification = _verification(chosen, settings)
    if verification is None and settings.verification.method != "none" and not undo:
        raise InputError(
            "evacuation.verification.method is 'scheduler', and this scheduler starts no diagnostics here",
            chosen.where,
            "Use webhook or command, or none.",
        )
    hooks = {
        "webhook": _webhook(settings.checkpoint.webhook),
        "command": _command(settings.checkpoint.command),
    }
    return Evacuation(chosen.adapter, chosen.workloads, ledger, clock, settings, hooks, verification)


def facts_of(
    events: Path | None,
    evacuation: Evacuation | None,
    ledger: SqliteLedger,
    scores: Path | None = None,
) -> FactSource:
    """Make the source of facts: what GPUs reported, what diagnostics came to, and what became of alerts.

    ``events``: ``events.parquet`` of a dataset; with its inventory beside it, it says what happened. Without, no alert
    is judged.
    ``ledger``: says when we took a node out of service.
    """
    from predrain.act.dataset_history import DatasetHistory
    from scheduler.controller.facts import EventFacts, JudgedFacts, VerifiedFacts
    from scheduler.ports.risks import MemoryFacts

    def results() -> tuple[Result, ...] | None:
        return () if evacuation is None else evacuation.results()

    known: FactSource = MemoryFacts() if events is None else EventFacts(events)
    verified = known if evacuation is None else VerifiedFacts(known, results)
    if events is None or not (events.parent / "inventory.parquet").is_file():
        return verified
    history = DatasetHistory(events.parent, events, scores)
    return JudgedFacts(verified, history.read, results, ledger.service)


def _verification(chosen: ChosenScheduler, settings: EvacuationSettings) -> Verification | None:
    from scheduler.evacuation.diagnostics import HookVerification

    asked = settings.verification
    if asked.method == "scheduler":
        return chosen.verification
    hook = _webhook(asked.webhook) if asked.method == "webhook" else _command(asked.command)
    return None if asked.method == "none" or hook is None else HookVerification(hook)


def _webhook(settings: WebhookSettings | None) -> Hook | None:
    from scheduler.evacuation.hooks import Webhook

    return None if settings is None else Webhook(settings, AGENT)


def _command(settings: CommandSettings | None) -> Hook | None:
    from scheduler.evacuation.hooks import CommandHook

    return None if settings is None else CommandHook(settings)
