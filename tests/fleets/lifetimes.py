"""GPUs with lifetimes, places and failures but no telemetry, as a published decade-old machine had them.

    python -m tests.fleets.lifetimes --out FOLDER --devices 30000 --years 6 --seed 1

Writes ``events.csv`` and ``inventory.csv`` (``--form parquet`` as well) in our own words. The fleet's first devices are
of a bad batch that fails more with every calendar year, more in the upper cages and in some cabinets more than in
others; from the fourth year on sound ones replace them, some at failure and many as planned. Which batch a device is
of, and how frail it is, is written nowhere.

Rates are those measured on Titan (18,688 K20X; events per GPU-year of the old batch by year 0.0035, 0.020, 0.147,
0.139, 0.133, 0.191; new batch 0.0025; bottom, middle and top cage 0.034, 0.071, 0.114).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

START = pd.Timestamp("2014-01-01T00:00:00Z")
DAY_MS = 86_400_000

OLD_BY_YEAR = (0.0035, 0.020, 0.147, 0.139, 0.133, 0.191)
NEW_YEARLY = 0.0025
CAGE = np.array([0.47, 0.97, 1.56])
SLOTS_A_DEVICE = 18_688 / 30_207
"""Titan had 30,207 devices in 18,688 slots."""

AGAIN_DAYS = 120.0
_MEMORY, _BUS = "DBE", "OFF_THE_BUS"


@dataclass(slots=True)
class _Log:
    when: list[np.ndarray] = field(default_factory=list)
    device: list[np.ndarray] = field(default_factory=list)
    slot: list[np.ndarray] = field(default_factory=list)
    code: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Stays (one entry a stay: device, slot, from, to) and events (one entry an event); days since :data:`START`."""

    device: np.ndarray
    slot: np.ndarray
    installed: np.ndarray
    removed: np.ndarray
    event_day: np.ndarray
    event_device: np.ndarray
    event_slot: np.ndarray
    event_code: np.ndarray


def _old_rate(day: float) -> float:
    """Give the bad batch's failures a GPU-year on a day, with a soft change from year to year."""
    middle = (np.arange(len(OLD_BY_YEAR)) + 0.5) * 365.25
    return float(np.interp(day, middle, OLD_BY_YEAR))


def make_lifetimes(devices: int, years: int, seed: int) -> Lifetimes:
    """Live through the years, a day at a time, all slots at once."""
    rng = np.random.default_rng([seed, 11])
    slots, days = round(devices * SLOTS_A_DEVICE), round(years * 365.25)
    cage = (np.arange(slots) // 32) % 3
    cabinet = np.arange(slots) // 96
    cabinets = int(cabinet[-1]) + 1
    stress = (rng.gamma(3.0, 1 / 3.0, cabinets))[cabinet]  # cooling and power differ from cabinet to cabinet
    device = np.arange(slots)
    old = np.ones(slots, dtype=bool)
    frail = rng.gamma(1.0, 1.0, slots)
    since = -rng.uniform(300, 500, cabinets)[cabinet]
    last_failed = np.full(slots, -np.inf)
    leaves = np.full(slots, np.inf)  # when a condemned device goes
    empty_until = np.full(slots, -np.inf)
    # Whole cabinets are renewed as planned in the fourth year, about 6,500 of 18,688 slots.
    planned = np.where(rng.random(cabinets) < 0.35, rng.uniform(3.0, 3.8, cabinets) * 365.25, np.inf)[cabinet]
    following, log = slots, _Log()
    stays: list[tuple[np.ndarray, ...]] = []
    for day in range(days):
        inside = empty_until <= day
        # Failed devices that were condemned, and planned renewals, leave; a spare comes within days.
        goes = inside & ((leaves <= day) | ((planned <= day) & old))
        if goes.any():
            at = np.flatnonzero(goes)
            out = np.where(leaves[at] <= day, leaves[at], day + rng.random(len(at)) * 0.5)
            stays.append((device[at], at, since[at], out))
            back = out + rng.lognormal(np.log(1.5), 1.0, len(at))
            used = rng.random(len(at)) < max(0.0, 0.8 - day / 1461)  # spares are of the bad batch too, at first
            device[at] = following + np.arange(len(at))
            following += len(at)
            old[at], frail[at] = used, np.where(used, rng.gamma(1.0, 1.0, len(at)), 1.0)
            since[at], empty_until[at] = back, np.ceil(back)
            last_failed[at], leaves[at], planned[at] = -np.inf, np.inf, np.inf
            inside &= ~goes
        yearly = np.where(old, _old_rate(day) * CAGE[cage] * stress * frail, NEW_YEARLY)
        again = np.where(day - last_failed < AGAIN_DAYS, 1.2, 0.0)  # a device that failed and stayed fails again
        fails = inside & ~np.isfinite(leaves) & (rng.random(slots) < (yearly + again) / 365.25)
        at = np.flatnonzero(fails)
        if len(at):
            when = np.maximum(day + rng.random(len(at)), since[at] + 0.01)
            log.when.append(when)
            log.device.append(device[at].copy())
            log.slot.append(at)
            log.code.append(np.where(rng.random(len(at)) < 0.72, _MEMORY, _BUS))
            last_failed[at] = when
            condemned = rng.random(len(at)) < 0.75
            leaves[at] = np.where(condemned, when + rng.lognormal(np.log(2.0), 1.0, len(at)), np.inf)
    at = np.flatnonzero(since < days)
    stays.append((device[at], at, since[at], np.full(len(at), np.inf)))
    whole = [np.concatenate(parts) for parts in zip(*stays, strict=True)]
    none = (np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, "U16"))
    logged = (log.when, log.device, log.slot, log.code)
    events = [np.concatenate([start, *parts]) for start, parts in zip(none, logged, strict=True)]
    order = np.argsort(events[0], kind="stable")
    gone = np.where(whole[3] < days, whole[3], np.inf)
    begun = whole[2] < days
    return Lifetimes(whole[0][begun], whole[1][begun], whole[2][begun], gone[begun], *(e[order] for e in events))


def write_lifetimes(out: Path, *, devices: int, years: int, seed: int, form: str = "csv") -> dict[str, int]:
    """Write a fleet of lifetimes."""
    lives = make_lifetimes(devices, years, seed)
    count = int(lives.device.max()) + 1
    serial = pd.unique(np.random.default_rng([seed, 12]).integers(10**11, 10**12, 2 * count))[:count].astype(str)
    slot = lives.slot
    place = {
        "node": node_names(slot),
        "slot": np.full(len(slot), "gpu0"),
        "rack": np.char.add("cab-", (slot // 96).astype(str)),
        "cage": (slot // 32) % 3,
        "blade": (slot // 4) % 8,
        "column": (slot // 96) % 25,
    }
    inventory = pd.DataFrame(
        {
            "gpu": serial[lives.device],
            **place,
            "installed_at": _stamps(lives.installed),
            "removed_at": _stamps(lives.removed),
        }
    ).sort_values(["node", "installed_at"], ignore_index=True)
    events = pd.DataFrame(
        {
            "timestamp": _stamps(lives.event_day),
            "node": node_names(lives.event_slot),
            "gpu": serial[lives.event_device],
            "type": "failure",
            "code": lives.event_code,
        }
    )
    out.mkdir(parents=True, exist_ok=True)
    for name, frame in (("inventory", inventory), ("events", events)):
        if form == "csv":
            frame.to_csv(out / f"{name}.csv", index=False)
        else:
            frame.to_parquet(out / f"{name}.parquet", index=False)
    return {"devices": len(np.unique(lives.device)), "stays": len(inventory), "failures": len(events)}


def node_names(slot: np.ndarray) -> np.ndarray:
    """Name each slot's node by cabinet, cage, blade and node, as such machines do."""
    parts = ("c", slot // 96, "-", (slot // 32) % 3, "s", (slot // 4) % 8, "n", slot % 4)
    text = np.full(len(slot), "", dtype="U24")
    for part in parts:
        text = np.char.add(text, part if isinstance(part, str) else part.astype(str))
    return text


def _stamps(day: np.ndarray) -> pd.DatetimeIndex:
    ms = (np.where(np.isfinite(day), day, 0) * DAY_MS).astype(np.int64)
    stamps = pd.DatetimeIndex(START.as_unit("ms") + pd.to_timedelta(ms, unit="ms"))
    return stamps.where(np.isfinite(day))


def main() -> None:
    """Write a fleet of lifetimes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=30_000)
    parser.add_argument("--years", type=int, default=6, choices=range(1, 7))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--form", choices=("csv", "parquet"), default="csv")
    args = parser.parse_args()
    print(write_lifetimes(args.out, devices=args.devices, years=args.years, seed=args.seed, form=args.form))


if __name__ == "__main__":
    main()
