"""What draining a node now is worth in GPU-hours, against leaving it and against a wait for its jobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from pydantic.dataclasses import dataclass as checked

from foundation.settings import NonNegativeTime, PositiveTime
from policy.fleet import JobView

_HOUR = timedelta(hours=1)


@checked(frozen=True, slots=True)
class CostBenefitConfig:
    """What things take.

    ``checkpoint``: writing a checkpoint on demand.
    ``restart``: from a job's end until it computes again elsewhere: queue, start, load.
    ``resize``: from a node's loss until an elastic job computes again on its others; assumption.
    ``reset``, ``reboot``: resetting the GPUs of an empty node, and rebooting it, until it takes work again.
    ``verify``: draining and testing a node that turns out healthy, until it is back.
    ``planned_repair``, ``unplanned_repair``: out of service for a fault that was foreseen, and for one that was not.
    ``checkpoint_every``: how often a job writes a checkpoint: from one that it reports to the next, and at any time
    where it reports none.
    ``always``: drain whatever it is worth.
    ``may_wait``: wait for a job's next checkpoint or end where that is cheaper.
    """

    checkpoint: NonNegativeTime = timedelta(minutes=5)
    restart: NonNegativeTime = timedelta(minutes=15)
    resize: NonNegativeTime = timedelta(minutes=2)
    reset: NonNegativeTime = timedelta(minutes=10)
    reboot: NonNegativeTime = timedelta(minutes=30)
    verify: PositiveTime = timedelta(hours=2)
    planned_repair: NonNegativeTime = timedelta(hours=12)
    unplanned_repair: NonNegativeTime = timedelta(hours=24)
    checkpoint_every: PositiveTime = timedelta(hours=2)
    always: bool = False
    may_wait: bool = True


@dataclass(frozen=True, slots=True)
class Price:
    """Cost and benefit of one action on one node, in GPU-hours.

    ``unneeded``: cost where no failure follows.
    ``saved``: what is saved, net of the action's own cost, where one does; 0 or less: never worth it.
    """

    unneeded: float
    saved: float

    @property
    def break_even(self) -> float | None:
        """The risk from which the action pays; 0: it is free; None: it never pays."""
        if self.unneeded <= 0:
            return 0.0
        return None if self.saved <= 0 else self.unneeded / (self.unneeded + self.saved)


@dataclass(frozen=True, slots=True)
class Worth:
    """What a drain now is expected to save and to lose.

    ``saved``, ``lost``: expected GPU-hours: the risk times what a drain before the failure saves; its complement times
    what an unneeded drain costs.
    ``break_even``: the risk at or above which a drain is worth it; None: it never is.
    ``wait``: expected GPU-hours that waiting is better than draining now (negative: worse), for the best time within
    the horizon at which a job ends or writes a checkpoint; None where no such time is known.
    ``wait_until``: that time.
    ``choice``: ``drain``, ``wait`` or ``leave``.
    """

    risk: float
    saved: float
    lost: float
    break_even: float | None
    wait: float | None
    wait_until: datetime | None
    choice: Literal["drain", "wait", "leave"]
    message: str


def worth_of(
    gpus: int,
    jobs: Sequence[JobView],
    risk: float,
    horizon: timedelta,
    config: CostBenefitConfig,
    now: datetime,
    found: float = 1.0,
) -> Worth:
    """Weigh a drain now.

    ``risk``: that the node fails within ``horizon`` from now, calibrated.
    ``found``: share of these failures that the diagnostic finds. The others fail after the node is back in service.

    A failure under a job costs all of its GPUs the work since its last checkpoint and a restart, and the node an
    unplanned repair. A drain costs them the work since a checkpoint too, a fresh one where the job writes it on
    demand, and a restart; then the node is out for a planned repair, or for a test if nothing was wrong. Where a node
    is left alone it is taken to run such jobs all through the horizon. The hazard is even over the horizon, so that a
    drain put off to r of the horizon h comes after the failure with probability ``1 - (1 - risk) ** (r / h)``; waiting
    is better when that times what a failure costs more than a drain of the empty node, and what stopping the jobs costs
    then, are together below what stopping them now costs.
    """
    hours = hours_of(jobs, config, now)
    price, averted = drain_price(gpus, hours.fail, hours.stop, config, found)
    saved, lost, break_even = risk * price.saved, (1 - risk) * price.unneeded, price.break_even
    waits: list[tuple[float, datetime, str]] = []
    for until, what in _turns(jobs, config):
        if now < until < now + horizon:
            meets = 1 - (1 - risk) ** ((until - now) / horizon)
            later = (1 - meets) * _stop(jobs, config, now, until)
            waits.append((hours.stop - later - meets * averted, until, what))
    wait, wait_until, what = max(waits, key=lambda waited: waited[0], default=(None, None, ""))
    worthy = config.always or (saved - lost > 0)
    choice: Literal["drain", "wait", "leave"] = "drain" if worthy else "leave"
    if config.may_wait and wait is not None and wait > 0 and (worthy or saved - lost + wait > 0):
        choice = "wait"
    even = "no break-even" if break_even is None else f"break-even: {break_even:.1%}"
    summary = f"a drain now saves {saved:.1f} and loses {lost:.1f} GPU-hours at a risk of {risk:.1%} ({even})"
    if wait is not None and wait_until is not None:
        side = "better" if wait > 0 else "worse"
        summary += f"; waiting for {what} at {wait_until:%Y-%m-%d %H:%M} UTC is {abs(wait):.1f} {side}"
    return Worth(risk, saved, lost, break_even, wait, wait_until, choice, summary)


def drain_price(gpus: float, fail: float, stop: float, config: CostBenefitConfig, found: float) -> tuple[Price, float]:
    """Return the price of a drain, and what it averts where a failure follows; ``stop`` 0: the jobs end by themselves.

    ``fail``, ``stop``: of :class:`JobHours`. What the diagnostic does not find comes back into service, and fails.
    """
    verify, planned, unplanned = (
        gpus * _hours(duration) for duration in (config.verify, config.planned_repair, config.unplanned_repair)
    )
    averted = found * (unplanned + fail - planned)
    return Price(stop + verify, averted - (1 - found) * verify - stop), averted


@dataclass(frozen=True, slots=True)
class JobHours:
    """GPU-hours of the jobs on a node.

    ``stop``: what stopping them now costs; ``fail``: what they lose if the node fails.
    ``checkpoint``: what asking those that can for a checkpoint costs; ``unsaved``: what these would have to redo.
    """

    stop: float = 0.0
    fail: float = 0.0
    checkpoint: float = 0.0
    unsaved: float = 0.0


def hours_of(jobs: Sequence[JobView], config: CostBenefitConfig, now: datetime) -> JobHours:
    """Return what the jobs of a node cost in each case, as is expected now."""
    able = [job for job in jobs if job.can_checkpoint and job.checkpointed_at is not None]
    return JobHours(
        _stop(jobs, config, now, now),
        sum(job.gpus * _hours(_rework_at_failure(job, config, now) + _again(job, config)) for job in jobs),
        sum(job.gpus * _hours(config.checkpoint) for job in able),
        sum(job.gpus * _hours(max(now - (job.checkpointed_at or now), timedelta(0))) for job in able),
    )


def _turns(jobs: Sequence[JobView], config: CostBenefitConfig) -> list[tuple[datetime, str]]:
    """Give when stopping the jobs gets cheaper, as far as it is known."""
    turns = [(job.ends_at, f"the end of {job.name}") for job in jobs if job.ends_at is not None]
    for job in jobs:
        if job.checkpointed_at is not None and not job.can_checkpoint:
            turns.append((job.checkpointed_at + config.checkpoint_every, f"the next checkpoint of {job.name}"))
    return turns


def _stop(jobs: Sequence[JobView], config: CostBenefitConfig, now: datetime, at: datetime) -> float:
    """Give the GPU-hours that stopping the jobs at a time costs, as is expected now."""
    stopped = [job for job in jobs if at == now or job.ends_at is None or job.ends_at > at]
    return sum(job.gpus * _hours(_rework(job, config, now, at) + _again(job, config)) for job in stopped)


def _again(job: JobView, config: CostBenefitConfig) -> timedelta:
    return config.resize if job.can_shrink else config.restart


def _hours(value: timedelta) -> float:
    return value / _HOUR


def _rework(job: JobView, config: CostBenefitConfig, now: datetime, at: datetime) -> timedelta:
    """Give the work that is lost, or the time that its checkpoint takes, if a job is stopped at a time."""
    every = config.checkpoint_every
    if job.can_checkpoint:
        return config.checkpoint
    if job.checkpointed_at is None:
        return every / 2 if job.started_at is None else min(max(at - job.started_at, timedelta(0)), every / 2)
    age = max(at - job.checkpointed_at, timedelta(0))
    if at == now or now - job.checkpointed_at > every or age < every:
        return age
    return max(age % every, config.checkpoint)  # until the one to come is written and reported


def _rework_at_failure(job: JobView, config: CostBenefitConfig, now: datetime) -> timedelta:
    every = config.checkpoint_every
    age = every if job.checkpointed_at is None else now - job.checkpointed_at
    return age if age > every else every / 2  # its checkpoint is overdue: it writes them more rarely
