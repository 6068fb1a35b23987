"""Cost-benefit of draining a node now, in GPU-hours, compared with not draining and with waiting for its jobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from pydantic.dataclasses import dataclass as checked

from foundation.settings import NonNegativeTime, PositiveTime
from foundation.text import percent
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

    def expected(self, risk: float) -> float:
        """Return the expected saving at a risk, net of the cost; negative: a loss."""
        return risk * self.saved - (1 - risk) * self.unneeded


@dataclass(frozen=True, slots=True)
class CostBenefit:
    """Expected saving and loss of a drain now.

    ``saved``, ``lost``: expected GPU-hours: the risk times the saving of a needed drain, and its complement times the
    cost of an unneeded one.
    ``swap``: expected GPU-hours gained by letting the jobs end instead.
    ``break_even``: minimum risk at which a drain pays; None: it never pays.
    ``wait``: expected GPU-hours gained by waiting instead of draining now (negative: lost), for the best time within
    the horizon at which a job ends or writes a checkpoint; None if no such time is known.
    ``wait_until``: that time.
    ``expected``: for each rung that taints the node, the expected GPU-hours that it ``saves``, net of its cost, and
    ``costs``, as in :class:`policy.plan.RungRequest`.
    ``gpus``: GPUs of the node.
    """

    risk: float
    saved: float
    lost: float
    swap: float
    break_even: float | None
    wait: float | None
    wait_until: datetime | None
    choice: Literal["drain", "wait", "leave"]
    message: str
    expected: Mapping[str, Mapping[str, float]]
    gpus: int


def evaluate_drain(
    gpus: int,
    jobs: Sequence[JobView],
    risk: float,
    horizon: timedelta,
    config: CostBenefitConfig,
    now: datetime,
    sensitivity: float = 1.0,
) -> CostBenefit:
    """Evaluate a drain now, and a swap.

    ``risk``: calibrated probability that the node fails within ``horizon`` from now.
    ``sensitivity``: share of these failures that the diagnostic finds; the others occur after the node returns.

    A failure costs all GPUs of a job the work since its last checkpoint and a restart, and the node an unplanned
    repair. A drain costs the work since the last checkpoint (little if the job writes one on demand) and a restart;
    then the node is out of service for a test, and for a planned repair if that finds a fault. A node that is not
    drained is assumed to run such jobs throughout the horizon. With a constant hazard, a failure precedes a drain
    delayed by r of the horizon h with probability ``1 - (1 - risk) ** (r / h)``. Waiting is better if the expected
    extra cost of that failure, plus the GPUs that idle and the cost of stopping the jobs then, is below the cost of
    stopping them now.
    """
    hours = hours_of(gpus, jobs, horizon, config, now)
    price = drain_price(gpus, hours, config, sensitivity)
    saved, lost, break_even = risk * price.saved, (1 - risk) * price.unneeded, price.break_even
    waits: list[tuple[float, datetime, str]] = []
    for until, turn in _turns(jobs, config):
        if now < until < now + horizon:
            meets = 1 - (1 - risk) ** ((until - now) / horizon)
            stop_later = (1 - meets) * _stop(jobs, config, now, until)
            idle = _idle(gpus, jobs, now, until - now)
            waits.append((hours.stop - stop_later - meets * (price.saved + hours.stop) - idle, until, turn))
    wait, wait_until, turn = max(waits, key=lambda waited: waited[0], default=(None, None, ""))
    worthy = config.always or (saved - lost > 0)
    choice: Literal["drain", "wait", "leave"] = "drain" if worthy else "leave"
    if config.may_wait and wait is not None and wait > 0 and (worthy or saved - lost + wait > 0):
        choice = "wait"
    verb, net = ("save", saved - lost) if saved > lost else ("lose", lost - saved)
    basis = f"at a risk of {percent(risk)}" if risk < 1 else "because the fault is certain"
    break_even_text = "no risk makes it pay" if break_even is None else f"break-even risk {percent(break_even)}"
    summary = f"a drain now is expected to {verb} {net:,.1f} GPU-hours {basis} ({break_even_text})"
    if wait is not None and wait_until is not None:
        side = "better" if wait > 0 else "worse"
        summary += f"; waiting for {turn} at {wait_until:%Y-%m-%d %H:%M} UTC is {abs(wait):,.1f} GPU-hours {side}"
    prices = {"avoid": Price(0.0, hours.fail), "swap": swap_price(gpus, hours, config, sensitivity), "drain": price}
    expected = {
        rung: {"saves": rung_price.expected(risk), "costs": rung_price.unneeded} for rung, rung_price in prices.items()
    }
    swap = expected["swap"]["saves"]
    return CostBenefit(risk, saved, lost, swap, break_even, wait, wait_until, choice, summary, expected, gpus)


def drain_price(gpus: int, hours: "JobHours", config: CostBenefitConfig, sensitivity: float) -> Price:
    """Return the price of a drain; faults that the diagnostic does not find return to service and fail."""
    averted = sensitivity * (gpus * _hours(config.unplanned_repair - config.planned_repair) + hours.fail)
    cost = hours.stop + gpus * _hours(config.verify)
    return Price(cost, averted - cost)


def swap_price(gpus: int, hours: "JobHours", config: CostBenefitConfig, sensitivity: float) -> Price:
    """Return the price of a swap, which averts only failures after the last job has ended."""
    drain = drain_price(gpus, hours, config, sensitivity)
    cost = hours.idle + gpus * _hours(config.verify)
    return Price(cost, (1 - hours.occupied) * (drain.saved + drain.unneeded) - cost)


@dataclass(frozen=True, slots=True)
class JobHours:
    """Costs of the jobs on a node in GPU-hours.

    ``stop``: cost of stopping them now; ``fail``: loss if the node fails.
    ``checkpoint``: cost of checkpoints of the jobs that write them on demand; ``unsaved``: expected loss of their work
    since the last, if the node fails before the next.
    ``idle``: GPUs that idle within the horizon until the last job ends, if no new job starts.
    ``occupied``: share of the horizon until the last job ends.
    """

    stop: float = 0.0
    fail: float = 0.0
    checkpoint: float = 0.0
    unsaved: float = 0.0
    idle: float = 0.0
    occupied: float = 0.0


def hours_of(
    gpus: int, jobs: Sequence[JobView], horizon: timedelta, config: CostBenefitConfig, now: datetime
) -> JobHours:
    """Return the expected costs of the jobs on a node with ``gpus`` GPUs, one of which fails."""
    fail, checkpoint, unsaved = 0.0, 0.0, 0.0
    for job in jobs:
        hit = min(job.gpus / gpus, 1) * job.gpus  # weighted by the probability that it uses the failed GPU
        fail += hit * _hours(_rework_at_failure(job, config, now) + _restart_time(job, config))
        if job.can_checkpoint and job.checkpointed_at is not None:
            age = max(now - job.checkpointed_at, timedelta(0))
            checkpoint += job.gpus * _hours(config.checkpoint)
            unsaved += hit * _hours(age) * share_until_checkpoint(age, horizon, config)
    occupied = min(max((_remaining(job, now) for job in jobs), default=timedelta(0)), horizon)
    idle = _idle(gpus, jobs, now, occupied)
    return JobHours(_stop(jobs, config, now, now), fail, checkpoint, unsaved, idle, occupied / horizon)


def share_until_checkpoint(unsaved: timedelta, horizon: timedelta, config: CostBenefitConfig) -> float:
    """Return the share of the horizon until a job's next regular checkpoint."""
    interval = config.checkpoint_every
    return min(max(interval - unsaved, timedelta(0)) or interval, horizon) / horizon


def _remaining(job: JobView, now: datetime) -> timedelta:
    """Return the expected time until a job ends.

    Without a known end it is the time since its start: jobs seen at a random time are, on average, halfway through.
    """
    if job.ends_at is not None and job.ends_at > now:
        return job.ends_at - now
    return timedelta.max if job.started_at is None else max(now - job.started_at, timedelta(0))


def _idle(gpus: int, jobs: Sequence[JobView], now: datetime, duration: timedelta) -> float:
    """Return the GPU-hours that idle on a node within ``duration`` from now if no new job starts."""
    busy = sum(min(job.gpus, gpus) * _hours(min(_remaining(job, now), duration)) for job in jobs)
    return max(gpus * _hours(duration) - busy, 0.0)


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
