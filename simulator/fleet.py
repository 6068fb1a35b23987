"""Initial fleet: racks, nodes with their static traits, and planned changes."""

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simulator.parameters import Parameters
from simulator.randomness import Purpose, generator, low_discrepancy

HOUR: Final = 3_600_000
"""One hour in milliseconds."""
DAY: Final = 86_400_000
"""One day in milliseconds."""
NEVER: Final = 2**61
"""Time in milliseconds of events that do not happen."""

_PCI_BUSES = ("07", "0f", "47", "4e", "87", "90", "b7", "bd")
_DRIVERS = ("550.54.15", "550.127.08", "570.124.06", "570.172.08", "580.65.06", "580.95.05")


@dataclass(frozen=True, slots=True)
class SimulatedTime:
    """Simulated time span; all instants in int64 milliseconds since the epoch."""

    start: int  # First sample, at 00:00 UTC
    days: int
    step: int  # Sample interval
    warm_up_days: int  # Simulated before ``start``

    @property
    def end(self) -> int:
        """End of the simulated time (exclusive)."""
        return self.start + self.days * DAY

    @property
    def origin(self) -> int:
        """Start of the warm-up."""
        return self.start - self.warm_up_days * DAY

    @property
    def steps(self) -> int:
        """Number of sample times."""
        return self.days * DAY // self.step

    def at_share(self, share: float) -> int:
        """Return the instant at a share of the simulated time."""
        return self.start + round(share * self.days * DAY)


@dataclass(frozen=True, slots=True)
class SimulatedNode:
    """A node; rows of ``plan`` are planned GPU changes: slot, time, and installation time of the next GPU."""

    index: int
    name: str
    rack: str
    height: int
    stressed: bool
    position_factor: float
    model: int
    slots: int
    installed: int
    bad: NDArray[np.bool_]
    lot: int
    spare: bool
    flaky: bool
    mig: bool
    upgrades: tuple[int, ...]
    drains: NDArray[np.int64]
    plan: NDArray[np.int64]


def driver_at(number: int) -> str:
    """Return the driver version after ``number`` upgrades."""
    return _DRIVERS[min(number, len(_DRIVERS) - 1)]


def bus_id(slot: int) -> str:
    """Return the normalized PCI address of a slot (domain, bus, device, function)."""
    return f"0000:{_PCI_BUSES[slot % len(_PCI_BUSES)]}:00.0"


def gpu_name(seed: int, node: int, slot: int, installation: int) -> str:
    """Return a device's UUID, a hash whose order is independent of place and time."""
    digest = hashlib.blake2b(f"{seed}/{node}/{slot}/{installation}".encode(), digest_size=16).hexdigest()
    return f"GPU-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:]}"


def serial_number(name: str, lot: int) -> str:
    """Return a serial number with the production lot as prefix, as board makers print it."""
    return f"{1600 + lot}{int(name[4:12], 16) % 10**9:09d}"


def build_fleet(parameters: Parameters, clock: SimulatedTime, *, gpus: int, seed: int) -> list[SimulatedNode]:
    """Build the nodes in order of index; a node's traits depend only on the seed and its index."""
    per_node = parameters.fleet.gpus_per_node
    count = -(-gpus // per_node)
    return [_node(parameters, clock, seed, index, min(per_node, gpus - index * per_node)) for index in range(count)]


def _node(parameters: Parameters, clock: SimulatedTime, seed: int, index: int, slots: int) -> SimulatedNode:
    fleet, mixed, noise = parameters.fleet, parameters.heterogeneity, parameters.noise
    rack = index // fleet.nodes_per_rack
    height = 3 * (index % fleet.nodes_per_rack) // fleet.nodes_per_rack
    stressed = low_discrepancy(rack, seed, 0) < mixed.stressed_share
    mixed_delivery = low_discrepancy(index, seed, 1) < mixed.bad_share / mixed.bad_slots
    rng = generator(seed, index, Purpose.TRAITS)
    low, high = fleet.age_days
    age = low + (high - low) * low_discrepancy(rack, seed, 2) + float(rng.uniform(0.0, 10.0))
    arrives_late, arrival = float(rng.random()), float(rng.uniform(0.05, 0.7))
    if mixed_delivery:
        age = float(rng.uniform(*fleet.bad_age_days))
    installed = clock.start - round(age * DAY)
    if not mixed_delivery and arrives_late < fleet.late_share:
        installed = clock.at_share(arrival)
    shares = np.cumsum([model.share for model in fleet.models])
    bad = (rng.random(parameters.fleet.gpus_per_node) < mixed.bad_slots) & mixed_delivery
    place = low_discrepancy(rack, seed, 3) * float(shares[-1])
    return SimulatedNode(
        index=index,
        name=f"node-{index:05d}",
        rack=f"rack-{rack:04d}",
        height=height,
        stressed=stressed,
        position_factor=mixed.position_factors[height] if stressed else 1.0,
        model=min(int(np.searchsorted(shares, place, side="right")), len(shares) - 1),
        slots=slots,
        installed=installed,
        bad=bad,
        lot=1 + int(age // 60),
        spare=low_discrepancy(index, seed, 4) < fleet.spare_share,
        flaky=low_discrepancy(index, seed, 5) < noise.flaky_share,
        mig=low_discrepancy(index, seed, 6) < noise.mig_share,
        upgrades=_upgrades(parameters, clock, float(rng.random())),
        drains=_drains(parameters, clock, seed, index),
        plan=_plan(parameters, clock, seed, index, slots),
    )


def _upgrades(parameters: Parameters, clock: SimulatedTime, place: float) -> tuple[int, ...]:
    fleet = parameters.fleet
    begins = clock.at_share(fleet.upgrade_first)
    times = []
    while begins < clock.end:
        times.append(begins + round(place * fleet.upgrade_days * DAY))
        begins += round(fleet.upgrade_every_days * DAY)
    return tuple(time for time in times if time < clock.end)


def _drains(parameters: Parameters, clock: SimulatedTime, seed: int, index: int) -> NDArray[np.int64]:
    """Return planned drains of a node, shape (n, 2): start and end, by start."""
    rng = generator(seed, index, Purpose.PLAN)
    number = rng.poisson(parameters.fleet.drain_rate_per_month * clock.days / 30.4)
    begins = np.sort(rng.integers(clock.start, clock.end, number))
    low, high = parameters.fleet.drain_hours
    lengths = (rng.uniform(low, high, number) * HOUR).astype(np.int64)
    return np.column_stack([begins, begins + lengths]).astype(np.int64)


def _plan(parameters: Parameters, clock: SimulatedTime, seed: int, index: int, slots: int) -> NDArray[np.int64]:
    """Return planned replacements and removals, shape (n, 3): slot, time, time of the next GPU; by slot and time."""
    fleet = parameters.fleet
    rng = generator(seed, index, Purpose.EXCHANGES)
    years = clock.days / 365.25
    rows: list[tuple[int, int, int]] = []
    for slot in range(slots):
        for _ in range(int(rng.poisson(fleet.swap_rate * years))):
            time = int(rng.integers(clock.start, clock.end))
            rows.append((slot, time, time + int(rng.uniform(0.5, 6.0) * HOUR)))
    replaced = clock.start + int(rng.exponential(365.25 / fleet.node_replaced_rate) * DAY)
    reinstalled = replaced + int(rng.uniform(0.5, 3.0) * DAY)
    leaves = clock.start + int(rng.exponential(365.25 / fleet.node_leaves_rate) * DAY)
    if replaced < clock.end:
        rows += [(slot, replaced, reinstalled) for slot in range(slots)]
    if leaves < clock.end:
        rows = [row for row in rows if row[1] < leaves] + [(slot, leaves, NEVER) for slot in range(slots)]
    return np.asarray(sorted(rows), dtype=np.int64).reshape(-1, 3)
