"""Two small fleets that are no GPUs under load, written as their operators would: disks, and GPUs without telemetry."""

from pathlib import Path

import numpy as np
import pandas as pd

START = pd.Timestamp("2015-01-01T00:00:00Z").as_unit("ms")
CAGE_RATES = np.array([0.3, 0.6, 1.5])


def instants(days: np.ndarray) -> pd.Series:
    """Return the instants of days since :data:`START`, missing where they are infinite."""
    known = np.isfinite(days)
    times = START + pd.to_timedelta((np.where(known, days, 0) * 86_400_000).astype(np.int64), unit="ms")
    return pd.Series(times.as_unit("ms")).where(known)


def write_disks(out: Path, *, devices: int, days: int, seed: int) -> None:
    """Write ``samples/``, ``events.parquet`` and ``inventory.parquet`` in the words of a disk fleet.

    A quarter of the drives fail, half of them silently; before the others fail, error counts rise for two weeks, as
    they do on some that live on. Samples come about once a day, and some makers lack some attributes.
    """
    rng = np.random.default_rng(seed)
    drive = np.arange(devices)
    serial = pd.Series(drive).map("Z{:08d}".format).to_numpy()
    failed = np.where(rng.random(devices) < 0.25, rng.uniform(14, days, devices), np.inf)
    outbreak = np.where(rng.random(devices) < 0.05, rng.uniform(0, days, devices), np.inf)
    outbreak = np.where(np.isfinite(failed) & (drive % 2 == 0), failed - 14, outbreak)
    day = np.arange(days)
    sick = (day >= outbreak[:, None]) & (day < outbreak[:, None] + 14)
    errors = np.cumsum(rng.poisson(np.where(sick, 5.0, 0.01)), axis=1)
    polled = day + 0.9 * rng.random((devices, 1)) + rng.normal(0, 0.002, (devices, days))
    row, column = np.nonzero((polled < failed[:, None]) & (polled >= 0) & (rng.random((devices, days)) > 0.02))
    when, media = polled[row, column], errors[row, column]
    samples = pd.DataFrame(
        {
            "date": instants(when),
            "serial_number": serial[row],
            "smart_1_normalized": np.round(100 - media * 0.02 + rng.normal(0, 4, len(row))),
            "smart_5_raw": media * 8,
            "smart_9_raw": np.floor(when * 24),
            "smart_187_raw": np.floor(media * 0.4),
            "smart_188_raw": np.where(row % 4, 0.0, np.nan),
            "smart_193_raw": np.floor(when * 40),
            "smart_194_raw": np.round(27 + rng.normal(0, 1.2, len(row))),
            "smart_197_raw": rng.poisson(media * 0.2),
            "smart_198_raw": np.zeros(len(row)),
            "smart_199_raw": np.where(row % 3, 0.0, np.nan),
        }
    )
    (out / "samples").mkdir(parents=True)
    samples.sort_values("date").to_parquet(out / "samples" / "part-000.parquet", index=False)
    gone = np.flatnonzero(np.isfinite(failed))
    events = {"date": instants(failed[gone]), "serial_number": serial[gone], "type": "failure", "code": "media"}
    pd.DataFrame(events).to_parquet(out / "events.parquet", index=False)
    inventory = {
        "serial_number": serial,
        "host": [f"pod-{number:03d}" for number in drive // 60],
        "model": [f"Norrland N{number:02d}" for number in drive % 7],
        "capacity_bytes": (4 + 4 * (drive % 3)) * 10**12,
        "installed": instants(-rng.uniform(1, 2000, devices)),
        "removed": instants(failed + 1),
        "bay": [f"bay-{number:02d}" for number in drive % 60],
    }
    pd.DataFrame(inventory).to_parquet(out / "inventory.parquet", index=False)


def write_lifetimes(out: Path, *, slots: int, years: int, seed: int) -> None:
    """Write ``events.csv`` and ``inventory.csv`` of GPUs that fail by place, by frailty, and again after a failure."""
    rng = np.random.default_rng(seed)
    end, installations, failures = years * 365, [], []
    for slot in range(slots):
        since = -rng.uniform(300, 500)
        while since < end:
            yearly = CAGE_RATES[(slot // 32) % 3] * rng.gamma(1.0, 0.5)
            device, failed_at, removed = f"{10**9 + len(installations)}", max(since, 0.0), np.inf
            while (failed_at := failed_at + rng.exponential(365 / yearly)) < end and removed == np.inf:
                failures.append((failed_at, slot, device))
                yearly += 1.2
                removed = failed_at + rng.lognormal(0.7, 1.0) if rng.random() < 0.6 else np.inf
            installations.append((device, slot, since, removed if removed < end else np.inf))
            since = removed + rng.lognormal(0.4, 1.0)
    device, at_slot, since, removed = (np.array(column) for column in zip(*installations, strict=True))
    inventory = pd.DataFrame({"gpu": device, "node": node_names(at_slot), "slot": "gpu0"}).assign(
        rack=[f"cab-{slot // 96}" for slot in at_slot],
        cage=(at_slot // 32) % 3,
        blade=(at_slot // 4) % 8,
        position=at_slot % 4,
        column=(at_slot // 96) % 25,
        installed_at=instants(since),
        removed_at=instants(removed),
    )
    when, at_slot, device = (np.array(column) for column in zip(*sorted(failures), strict=True))
    events = pd.DataFrame({"timestamp": instants(when), "node": node_names(at_slot), "gpu": device, "type": "failure"})
    out.mkdir(parents=True)
    inventory.to_csv(out / "inventory.csv", index=False)
    events.assign(code="DBE").to_csv(out / "events.csv", index=False)


def node_names(slots: np.ndarray) -> list[str]:
    """Name each slot's node by cabinet, cage, blade and node."""
    return [f"c{slot // 96}-{(slot // 32) % 3}s{(slot // 4) % 8}n{slot % 4}" for slot in slots]
