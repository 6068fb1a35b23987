"""No leakage: poison everything that is not known yet, and nothing that is decided now may change."""

import tempfile
from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from features.matrix.meta import ROW_COLUMNS
from tests.features.small_fleet import (
    CHANNELS,
    HOUR,
    SMALL,
    STEP,
    T0,
    events_of,
    frame_of,
    gpus,
    inventory_of,
    make_matrix,
    samples_of,
    write_dataset,
    xid,
)

HOURS = 24
# Each example builds two matrices: shrinking a failure would take minutes and explain no more than its seeds.
RANDOM = settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


def world(seed: int):
    """A small fleet in which things break, move and change hands."""
    rng = np.random.default_rng(seed)
    rows = gpus(8)
    rows[2]["removed_at"] = T0 + float(rng.uniform(2, 20)) * HOUR
    rows.append(
        {**rows[2], "node": "node1", "slot": "8", "installed_at": rows[2]["removed_at"] + HOUR, "removed_at": None}
    )
    rows.append({**rows[0], "gpu": "gpu50", "slot": "9", "installed_at": T0 + float(rng.uniform(2, 20)) * HOUR})
    inventory = inventory_of(rows)
    events = events_of(random_events(rng, 14, 0, HOURS))
    return inventory, samples_of(inventory, HOURS, seed=seed), events


def random_events(rng: np.random.Generator, n: int, first: float, last: float) -> list[dict]:
    events = []
    for _ in range(n):
        g = int(rng.integers(8))
        event = xid(
            float(rng.uniform(first, last)), f"gpu{g:02d}", f"node{g // 4}", str(rng.choice(["79", "63", "48", "31"]))
        )
        kind = rng.choice(["xid", "xid", "xid", "repair", "failure", "driver", "diagnostic", "maintenance"])
        event |= {"type": str(kind), "detail": str(rng.choice(["passed", "failed"]))}
        if kind == "driver":
            event |= {"gpu": None, "code": str(rng.choice(["540", "550", "560"]))}
        if kind == "maintenance":
            end = event["timestamp"] + timedelta(hours=float(rng.uniform(0, 4)))
            event |= {
                "gpu": rng.choice([event["gpu"], None]),
                "code": str(rng.choice(["begin", "end", end.isoformat()])),
            }
        event["known_at"] = event["timestamp"] + timedelta(minutes=float(rng.choice([0, 10, 300])))
        events.append(event)
    return events


def poisoned(inventory, samples, events, t, seed):
    """Replace all that is not known at t: samples, events, installations and removals."""
    rng = np.random.default_rng(seed)
    known = samples["timestamp"] + SMALL.delay <= t
    later = samples_of(inventory, HOURS, seed=seed + 1, lost=0.4)
    later = later[later["timestamp"] + SMALL.delay > t]
    for channel in CHANNELS.values():
        if channel.kind in ("gauge", "counter"):
            later[channel.name] = later[channel.name] * 1000
    false_events = random_events(rng, 10, t_hours(t), HOURS) + random_events(rng, 4, 0, t_hours(t))
    for event in false_events:
        event["known_at"] = max(event["known_at"], t + timedelta(minutes=float(rng.uniform(1, 300))))
    installations = inventory[inventory["installed_at"] <= t].copy()
    unknown = installations["removed_at"].isna() | (installations["removed_at"] > t)
    ends = pd.Series(
        [t + float(rng.uniform(0.1, 9)) * HOUR if rng.random() < 0.5 else None for _ in range(len(installations))],
        index=installations.index,
        dtype="datetime64[ms, UTC]",
    )
    installations["removed_at"] = installations["removed_at"].where(~unknown, ends)
    newcomer = gpus(1)[0] | {"gpu": "gpu77", "model": "A000", "rack": "a", "driver": "100"}
    installations = pd.concat([installations, inventory_of([newcomer | {"installed_at": t + HOUR}])], ignore_index=True)
    return (
        installations.sample(frac=1, random_state=seed % 1000),
        pd.concat([samples[known], later], ignore_index=True),
        pd.concat([events[events["known_at"] <= t], events_of(false_events)], ignore_index=True),
    )


def t_hours(t) -> float:
    return (t - T0) / HOUR


def build(folder: Path, name: str, inventory, samples, events):
    dataset = write_dataset(folder / name, inventory, hours=HOURS, samples=samples, events=events)
    return make_matrix(dataset, folder / f"{name}.matrix")


def decided(frame: pd.DataFrame, t) -> pd.DataFrame:
    """Return the rows that exist by t: decided and, where augmented, asked for by then."""
    known = frame[(frame["decision_time"] <= t) & (frame["established_at"] <= t)]
    return known.reset_index(drop=True)


@RANDOM
@given(st.integers(0, 10_000), st.integers(0, 10_000), st.floats(2, 22))
def test_rows_do_not_see_what_was_not_known(seed, poison, hours):
    t = T0 + timedelta(minutes=round(hours * 60))
    with tempfile.TemporaryDirectory() as folder:
        inventory, samples, events = world(seed)
        clean = decided(frame_of(build(Path(folder), "clean", inventory, samples, events)), t)
        dirty = decided(frame_of(build(Path(folder), "dirty", *poisoned(inventory, samples, events, t, poison))), t)
    keys = list(ROW_COLUMNS)
    pd.testing.assert_frame_equal(clean[keys], dirty[keys], check_categorical=False)
    assert clean.columns.tolist() == dirty.columns.tolist()
    for name in clean.columns[len(keys) :]:
        np.testing.assert_array_equal(clean[name].to_numpy(), dirty[name].to_numpy(), err_msg=name)


@RANDOM
@given(st.integers(0, 10_000), st.integers(0, 10_000), st.floats(2, 22))
def test_labels_do_not_see_what_was_not_known(seed, poison, hours):
    t = T0 + timedelta(minutes=round(hours * 60))
    labelled = []
    with tempfile.TemporaryDirectory() as folder:
        inventory, samples, events = world(seed)
        for name, data in {
            "clean": (inventory, samples, events),
            "dirty": poisoned(inventory, samples, events, t, poison),
        }.items():
            dataset = write_dataset(Path(folder) / name, data[0], hours=HOURS, events=data[2])
            matrix = make_matrix(dataset, Path(folder) / f"{name}.matrix")
            table = pd.concat([matrix.rows, matrix.labels(as_of=t)], axis=1)
            table = table[(table["established_at"] <= t) & (table["decision_time"] <= t)]
            labelled.append(table[table["complete_at"] <= t].drop(columns="incident").reset_index(drop=True))
            incidents = matrix.incidents(as_of=t)
            labelled[-1].attrs["incidents"] = len(incidents)
    pd.testing.assert_frame_equal(labelled[0], labelled[1], check_categorical=False)
    assert labelled[0].attrs == labelled[1].attrs


def test_the_delay_is_a_border():
    """A sample counts from the instant at which it is known, not a millisecond earlier."""
    inventory = inventory_of(gpus(2))
    samples = samples_of(inventory, 6, lost=0)
    edge = samples["timestamp"] == T0 + 3 * HOUR - STEP
    with tempfile.TemporaryDirectory() as folder:
        values = []
        for number, shift in enumerate((timedelta(0), timedelta(milliseconds=1))):
            moved = samples.copy()
            moved.loc[edge, "timestamp"] += shift
            moved.loc[edge, "gpu_temp_c"] = 90.0
            dataset = write_dataset(Path(folder) / str(number), inventory, hours=6, samples=moved)
            frame = frame_of(make_matrix(dataset, Path(folder) / f"m{number}"))
            rows = frame[frame["decision_time"] == T0 + 3 * HOUR]
            values.append(rows["telemetry__gpu_temp_c__last__1h"].tolist())
    assert values[0] == [90.0, 90.0]
    assert 90.0 not in values[1]
