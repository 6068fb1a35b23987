"""Cost-benefit of draining a node now, in GPU-hours, compared with not draining and with waiting for its jobs."""

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
    """Durations behind the costs, and options.

    ``checkpoint``: writing a checkpoint on demand.
    ``restart``: from the end of a job until it computes elsewhere: queue, start, load.
    ``resize``: from the loss of a node until an elastic job computes on its other nodes (an assumption).
    ``reset``, ``reboot``: resetting the GPUs of an empty node, or rebooting it, until it accepts work.
    ``verify``: draining and testing a node that turns out healthy, until it is back in service.
    ``planned_repair``, ``unplanned_repair``: time out of service for a predicted fault, and for an unpredicted one.
    ``checkpoint_every``: checkpoint interval of jobs, counted from the last reported checkpoint if there is one.
    ``always``: drain regardless of the cost-benefit.
    ``may_wait``: wait for a job's next checkpoint or end if that is cheaper.
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

    ``unneeded``: cost if no failure follows.
    ``saved``: saving if a failure follows, net of the action's own cost; 0 or less: the action never pays.
    """

    unneeded: float
    saved: float

    @property
    def break_even(self) -> float | None:
        """Minimum risk at which the action pays; 0: it is free; None: it never pays."""
        if self.unneeded <= 0:
            return 0.0
        return None if self.saved <= 0 else self.unneeded / (self.unneeded + self.saved)


@dataclass(frozen=True, slots=True)
class CostBenefit:
    """Expected saving and loss of a drain now.

    ``saved``, ``lost``: expected GPU-hours: the risk times the saving of a needed drain, and its complement times the
    cost of an unneeded one.
    ``break_even``: minimum risk at which a drain pays; None: it never pays.
    ``wait``: expected GPU-hours gained by waiting instead of draining now (negative: lost), for the best time within
    the horizon at which a job ends or writes a checkpoint; None if no such time is known.
    ``wait_until``: that time.
    """

    risk: float
    saved: float
    lost: float
    break_even: float | None
    wait: float | None
    wait_until: datetime | None
    choice: Literal["drain", "wait", "leave"]
    message: str


def evaluate_drain(
    gpus: int,
    jobs: Sequence[JobView],
    risk: float,
    horizon: timedelta,
    config: CostBenefitConfig,
    now: datetime,
    sensitivity: float = 1.0,
) -> CostBenefit:
    """Evaluate a drain now.

    ``risk``: calibrated probability that the node fails within ``horizon`` from now.
    ``sensitivity``: share of these failures that the diagnostic finds; the others occur after the node returns.

    A failure costs all GPUs of a job the work since its last checkpoint and a restart, and the node an unplanned
    repair. A drain costs the work since the last checkpoint (little if the job writes one on demand) and a restart;
    then the node is out of service for a planned repair, or for a test if it is healthy. A node that is not drained is
    assumed to run such jobs throughout the horizon. With a constant hazard, a failure precedes a drain delayed by r of
    the horizon h with probability ``1 - (1 - risk) ** (r / h)``. Waiting is better if the expected extra cost of that
    failure, plus the cost of stopping the jobs then, is below the cost of stopping them now.
    """
    hours = hours_of(jobs, config, now)
    price, averted = drain_price(gpus, hours.fail, hours.stop, config, sensitivity)
    saved, lost, break_even = risk * price.saved, (1 - risk) * price.unneeded, price.break_even
    waits: list[tuple[float, datetime, str]] = []
    for until, turn in _turns(jobs, config):
        if now < until < now + horizon:
            meets = 1 - (1 - risk) ** ((until - now) / horizon)
            stop_later = (1 - meets) * _stop(jobs, config, now, until)
            waits.append((hours.stop - stop_later - meets * averted, until, turn))
    wait, wait_until, turn = max(waits, key=lambda waited: waited[0], default=(None, None, ""))
    worthy = config.always or (saved - lost > 0)
    choice: Literal["drain", "wait", "leave"] = "drain" if worthy else "leave"
    if config.may_wait and wait is not None and wait > 0 and (worthy or saved - lost + wait > 0):
        choice = "wait"
    break_even_text = "no break-even" if break_even is None else f"break-even: {break_even:.1%}"
    summary = (
        f"a drain now saves {saved:.1f} and loses {lost:.1f} GPU-hours at a risk of {risk:.1%} ({break_even_text})"
    )
    if wait is not None and wait_until is not None:
        side = "better" if wait > 0 else "worse"
        summary += f"; waiting for {turn} at {wait_until:%Y-%m-%d %H:%M} UTC is {abs(wait):.1f} {side}"
    return CostBenefit(risk, saved, lost, break_even, wait, wait_until, choice, summary)


def drain_price(
    gpus: float, fail: float, stop: float, config: CostBenefitConfig, sensitivity: float
) -> tuple[Price, float]:
    """Return the price of a drain, and the GPU-hours it averts if a failure follows.

    ``fail``, ``stop``: of :class:`JobHours`; ``stop`` is 0 if jobs are left to finish. Faults that the diagnostic does
    not find return to service and fail.
    """
    verify, planned, unplanned = (
        gpus * _hours(duration) for duration in (config.verify, config.planned_repair, config.unplanned_repair)
    )
    averted = sensitivity * (unplanned + fail - planned)
    return Price(stop + verify, averted - (1 - sensitivity) * verify - stop), averted


@dataclass(frozen=True, slots=True)
class JobHours:
    """Costs of the jobs on a node in GPU-hours.

    ``stop``: cost of stopping them now; ``fail``: loss if the node fails.
    ``checkpoint``: cost of checkpoints of the jobs that write them on demand; ``unsaved``: their work since the last.
    """

    stop: float = 0.0
    fail: float = 0.0
    checkpoint: float = 0.0
    unsaved: float = 0.0


def hours_of(jobs: Sequence[JobView], config: CostBenefitConfig, now: datetime) -> JobHours:
    """Return the expected costs of a node's jobs."""
    with_checkpoint = [job for job in jobs if job.can_checkpoint and job.checkpointed_at is not None]
    return JobHours(
        _stop(jobs, config, now, now),
        sum(job.gpus * _hours(_rework_at_failure(job, config, now) + _restart_time(job, config)) for job in jobs),
        sum(job.gpus * _hours(config.checkpoint) for job in with_checkpoint),
        sum(job.gpus * _hours(max(now - (job.checkpointed_at or now), timedelta(0))) for job in with_checkpoint),
    )


def _turns(jobs: Sequence[JobView], config: CostBenefitConfig) -> list[tuple[datetime, str]]:
    """Return the known times at which stopping the jobs becomes cheaper."""
    turns = [(job.ends_at, f"the end of {job.name}") for job in jobs if job.ends_at is not None]
    for job in jobs:
        if job.checkpointed_at is not None and not job.can_checkpoint:
            turns.append((job.checkpointed_at + config.checkpoint_every, f"the next checkpoint of {job.name}"))
    return turns


def _stop(jobs: Sequence[JobView], config: CostBenefitConfig, now: datetime, start: datetime) -> float:
    """Return the GPU-hours that stopping the jobs at time ``start`` is expected to cost."""
    stopped = [job for job in jobs if start == now or job.ends_at is None or job.ends_at > start]
    return sum(job.gpus * _hours(_rework(job, config, now, start) + _restart_time(job, config)) for job in stopped)


def _restart_time(job: JobView, config: CostBenefitConfig) -> timedelta:
    return config.resize if job.can_shrink else config.restart


def _hours(value: timedelta) -> float:
    return value / _HOUR


def _rework(job: JobView, config: CostBenefitConfig, now: datetime, instant: datetime) -> timedelta:
    """Return the work lost if a job is stopped at time ``instant``, or the duration of its on-demand checkpoint."""
    interval = config.checkpoint_every
    if job.can_checkpoint:
        return config.checkpoint
    if job.checkpointed_at is None:
        return (
            interval / 2 if job.started_at is None else min(max(instant - job.started_at, timedelta(0)), interval / 2)
        )
    age = max(instant - job.checkpointed_at, timedelta(0))
    if instant == now or now - job.checkpointed_at > interval or age < interval:
        return age
    return max(age % interval, config.checkpoint)  # the next checkpoint takes time to be written and reported


def _rework_at_failure(job: JobView, config: CostBenefitConfig, now: datetime) -> timedelta:
    interval = config.checkpoint_every
    age = interval if job.checkpointed_at is None else now - job.checkpointed_at
    return age if age > interval else interval / 2  # an overdue checkpoint: the job's interval must be longer
