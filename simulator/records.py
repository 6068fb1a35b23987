"""Event records of a node: XIDs, tickets, repairs, drains, driver changes; and their effects on counters."""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from simulator.fleet import DAY, HOUR, NEVER, SimulatedNode, SimulatedTime, driver_at
from simulator.hazards import Chain, FailureCause, Phase
from simulator.lives import DOWN, Lives
from simulator.parameters import Parameters
from simulator.randomness import Purpose, generator
from simulator.risk import segments_at

MINUTE = 60_000
KERNEL_DELAY = 10 * MINUTE
"""Reporting delay of logged events, as by default in labelling."""


class CounterEvent(IntEnum):
    """An event that changes the counters of a device."""

    XID = 0
    UNCORRECTED = 1
    REMAPPED = 2
    LINK_BURST = 3
    CORRECTED_REMAP = 4


@dataclass(frozen=True, slots=True)
class SimulatedEvent:
    """One row of events.parquet; times in ms; ``slot`` and ``installation`` identify the device (slot -1: the node)."""

    time: int
    slot: int
    installation: int
    type: str
    code: str
    detail: str | None
    source: str
    known: int


@dataclass(slots=True)
class Records:
    """Records of a node; times in ms.

    ``counter_events``: rows of slot, installation, time, :class:`CounterEvent`, value. ``reloads``: driver reloads.
    ``logged``: time of the first record of each failure. ``with_xid``: whether an XID was logged for it. ``lingers``:
    until when the failed GPU still reports. ``app_errors``: times of application errors on the whole node.
    """

    events: list[SimulatedEvent] = field(default_factory=list)
    counter_events: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    reloads: list[int] = field(default_factory=list)
    logged: list[int] = field(default_factory=list)
    with_xid: list[bool] = field(default_factory=list)
    lingers: list[int] = field(default_factory=list)
    app_errors: list[int] = field(default_factory=list)


@dataclass
class _Writer:
    """Collects one node's records; each method adds one kind, in a fixed order of random draws.

    ``rate``: acceleration of hardware errors; application errors are not accelerated.
    """

    node: SimulatedNode
    lives: Lives
    parameters: Parameters
    chain: Chain
    clock: SimulatedTime
    seed: int
    rate: float

    def __post_init__(self) -> None:
        self.noise = self.parameters.noise
        self.rng = generator(self.seed, self.node.index, Purpose.EVENTS)
        self.out = Records()
        self.alive = self.lives.segments[self.lives.segments[:, 4] != DOWN]
        self.span_years = self.clock.days / 365.25

    def add(
        self,
        time: int,
        device: tuple[int, int],
        kind: str,
        code: str,
        source: str = "kernel",
        known: int | None = None,
        detail: str | None = None,
    ) -> None:
        known_at = time + KERNEL_DELAY if known is None else max(known, time)
        self.out.events.append(SimulatedEvent(time, *device, kind, code, detail, source, known_at))

    def xid(self, time: int, device: tuple[int, int], code: int) -> None:
        self.add(time, device, "xid", str(code))
        self.out.counter_events.append((*device, time, CounterEvent.XID, code))

    def device_at(self, slot: int, time: int) -> tuple[int, int] | None:
        """Return the device that is up in a slot at a time, if any."""
        row = int(segments_at(self.alive, np.array([slot]), np.array([time]), self.clock.origin)[0])
        return None if row < 0 else (slot, int(self.alive[row, 1]))

    def pick(self, weighted: tuple[tuple[int, float], ...]) -> int:
        weights = np.array([weight for _, weight in weighted])
        return int(weighted[int(np.searchsorted(np.cumsum(weights) / weights.sum(), self.rng.random()))][0])

    def failures(self) -> None:
        """Write the log records and tickets of failures, and their repairs."""
        for row in self.lives.failures:
            slot, installation, start, kind, cause, _, repaired, replaced, _ = (int(value) for value in row)
            device = (slot, installation)
            delay_ms = int(self.rng.uniform(0.0, self.noise.onset_late_s) * 1000)
            code_dice, lost_dice, misdated, shift, entry, drain_after, job_dice = self.rng.random(7)
            logged = min(start + delay_ms, repaired - 2 * MINUTE)
            mechanism = self.parameters.hazards.mechanisms[max(kind, 0)]
            checked = cause == FailureCause.HEALTH_CHECK or kind < 0
            lost = mechanism.name == "bus" and lost_dice < self.noise.lost_without_xid
            has_xid = bool(mechanism.xids) and not lost and not checked
            if has_xid:
                self.xid(logged, device, self.pick(mechanism.xids))
                if mechanism.failure_class == "memory":
                    self.out.counter_events.append((*device, logged, CounterEvent.UNCORRECTED, 1 + int(3 * code_dice)))
            elif checked:
                self.add(logged, device, "failure", "pcie_bandwidth", detail="below threshold", source="health-check")
            else:
                code = mechanism.tickets[int(code_dice * len(mechanism.tickets))]
                entered = logged + int((0.2 + 4.0 * entry) * HOUR)
                dated = logged
                if misdated < self.noise.misdated:
                    dated = max(logged + int((2.0 * shift - 1.0) * 12 * HOUR), self.clock.start)
                self.add(dated, device, "failure", code, source="ticket", known=max(entered, dated))
                logged = dated
            self.out.logged.append(logged)
            self.out.with_xid.append(has_xid)
            drained = min(start + delay_ms + int((2.0 + 38.0 * drain_after) * MINUTE), repaired - MINUTE)
            self.add(drained, device, "drain", "unhealthy", source="scheduler")
            is_lost = mechanism.name == "bus" and not checked
            self.out.lingers.append(start if is_lost else drained)
            if job_dice < self.noise.consequence_share:
                for other in range(self.node.slots):
                    peer = None if other == slot else self.device_at(other, start)
                    if peer is not None:
                        self.xid(start + delay_ms + int(self.rng.uniform(0.0, 60.0) * 1000), peer, 45)
            if repaired < NEVER:
                self.repaired(device, start + delay_ms, repaired, exchanged=bool(replaced))

    def repaired(self, device: tuple[int, int], logged: int, repaired: int, *, exchanged: bool) -> None:
        """Write the end of a repair: a ticket, a passed diagnostic of the current GPU, and its return to service."""
        entry, misdated, shift = self.rng.random(3)
        entered = repaired + int((0.1 + 4.0 * entry) * HOUR)
        if exchanged:
            self.add(repaired, device, "replacement", "gpu", source="ticket", known=repaired + int(entry * HOUR))
        else:
            dated = repaired
            if misdated < self.noise.misdated:
                dated = max(repaired + int((2.0 * shift - 1.0) * 12 * HOUR), logged + MINUTE)
            # Short repairs are resets or reboots; longer ones need manual work.
            took = repaired - logged
            code = "reset" if took < 2 * HOUR else ("reboot" if took < 12 * HOUR else "reseat")
            self.add(dated, device, "repair", code, source="ticket", known=max(entered, dated))
        now = (device[0], device[1] + 1) if exchanged else device
        self.add(repaired + 5 * MINUTE, now, "diagnostic", "pass", source="health-check")
        self.add(repaired + 6 * MINUTE, now, "drain", "released", source="scheduler", known=repaired + 6 * MINUTE)
        self.out.reloads.append(repaired)

    def planned(self) -> None:
        """Write planned drains, driver upgrades, replacements and removals of healthy GPUs."""
        for begin, end in self.node.drains:
            self.add(int(begin), (-1, 0), "drain", "planned", source="scheduler", known=int(begin))
            self.add(int(end), (-1, 0), "drain", "released", source="scheduler", known=int(end))
            if self.rng.random() < 0.5:
                self.out.reloads.append(int(end))
        for number, time in enumerate(self.node.upgrades):
            self.add(time, (-1, 0), "driver", driver_at(number + 1), source="configuration", known=time)
            self.out.reloads.append(time)
        failed = {(int(row[0]), int(row[1])): int(row[6]) for row in self.lives.failures if row[7]}
        followed = {(int(row[0]), int(row[1]) - 1) for row in self.lives.installations}
        for slot, installation, _, removed, _ in self.lives.installations.tolist():
            if removed < NEVER and failed.get((slot, installation)) != removed:
                kind = "replacement" if (slot, installation) in followed else "other"
                code = "planned" if kind == "replacement" else "decommissioned"
                self.add(removed, (slot, installation), kind, code, source="ticket", known=removed + HOUR)

    def applications(self) -> None:
        """Write XIDs caused by applications, on the whole node within a minute or on one GPU."""
        noise, rate = self.noise, self.noise.app_xid_rate * self.span_years
        node_wide = int(self.rng.poisson(rate * noise.app_xid_node_share))
        for time in np.sort(self.rng.integers(self.clock.start, self.clock.end, node_wide)):
            code = self.pick(noise.app_xids)
            self.out.app_errors.append(int(time))
            for slot in range(self.node.slots):
                device = self.device_at(slot, int(time))
                if device is not None:
                    self.xid(int(time) + int(self.rng.uniform(0.0, 50.0) * 1000), device, code)
        single = int(self.rng.poisson(rate * (1.0 - noise.app_xid_node_share) * self.node.slots))
        for time in self.rng.integers(self.clock.start, self.clock.end, single):
            device = self.device_at(int(self.rng.integers(0, self.node.slots)), int(time))
            code = self.pick(noise.app_xids)
            if device is not None:
                self.xid(int(time), device, code)

    def times(self, per_year: float) -> list[tuple[int, int]]:
        """Sample (slot, time) of recoverable errors, more often while the node is a lemon, as for failures."""
        factor = self.parameters.heterogeneity.lemon_factor
        errors: list[tuple[int, int]] = []
        spans = [(self.clock.start, self.clock.end, 1.0)]
        spans += [(max(int(a), self.clock.start), int(b), factor - 1.0) for a, b in self.lives.lemon]
        for begin, end, weight in spans:
            if end > begin:
                mean = per_year * weight * self.node.slots * (end - begin) / DAY / 365.25
                for _ in range(int(self.rng.poisson(mean))):
                    errors.append((int(self.rng.integers(0, self.node.slots)), int(self.rng.integers(begin, end))))
        return errors

    def in_state(self, phases: tuple[Phase, ...], owners: tuple[str, ...], per_day: float) -> list[tuple[int, int]]:
        """Sample (slot, time) of recurring errors during degradations."""
        mechanisms = self.parameters.hazards.mechanisms
        errors: list[tuple[int, int]] = []
        for slot, _, begin, end, state, _, _ in self.alive.tolist():
            owner = int(self.chain.mechanism[state])
            if state > 0 and owner >= 0 and self.chain.phase[state] in phases and mechanisms[owner].name in owners:
                begins = max(begin, self.clock.start)
                number = int(self.rng.poisson(per_day * max(end - begins, 0) / DAY))
                errors += [(slot, int(self.rng.integers(begins, end))) for _ in range(number)]
        return errors

    def recoverable(self, chronic_sbe: set[tuple[int, int]]) -> None:
        """Write recoverable errors: NVLink episodes, masked memory errors and error bursts."""
        noise, model = self.noise, self.parameters.fleet.models[self.node.model]
        weak, strong, memory = (Phase.WEAK, Phase.MILD), (Phase.ADVANCED,), ("hbm", "sram")
        masked = self.times(model.masked_ue_rate * self.rate)
        masked += self.in_state(weak + strong, memory, noise.masked_ue_per_day)
        for slot, time in masked:
            device = self.device_at(slot, time)
            if device is not None:
                self.xid(time, device, 94)
                self.xid(time + 1000, device, 63)
                self.out.counter_events.append((*device, time, CounterEvent.UNCORRECTED, 1))
                self.out.counter_events.append((*device, time + 1000, CounterEvent.REMAPPED, 1))
        bursts = self.in_state(weak + strong, memory, noise.burst_xid_per_day)
        for slot, installation in sorted(chronic_sbe):
            number = int(self.rng.poisson(noise.chronic_burst_per_day * self.clock.days))
            for time in self.rng.integers(self.clock.start, self.clock.end, number).tolist():
                if self.device_at(slot, time) == (slot, installation):
                    bursts.append((slot, time))
        for slot, time in bursts:
            device = self.device_at(slot, time)
            if device is not None:
                self.xid(time, device, 92)
                if self.rng.random() < 0.1:
                    self.out.counter_events.append((*device, time, CounterEvent.CORRECTED_REMAP, 1))
        if model.has_nvlink:
            self.link_episodes(model.nvlink_episode_rate, weak, strong)

    def link_episodes(self, per_year: float, weak: tuple[Phase, ...], strong: tuple[Phase, ...]) -> None:
        noise = self.noise
        episodes = self.times(per_year * self.rate * (1.0 - noise.nvlink_recurs))
        for slot, time in list(episodes):
            next_time = time
            while self.rng.random() < noise.nvlink_recurs:
                next_time += DAY + int(self.rng.exponential(noise.nvlink_recurrence_days) * DAY)
                episodes.append((slot, next_time))
        episodes += self.in_state(strong, ("nvlink",), noise.nvlink_episodes_per_day)
        episodes += self.in_state(weak, ("nvlink",), 0.5 * noise.nvlink_episodes_per_day)
        for slot, time in list(episodes):
            if self.node.slots > 1 and self.rng.random() < noise.nvlink_neighbour:
                episodes.append(((slot + 1) % self.node.slots, time + 2000))
        # At most one per GPU and day, none shortly before an event that would turn it into an incident when labelled.
        ends = [event.time for event in self.out.events if event.type in ("drain", "repair", "replacement", "other")]
        last: dict[tuple[int, int], int] = {}
        for slot, time in sorted(episodes, key=lambda pair: (pair[1], pair[0])):
            device = self.device_at(slot, time)
            if device is None or time >= self.clock.end or time - last.get(device, -NEVER) < DAY:
                continue
            if any(0 <= end - time < 70 * MINUTE for end in ends):
                continue
            last[device] = time
            self.xid(time, device, 74)
            self.out.counter_events.append(
                (*device, time, CounterEvent.LINK_BURST, 2000 + int(self.rng.integers(0, 20_000)))
            )


def write_records(
    node: SimulatedNode,
    lives: Lives,
    parameters: Parameters,
    chain: Chain,
    clock: SimulatedTime,
    seed: int,
    acceleration: float,
    chronic_sbe: set[tuple[int, int]],
) -> Records:
    """Write the records of a node; ``chronic_sbe``: devices with permanent corrected errors."""
    writer = _Writer(node, lives, parameters, chain, clock, seed, acceleration)
    writer.failures()
    writer.planned()
    writer.applications()
    writer.recoverable(chronic_sbe)
    out = writer.out
    out.events = [event for event in out.events if clock.start <= event.time < clock.end and event.known < clock.end]
    out.counter_events.sort()
    out.reloads = sorted(time for time in out.reloads if time < clock.end)
    return out
