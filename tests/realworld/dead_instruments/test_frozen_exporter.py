"""A history with a GPU that fell off the bus: what the dataset holds of its frozen samples, however it was imported."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from telemetry.dataset.channels import CATALOGUE
from telemetry.dataset.store import Dataset
from telemetry.importing.importer import import_dataset
from telemetry.importing.samples.instruments import FROZEN, STATE_NAME
from telemetry.importing.samples.rollup import IMPOSSIBLE_RISE, STALE

START = pd.Timestamp("2026-01-01", tz="UTC")
NOW = datetime(2026, 6, 1, tzinfo=UTC)
GWDG = Path("../shared/data/gwdg/dcgm_wide.parquet")
EXPORTED = {
    "GPU_TEMP": "gpu_temp_c", "MEMORY_TEMP": "mem_temp_c", "POWER_USAGE": "power_w", "GPU_UTIL": "gpu_util_pct",
    "FB_USED": "fb_used_mib", "FB_FREE": "fb_free_mib", "PCIE_REPLAY_COUNTER": "pcie_replay_total",
    "TOTAL_ENERGY_CONSUMPTION": "energy_mj", "CORRECTABLE_REMAPPED_ROWS": "row_remap_correctable_total",
    "UNCORRECTABLE_REMAPPED_ROWS": "row_remap_uncorrectable_total", "XID_ERRORS": "xid_last",
}  # fmt: skip


def arrow(frame: pd.DataFrame) -> pa.Table:
    times = frame["timestamp"].dt.tz_convert(None).to_numpy().astype("datetime64[ms]")
    columns = {
        name: pa.array(frame[name].to_numpy(), from_pandas=True) for name in frame.columns if name != "timestamp"
    }
    return pa.table({"timestamp": pa.array(times).cast(pa.timestamp("ms", "UTC")), **columns})


def load(folder: Path, frames: list[pd.DataFrame], *, step: str = "10min") -> Dataset:
    """Import the frames one after the other into one dataset."""
    gpus = pd.concat(frames)[["gpu", "node"]].drop_duplicates()
    folder.mkdir(parents=True, exist_ok=True)
    inventory = folder / "inventory.csv"
    gpus.assign(installed_at=START.isoformat()).to_csv(inventory, index=False)
    for number, frame in enumerate(frames):
        path = folder / f"samples-{number}.parquet"
        pq.write_table(arrow(frame), path)
        dataset = import_dataset(
            folder / "fleet",
            inventory=inventory,
            samples=[path],
            step=pd.Timedelta(step).to_pytimedelta(),
            channels=CATALOGUE,
            dedupe=timedelta(minutes=10),
            delay=timedelta(minutes=10),
            now=NOW,
        ).dataset
    return dataset


def samples(dataset: Dataset) -> pd.DataFrame:
    runs = [dataset.read_run(bucket, run) for bucket in dataset.buckets() for run in dataset.runs_of(bucket)]
    table = pa.concat_tables(runs)
    for name in ("gpu", "node"):
        table = table.set_column(table.column_names.index(name), name, table.column(name).cast(pa.string()))
    return table.sort_by([("gpu", "ascending"), ("timestamp", "ascending")]).to_pandas()


def history(minutes: int, every_s: int) -> pd.DataFrame:
    """Two GPUs: one works, the exporter freezes over the other after a third of the time."""
    times = pd.date_range(START + pd.Timedelta("1h"), periods=minutes * 60 // every_s, freq=f"{every_s}s")
    rng = np.random.default_rng(1)
    n = len(times)
    frames = []
    for gpu in ("g0", "g1"):
        frame = pd.DataFrame(
            {
                "timestamp": times,
                "gpu": gpu,
                "node": "n1",
                "power_w": rng.uniform(300, 400, n).round(1),
                "gpu_temp_c": rng.integers(50, 60, n).astype(float),
                "gpu_util_pct": rng.integers(80, 99, n).astype(float),
                "energy_mj": 1e9 + np.arange(n) * 1000.0,
                "fb_used_mib": 40_000.0,
                "pcie_replay_total": 0.0,
                "xid_last": 0,
            }
        )
        if gpu == "g1":
            dead = slice(n // 3, None)
            frame.loc[dead, ["energy_mj", "fb_used_mib", "pcie_replay_total"]] = np.nan
            frame.loc[dead, ["power_w", "gpu_temp_c", "gpu_util_pct"]] = [310.0, 33.0, 100.0]
            frame.loc[dead, "xid_last"] = 79
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


@pytest.mark.parametrize("every_s", [600, 30, 1800])
def test_frozen_samples_are_unknown_and_the_freeze_is_an_event(tmp_path: Path, every_s: int) -> None:
    given = history(900, every_s)
    dataset = load(tmp_path, [given], step="30min" if every_s == 1800 else "10min")
    stored, began = samples(dataset), given[given["xid_last"] == 79]["timestamp"].min()
    of_dead = stored[(stored["gpu"] == "g1") & (stored["timestamp"] > began + pd.Timedelta("1h"))]
    assert of_dead[["power_w", "gpu_temp_c", "gpu_util_pct"]].isna().all(axis=None)
    alive = given[given["gpu"] == "g0"]
    assert stored[stored["gpu"] == "g0"]["power_w"].notna().all()
    assert stored[stored["gpu"] == "g0"]["energy_mj"].max() == alive["energy_mj"].max()
    events = dataset.events()
    assert events[events["type"] == "xid"][["gpu", "code"]].to_numpy().tolist() == [["g1", "79"]]
    freeze = events[events["code"] == "frozen_telemetry"]
    assert (freeze["gpu"].tolist(), freeze["type"].tolist()) == (["g1"], ["other"])
    assert began + pd.Timedelta("10min") <= freeze["timestamp"].iloc[0] <= began + pd.Timedelta("1h")
    assert (freeze["known_at"] > freeze["timestamp"]).all()
    assert (
        dataset.meta.quarantine[FROZEN]
        == (given["gpu"].eq("g1") & given["timestamp"].ge(freeze["timestamp"].iloc[0])).sum()
    )


@pytest.mark.parametrize("every_s", [600, 30])
@pytest.mark.parametrize("cuts", [[0.35], [0.2, 0.34, 0.5, 0.9]])
def test_pieces_make_the_dataset_that_one_import_makes(tmp_path: Path, every_s: int, cuts: list[float]) -> None:
    given = history(600, every_s).sort_values(["timestamp", "gpu"])
    times = given["timestamp"].drop_duplicates().sort_values()
    # At the ends of steps, so that no cell is rolled up in two parts.
    edges = [START, *(times.iloc[int(len(times) * cut)].ceil("10min") for cut in cuts), times.iloc[-1]]
    pieces = [given[(given["timestamp"] > low) & (given["timestamp"] <= high)] for low, high in pairwise(edges)]
    whole, parts = load(tmp_path / "whole", [pd.concat(pieces)]), load(tmp_path / "parts", pieces)
    pd.testing.assert_frame_equal(samples(whole), samples(parts))
    pd.testing.assert_frame_equal(whole.events(), parts.events())
    state = [pq.read_table(dataset.path / STATE_NAME) for dataset in (whole, parts)]
    assert state[0].equals(state[1])


def test_frozen_samples_that_are_sent_again_stay_unknown(tmp_path: Path) -> None:
    given = history(900, 600)
    again = given[given["timestamp"] > given["timestamp"].median()].assign(power_instant_w=np.nan)
    dataset = load(tmp_path, [given, again])
    of_dead = samples(dataset).query("gpu == 'g1'").tail(20)
    assert of_dead[["power_w", "gpu_temp_c"]].isna().all(axis=None)


@pytest.mark.parametrize("every_s", [300, 30])
@pytest.mark.parametrize("lag", [None, 3])
@pytest.mark.parametrize(
    ("cuts", "counter"), [([], "energy_mj"), ([0.3, 0.36, 0.7], "energy_mj"), ([], "power_violation_ns")]
)
def test_a_second_exporter_that_is_frozen_or_late_adds_nothing(tmp_path, every_s, lag, cuts, counter):
    one = history(600, every_s)
    one = one[one["gpu"] == "g0"].drop(columns="energy_mj")
    one[counter] = 1e13 + np.arange(len(one)) * 1e6
    one["pcie_replay_total"] = np.arange(len(one)) // 10
    first = len(one) // 5
    other = one.assign(timestamp=one["timestamp"] + pd.Timedelta(every_s / 2, "s"))
    columns = other.columns.difference(["timestamp", "gpu", "node"])
    # Its page is that of the fifth, with an XID that is long repaired, or of three samples ago.
    other[columns] = one[columns].iloc[first].to_numpy() if lag is None else one[columns].shift(lag).to_numpy()
    other = other.iloc[first + 3 :].assign(xid_last=79)
    both = pd.concat([one, other]).sort_values("timestamp")
    assert (np.diff(both[counter]) < 0).sum() > len(one) // 2
    edges = both["timestamp"].quantile([0, *cuts, 1]).dt.ceil("10min").tolist()
    edges[0] -= pd.Timedelta("10min")
    parts = [both[(both["timestamp"] > low) & (both["timestamp"] <= high)] for low, high in pairwise(edges)]
    alone, dataset = load(tmp_path / "alone", [one]), load(tmp_path / "both", parts)
    pd.testing.assert_frame_equal(samples(alone), samples(dataset))
    assert len(dataset.events()) == 0
    assert dataset.meta.quarantine[STALE] == len(other)


@pytest.mark.parametrize("cached_s", [0, 30, 60])
def test_a_second_exporter_that_caches_its_page_keeps_its_channels(tmp_path: Path, cached_s: int) -> None:
    times = pd.date_range(START + pd.Timedelta("1h"), periods=120, freq="60s")
    age_s = np.arange(len(times)) * 60.0
    one = pd.DataFrame({"timestamp": times, "gpu": "g0", "node": "n1", "energy_mj": 4e12 + age_s * 5e5})
    one["power_violation_ns"] = 1e15 + age_s * 1e6
    other = one.assign(timestamp=times + pd.Timedelta("10s"), nvlink_replay_total=7.0)
    for name, rate in (("energy_mj", 5e5), ("power_violation_ns", 1e6)):
        other[name] += (10 - cached_s) * rate
    dataset = load(tmp_path, [pd.concat([one, other]).sort_values("timestamp")])
    stored = samples(dataset)
    assert stored["nvlink_replay_total"][1:].eq(7).all()
    assert stored["energy_mj_rise"].sum() == pytest.approx(120 * 60 * 5e5, rel=0.02)
    assert stored["power_violation_ns_rise"].sum() == pytest.approx(120 * 60 * 1e6, rel=0.02)
    assert dataset.meta.quarantine.get(STALE, 0) <= 1  # nothing precedes the first
    assert dataset.meta.quarantine.get(IMPOSSIBLE_RISE, 0) == 0


def test_rows_of_a_counter_that_restarts_at_another_value_than_zero_are_kept(tmp_path: Path) -> None:
    frame = history(600, 300).query("gpu == 'g0'").reset_index(drop=True)
    frame["energy_mj"] = np.where(frame.index < 40, 4e12, 1e12) + frame.index * 1e8
    dataset = load(tmp_path, [frame])
    assert STALE not in dataset.meta.quarantine
    assert samples(dataset)["power_w"].notna().all()


def test_a_counter_that_starts_anew_at_zero_is_not_stale(tmp_path: Path) -> None:
    frame = (
        history(600, 300).query("gpu == 'g0'")[:8].assign(energy_mj=[1e11, 1e11 + 4e7, 2e7, 5e7, 6e7, 7e7, 8e7, 9e7])
    )
    dataset = load(tmp_path, [frame])
    stored = samples(dataset)
    assert stored["energy_mj_rise"].sum() == pytest.approx(4e7 + 9e7)
    assert stored["energy_mj"].tolist() == [1e11, 2e7, 6e7, 8e7, 9e7]


@pytest.mark.skipif(not GWDG.exists(), reason="the GWDG telemetry is not here")
def test_gwdg_has_no_samples_of_frozen_gpus_and_loses_none_of_working_ones(tmp_path: Path) -> None:
    wide = pd.read_parquet(GWDG)
    frame = wide.rename(columns=EXPORTED)[[*EXPORTED.values(), "node", "uuid", "t"]]
    frame = frame.rename(columns={"uuid": "gpu", "t": "timestamp"})
    frame["timestamp"] = frame["timestamp"].dt.tz_localize("UTC").astype("datetime64[ms, UTC]")
    frame = frame.astype({"gpu": str, "node": str}).drop_duplicates(["gpu", "timestamp"])
    inventory = tmp_path / "inventory.csv"
    gpus = frame[["gpu", "node"]].drop_duplicates()
    gpus.assign(installed_at="2025-01-01T00:00:00Z").to_csv(inventory, index=False)
    path = tmp_path / "samples.parquet"
    pq.write_table(arrow(frame), path)
    dataset = import_dataset(
        tmp_path / "fleet", inventory=inventory, samples=[path], step=timedelta(minutes=10), channels=CATALOGUE,
        dedupe=timedelta(minutes=10), delay=timedelta(minutes=10), now=NOW,
    ).dataset  # fmt: skip
    stored = samples(dataset)
    dead = stored[(stored["xid_last"] == 79)]
    kept = dead[dead["power_w"].notna()]
    assert len(dead) - len(kept) > 10_900  # of 11,272: the first samples of each stretch are not known to be frozen
    assert len(kept) < 350
    healthy = stored[stored["xid_last"] != 79]
    given_power = frame[frame["xid_last"] != 79]["power_w"].notna().sum()
    assert given_power - healthy["power_w"].notna().sum() <= 5
    events = dataset.events()
    assert (events["code"] == "79").sum() == 44
