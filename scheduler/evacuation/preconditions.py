"""Whether a node may be emptied now: what stands on it, what people say, and what the decision still wants."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

from policy.cost_benefit import WorthConfig, worth_of
from policy.fleet import Level
from policy.plan import NodeDecision
from scheduler.evacuation.progress import Leaving
from scheduler.ports.readings import NodeReading, Switches
from scheduler.ports.workloads import Workload


def why_ended(reading: NodeReading | None) -> str | None:
    """Say why a node is not to be emptied any more at all; None: its drain mark stands, or nobody can tell."""
    if reading is None:
        return "there is no such node any more"
    if not reading.view.readable:
        return None
    return None if reading.view.marks.drained else "its drain mark is gone"


def why_held(
    reading: NodeReading,
    switches: Switches,
    decision: NodeDecision | None,
    passed_at: datetime | None,
    again_after: timedelta,
    now: datetime,
) -> str | None:
    """Say why nothing new may be done to empty a node now, though its mark stands.

    ``decision``: of this round; None: the decision does not speak of the node.
    Returns: in words; None: it may be emptied.
    """
    view = reading.view
    published = view.marks.published
    passed = passed_at is not None and now < passed_at + again_after
    reasons = (
        (switches.kill, "the kill switch is set"),
        (switches.release_all, "everything is to be released"),
        (view.foreign is not None, view.foreign),
        (not view.marks.drained, "its drain mark is gone"),
        (view.undone, "a person took our mark off"),
        (published is None or published.expires_at <= now, "what its drain rests on has expired"),
        (
            decision is None or decision.target is not Level.DRAINED,
            "the decision of this round does not want it drained any more",
        ),
        (
            passed and decision is not None and not decision.rules,
            f"it passed a diagnostic at {passed_at:%Y-%m-%d %H:%M} UTC: its jobs are not moved again so soon"
            if passed_at is not None
            else None,
        ),
    )
    return next((words for holds, words in reasons if holds), None)


Next = Literal["going", "ask", "await", "held", "wait_end", "later", "evict"]


@dataclass(frozen=True, slots=True)
class Prices:
    """What a wait is weighed by."""

    worth: WorthConfig
    horizon: timedelta
    gpus: int
    wait_for_end: bool


def next_step(
    workload: Workload, leaving: Leaving, decision: NodeDecision, prices: Prices, now: datetime
) -> tuple[Next, str]:
    """Say what is next, and why.

    ``workload``: as listed just now; it does not ``stay``.
    Returns: ``going``: it is on its way; ``ask``: for a checkpoint; ``await``: the acknowledgement; ``held``: it may
    not be moved; ``wait_end``: its own end is cheaper; ``later``: it was tried lately; ``evict``.
    """
    if workload.ending:
        return "going", "it is on its way out"
    if leaving.deadline is not None and now < leaving.deadline and leaving.asked in ("planned", "asked"):
        until = f"its checkpoint is waited for until {leaving.deadline:%Y-%m-%d %H:%M:%S} UTC"
        return ("ask", "") if leaving.asked == "planned" else ("await", until)
    if workload.held is not None:
        end = workload.ends_at
        at_most = "" if end is None else f", until {end:%Y-%m-%d %H:%M} UTC at the latest"
        return "held", f"it may not be moved ({workload.held}): its end is waited for{at_most}"
    if leaving.asked != "acknowledged" and leaving.evicted_at is None:
        why = waits_for_end(workload, decision, prices, now, can_checkpoint=False)
        if why is not None:
            return "wait_end", why
    if leaving.again_at is not None and now < leaving.again_at:
        return "later", leaving.words
    return "evict", ""


def waits_for_end(
    workload: Workload, decision: NodeDecision, prices: Prices, now: datetime, *, can_checkpoint: bool
) -> str | None:
    """Say why a workload is better left to end by itself; None: it is not.

    A fault that is there already (a hard rule) waits for nothing: its risk is taken as certain.

    ``can_checkpoint``: whether it can still be asked for one; false also where it was asked and did not answer.
    """
    if not prices.wait_for_end or workload.job is None:
        return None
    risk = 1.0 if decision.rules else decision.risk
    if risk is None:
        return None
    job = replace(workload.job, can_checkpoint=can_checkpoint)
    worth = worth_of(max(1, prices.gpus), (job,), risk, prices.horizon, prices.worth, now)
    return worth.words if worth.choice == "wait" else None
