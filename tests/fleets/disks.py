"""A fleet of disks that fail as published disk fleets do: made for tests and benchmarks, at full size if asked.

    python -m tests.fleets.disks --out FOLDER --devices 87000 --days 365 --seed 1

Writes ``samples/*.parquet`` (or ``.csv``), ``events.parquet`` and ``inventory.parquet`` in the words of a disk fleet
(``serial_number``, ``smart_5_raw``); ``params/disks-mapping.yaml`` says how they become ours. What decided the
failures (onsets, kinds, bad vintages) is written nowhere.

Rates are those that operators of such fleets publish: 1 to 2 % of the drives fail a year, a few models 5 to 10 %, about
half of the failures after their error counters rose for days or weeks; most drives whose counters rise live on.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

START = pd.Timestamp("2025-01-01T00:00:00Z")
DAY_MS = 86_400_000
BAYS = 60
CHUNK = 4096
MODELS = 40

CHANNELS = (
    "smart_1_normalized",
    "smart_5_raw",
    "smart_9_raw",
    "smart_187_raw",
    "smart_188_raw",
    "smart_193_raw",
    "smart_194_raw",
    "smart_197_raw",
    "smart_198_raw",
    "smart_199_raw",
)
_MISSING = ((), (3, 4), (0, 3, 4, 5), (4, 5, 9))
"""Positions in CHANNELS that the drives of each of four makers do not report."""

NONE, MEDIA, LINK, HEAT, LATE = range(5)
_KINDS = (0.46, 0.30, 0.08, 0.05, 0.11)
_CODES = ("no_spin", "media", "interface", "mechanical", "media")


@dataclass(frozen=True, slots=True)
class Drives:
    """One entry a drive; days count from :data:`START` and may be negative or infinite."""

    model: np.ndarray
    slot: np.ndarray
    installed: np.ndarray
    failed: np.ndarray
    removed: np.ndarray
    kind: np.ndarray
    onset: np.ndarray
    episode: np.ndarray
    """Day of an outbreak of errors that the drive survives."""
    doomed: np.ndarray
    """Day on which the drive fails, or would have failed had it not been pulled before."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What the models of drives are like."""

    name: list[str]
    maker: np.ndarray
    share: np.ndarray
    yearly: np.ndarray
    worsening: np.ndarray
    """Factor on the failure rate from the first to the last day."""
    capacity: np.ndarray
    slow_poll: np.ndarray


def make_catalogue(rng: np.random.Generator) -> Catalogue:
    """Draw the models: shares by rank, failure rates log-normal about 1.2 % a year, three of them bad."""
    share = 1 / np.arange(1, MODELS + 1) ** 0.9
    maker = rng.permutation(np.arange(MODELS) % len(_MISSING))
    yearly = np.clip(rng.lognormal(np.log(0.008), 0.5, MODELS), 0.003, 0.03)
    bad = rng.choice(np.arange(2, 20), 3, replace=False)
    yearly[bad] = rng.uniform(0.05, 0.10, 3)
    worsening = np.where(np.isin(np.arange(MODELS), rng.choice(MODELS, 6, replace=False)), 4.0, 1.0)
    capacity = rng.choice([4, 8, 12, 14, 16, 20], MODELS) * 10**12
    makers = ("Norrland", "Halden Storage", "Tiber", "Kestrel Data")
    name = [f"{makers[maker[i]]} {'HCST'[maker[i]]}{int(capacity[i] // 10**12):02d}T{100 + i}" for i in range(MODELS)]
    return Catalogue(name, maker, share / share.sum(), yearly, worsening, capacity, rng.random(MODELS) < 0.1)


def _ageing(age: np.ndarray) -> np.ndarray:
    """Give the factor of the bathtub: weak drives go in the first quarter, wear sets in after four years."""
    return 1.0 + 1.5 * np.exp(-np.maximum(age, 0) / 60.0) + np.maximum(age - 1460.0, 0) / 500.0


def _fates(
    rng: np.random.Generator,
    catalogue: Catalogue,
    model: np.ndarray,
    slot: np.ndarray,
    installed: np.ndarray,
    days: int,
) -> Drives:
    n = len(model)
    episode = np.where(rng.random(n) < 0.06 * days / 365, rng.uniform(0, days, n), np.inf)
    warmth = 1.0 + 0.5 * ((slot // BAYS) % 7 == 0)
    failed = np.full(n, np.inf)
    day = np.arange(days, dtype=np.float64)
    for a in range(0, n, CHUNK):
        part = slice(a, min(a + CHUNK, n))
        m = model[part]
        age = day[None, :] - installed[part, None]
        rate = (catalogue.yearly[m] / 365 * warmth[part])[:, None] * _ageing(age)
        rate *= 1.0 + (catalogue.worsening[m][:, None] - 1.0) * (day / days)[None, :]
        rate *= np.where(day[None, :] > episode[part, None], 3.0, 1.0)
        rate[age < 0] = 0.0
        total = np.cumsum(rate, axis=1)
        target = rng.exponential(1.0, len(m))
        at = (total < target[:, None]).sum(axis=1)
        failed[part] = np.where(at < days, at + rng.random(len(m)), np.inf)
    kind = np.where(np.isfinite(failed), rng.choice(5, n, p=_KINDS), NONE)
    length = np.clip(rng.lognormal(np.log(16.0), 0.9, n), 2.0, 120.0)
    silent = np.where(kind == NONE, 0.0, failed)
    onset = np.where(kind == NONE, np.inf, silent - np.where(kind == LATE, np.minimum(length / 6, 3.0), length))
    pulled = np.where(rng.random(n) < 0.12, episode + rng.uniform(4, 20, n), np.inf)
    retired = np.where(rng.random(n) < 0.012 * days / 365, rng.uniform(0, days, n), np.inf)
    leaves = np.minimum(pulled, retired)
    leaves = np.where(leaves > installed + 1, leaves, np.inf)
    doomed = failed
    failed = np.where(doomed < leaves, doomed, np.inf)
    removed = np.where(np.isfinite(failed), failed + rng.lognormal(np.log(0.7), 0.8, n), leaves)
    return Drives(
        model, slot, installed, failed, np.where(removed < days, removed, np.inf), kind, onset, episode, doomed
    )


def make_drives(devices: int, days: int, seed: int, acceleration: float = 1.0) -> tuple[Catalogue, Drives]:
    """Draw every drive that is ever in service, replacements of failed ones among them."""
    rng = np.random.default_rng([seed, 1])
    catalogue = make_catalogue(rng)
    catalogue.yearly[:] *= acceleration
    first = int(devices * 0.955)
    slot = np.arange(first)
    pods = -(-first // BAYS)
    # A pod is filled at once, with one or two models; a fifth of the pods come during the year.
    opened = np.where(rng.random(pods) < 0.2, rng.uniform(0, days, pods), -rng.uniform(1, 2000, pods))
    pair = rng.choice(MODELS, (pods, 2), p=catalogue.share)
    model = pair[slot // BAYS, (rng.random(first) < 0.25).astype(int)]
    lives = _fates(rng, catalogue, model, slot, opened[slot // BAYS] + rng.uniform(0, 0.3, first), days)
    gone = np.flatnonzero(np.isfinite(lives.removed))
    gone = gone[np.argsort(lives.removed[gone])][: devices - first]
    spare = devices - first - len(gone)
    place = np.concatenate([lives.slot[gone], first + np.arange(spare)])
    since = np.concatenate([lives.removed[gone] + rng.lognormal(0.5, 0.7, len(gone)), rng.uniform(0, days, spare)])
    newer = np.where(rng.random(len(place)) < 0.5, rng.choice(MODELS, len(place), p=catalogue.share), -1)
    old = np.concatenate([lives.model[gone], rng.choice(MODELS, spare, p=catalogue.share)])
    more = _fates(rng, catalogue, np.where(newer >= 0, newer, old), place, since, days)
    names = Drives.__dataclass_fields__
    return catalogue, Drives(**{each: np.concatenate([getattr(lives, each), getattr(more, each)]) for each in names})


def serials(count: int, seed: int) -> np.ndarray:
    """Give each drive a serial number that says nothing."""
    codes = pd.unique(np.random.default_rng([seed, 2]).integers(0, 2**31, 2 * count))[:count]
    return np.array([f"Z{code:010d}" for code in codes])


def _counts(rng: np.random.Generator, drives: Drives, part: slice, days: int, pick: tuple[int, ...]) -> np.ndarray:
    """Draw each drive's new errors on each day: of failing ones towards their end, of survivors in one outbreak."""
    day = np.arange(days, dtype=np.float64)[None, :]
    fails = np.isin(drives.kind[part], pick)
    n = len(fails)
    drawn = np.zeros((n, days), dtype=np.float64)
    at = np.flatnonzero(fails)
    if len(at):
        failed, onset = drives.doomed[part][at, None], drives.onset[part][at, None]
        strength = rng.lognormal(np.log(8.0), 1.3, len(at))[:, None]
        tau = np.maximum((failed - onset) / 3, 0.5)
        rate = strength * np.exp(-np.maximum(failed - day, 0) / tau) * (day >= np.floor(onset)) * (day <= failed)
        drawn[at] += rng.poisson(rate)
    at = np.flatnonzero(np.isfinite(drives.episode[part]))
    if len(at) and MEDIA in pick:
        begin = drives.episode[part][at, None]
        size = rng.lognormal(np.log(3.0), 1.4, len(at))[:, None]
        rate = size * np.exp(-np.maximum(day - begin, 0) / rng.uniform(1, 12, len(at))[:, None])
        drawn[at] += rng.poisson(np.where(day >= np.floor(begin), rate, 0.0))
    return drawn


def _chunk(drives: Drives, catalogue: Catalogue, part: slice, days: int, rng: np.random.Generator) -> dict[str, Any]:
    """Draw all samples of some drives: which drive, when (ms since START), and every channel."""
    model, slot = drives.model[part], drives.slot[part]
    n = len(model)
    day = np.arange(days)
    media = _counts(rng, drives, part, days, (MEDIA, LATE))
    link = _counts(rng, drives, part, days, (LINK,))
    link += rng.poisson(0.02, (n, days)) * (rng.random(n) < 0.05)[:, None]  # a bad cable
    pod = slot // BAYS
    polled = (np.random.default_rng([7, 0]).random(int(pod.max()) + 1) * 0.9)[pod]
    at = day[None, :] + polled[:, None] + rng.normal(0, 0.002, (n, days))
    keep = rng.random((n, days)) > 0.02
    keep &= ~((pod[:, None] * 7919 + day[None, :] * 104729) % 331 == 0)  # the whole pod's poller was away
    keep &= ~(catalogue.slow_poll[model][:, None] & ((day[None, :] + slot[:, None]) % 3 != 0))
    end = np.minimum(np.minimum(drives.failed[part], drives.removed[part]), days)[:, None]
    begin = drives.installed[part][:, None]
    keep &= (at >= begin) & (at < end) & (at >= 0)
    row, col = np.nonzero(keep)
    before = np.cumsum(media, axis=1) - media  # what had happened by the day's poll
    link_before = np.cumsum(link, axis=1) - link
    grown = (media > 0) & (rng.random((n, days)) < 0.5)  # and half of the changes are reported as they happen
    late = np.floor(at) + polled[:, None] + (1 - polled[:, None]) * rng.uniform(0.1, 0.95, (n, days))
    grown &= (late >= begin) & (late < end) & (late < days)
    extra_row, extra_col = np.nonzero(grown)
    r = np.concatenate([row, extra_row])
    when = np.concatenate([at[row, col], late[extra_row, extra_col]])
    errors = np.concatenate([before[row, col], (before + media)[extra_row, extra_col]])
    links = np.concatenate([link_before[row, col], (link_before + link)[extra_row, extra_col]])
    start = rng.poisson(0.15, n) * rng.integers(1, 30, n)  # what it had when it was first seen
    share = rng.beta(4, 3, n)
    pending = np.floor(errors * (1 - 0.9 * share[r]))
    calm = np.clip(1.0 - (when - drives.episode[part][r]) / 60, 0, 1)
    pending = np.where(when > drives.episode[part][r], np.floor(pending * calm), pending)
    age = when - drives.installed[part][r]
    heat = np.where(drives.kind[part][r] == HEAT, np.clip(when - drives.onset[part][r], 0, 20) * 0.4, 0.0)
    season = 2.0 * np.sin(2 * np.pi * when / 365)
    temp = 27 + 3 * (pod[r] % 7 == 0) + (model[r] % 5) + season + heat + rng.normal(0, 1.2, len(r))
    number = np.empty((len(CHANNELS), len(r)), dtype=np.float64)
    number[0] = np.round(np.clip(100 - errors * 0.02 - heat * 2 + rng.normal(0, 4, len(r)), 1, 200))
    number[1] = start[r] + np.floor(errors * share[r]) * 8
    number[2] = np.floor(age * 24)
    number[3] = np.floor(errors * 0.4)
    number[4] = links * 65537  # packed, as some makers do
    number[5] = np.floor(age * (20 + 30 * (slot[r] % 11)))
    number[6] = np.round(temp)
    number[7] = pending * 8
    number[8] = np.floor(pending * 0.7) * 8
    number[9] = links
    for maker, missing in enumerate(_MISSING):
        number[np.ix_(missing, np.flatnonzero(catalogue.maker[model[r]] == maker))] = np.nan
    return {"drive": r + part.start, "ms": (when * DAY_MS).astype(np.int64), "number": number}


def write_disks(
    out: Path,
    *,
    devices: int,
    days: int,
    seed: int,
    form: str = "parquet",
    hosts: bool = True,
    acceleration: float = 1.0,
) -> dict[str, int]:
    """Write a fleet of disks.

    ``hosts``: whether the inventory says which host a drive sits in; if not, each drive is a node of its own.
    ``acceleration``: factor on all failure rates, for small fleets that are to see some failures.
    """
    catalogue, drives = make_drives(devices, days, seed, acceleration)
    seen = drives.installed < days
    serial = serials(devices, seed)
    (out / "samples").mkdir(parents=True, exist_ok=True)
    rows = 0
    for number, a in enumerate(range(0, devices, CHUNK)):
        part = slice(a, min(a + CHUNK, devices))
        drawn = _chunk(drives, catalogue, part, days, np.random.default_rng([seed, 3, number]))
        order = np.argsort(drawn["ms"], kind="stable")  # as a collector would have written it: by time
        rows += len(order)
        stamps = drawn["ms"][order] + START.value // 10**6
        named = pa.DictionaryArray.from_arrays(
            pa.array((drawn["drive"][order] - a).astype(np.int32)), pa.array(serial[part])
        )
        columns = {"date": pa.array(stamps, pa.timestamp("ms", "UTC")), "serial_number": named.cast(pa.string())}
        for place, channel in enumerate(CHANNELS):
            values = drawn["number"][place][order]
            absent = np.isnan(values)
            columns[channel] = pa.array(np.where(absent, 0, values).astype(np.int64), mask=absent)
        if form == "csv":
            pa_csv.write_csv(pa.table(columns), out / "samples" / f"part-{number:03d}.csv")
        else:
            pq.write_table(pa.table(columns), out / "samples" / f"part-{number:03d}.parquet", compression="zstd")
    _events(drives, serial).to_parquet(out / "events.parquet", index=False)
    _inventory(drives, catalogue, serial, days, hosts)[seen].to_parquet(out / "inventory.parquet", index=False)
    return {"drives": int(seen.sum()), "samples": rows, "failures": int(np.isfinite(drives.failed).sum())}


def _stamp(day: np.ndarray) -> pd.DatetimeIndex:
    ms = np.where(np.isfinite(day), day, 0) * DAY_MS
    stamps = pd.DatetimeIndex(START.as_unit("ms") + pd.to_timedelta(ms.astype(np.int64), unit="ms"))
    return stamps.where(np.isfinite(day))


def _events(drives: Drives, serial: np.ndarray) -> pd.DataFrame:
    at = np.flatnonzero(np.isfinite(drives.failed))
    at = at[np.argsort(drives.failed[at])]
    codes = np.array(_CODES, dtype=object)[drives.kind[at]]
    return pd.DataFrame(
        {"date": _stamp(drives.failed[at]), "serial_number": serial[at], "type": "failure", "code": codes}
    )


def _inventory(drives: Drives, catalogue: Catalogue, serial: np.ndarray, days: int, hosts: bool) -> pd.DataFrame:
    host = np.array([f"pod-{pod:04d}" for pod in drives.slot // BAYS]) if hosts else serial
    content: dict[str, Any] = {
        "serial_number": serial,
        "host": host,
        "model": np.array(catalogue.name, dtype=object)[drives.model],
        "capacity_bytes": catalogue.capacity[drives.model],
        "installed": _stamp(drives.installed),
        "removed": _stamp(drives.removed),
    }
    if hosts:
        content["bay"] = [f"bay-{bay:02d}" for bay in drives.slot % BAYS]
    return pd.DataFrame(content)


def main() -> None:
    """Write a fleet of disks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=87_000)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--form", choices=("parquet", "csv"), default="parquet")
    parser.add_argument("--no-hosts", action="store_true")
    args = parser.parse_args()
    counts = write_disks(
        args.out, devices=args.devices, days=args.days, seed=args.seed, form=args.form, hosts=not args.no_hosts
    )
    print(counts)


if __name__ == "__main__":
    main()
