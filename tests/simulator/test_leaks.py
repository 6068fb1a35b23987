"""Where failures have no precursor, nothing in the dataset may tell who is next: whatever does is a leak."""

from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import rankdata

from simulator.simulate import SimulationSummary, simulate
from telemetry.dataset.store import Dataset

DAY = pd.Timedelta(days=1)


@pytest.fixture(scope="module")
def memoryless(tmp_path_factory: pytest.TempPathFactory) -> SimulationSummary:
    return simulate(
        Path(tmp_path_factory.mktemp("memoryless")) / "fleet",
        gpus=320,
        days=30,
        seed=2,
        scenario="noprecursor",
        acceleration=40.0,
        step=timedelta(hours=1),
    )


def daily_statistics(data: Dataset) -> pd.DataFrame:
    """For each GPU and midnight, what the last 24 hours of samples look like."""
    parts = []
    for bucket in data.buckets():
        frame = data.read_bucket(bucket).to_pandas()
        frame["gpu"] = frame["gpu"].astype(str)
        frame["clocks_event_reasons"] = frame["clocks_event_reasons"].astype(float)
        frame["at"] = frame["timestamp"].dt.floor("D") + DAY
        groups = frame.drop(columns=["node", "timestamp"]).groupby(["gpu", "at"])
        wide = groups.agg(["mean", "std", "max", "last"])
        wide.columns = ["__".join(pair) for pair in wide.columns]
        first = groups.first()
        rises = groups.last()[[name for name in first if name.endswith("_total")]] - first.filter(like="_total")
        wide = wide.join(rises.add_suffix("__rise")).join(groups.size().rename("samples"))
        wide["last_seen"] = frame.groupby(["gpu", "at"])["timestamp"].max().astype("int64")
        parts.append(wide.reset_index())
    return pd.concat(parts, ignore_index=True)


def history(data: Dataset, rows: pd.DataFrame) -> pd.DataFrame:
    """Who the GPU is and how often events were known of it before."""
    inventory = data.inventory().reset_index(names="place").set_index("gpu")
    known = data.events()[["known_at", "node", "gpu", "type"]]
    known["known_at"] = known["known_at"].astype("datetime64[ms, UTC]").astype("int64")
    out = pd.DataFrame(index=rows.index)
    own = inventory.loc[rows["gpu"]]
    out["place"] = own["place"].to_numpy()
    out["slot"] = own["slot"].astype(int).to_numpy()
    out["name"] = rankdata(rows["gpu"])
    out["serial"] = rankdata(own["serial"])
    out["installed"] = own["installed_at"].astype("int64").to_numpy()
    for column in ("gpu", "node"):
        keys = rows["gpu"] if column == "gpu" else own["node"].set_axis(rows.index)
        for kind in ("xid", "repair", "drain", "diagnostic"):
            times = known[known["type"] == kind].groupby(column)["known_at"].apply(lambda s: np.sort(s.to_numpy()))
            counts = [
                np.searchsorted(times[key], at) if key in times.index else 0
                for key, at in zip(keys, rows["at"].astype("int64"), strict=True)
            ]
            out[f"{column}_{kind}"] = counts
    return out


def test_nothing_tells_who_fails_next_where_failures_have_no_precursor(memoryless: SimulationSummary) -> None:
    data = Dataset.open(memoryless.dataset)
    risk = pd.read_parquet(memoryless.truth / "risk.parquet")
    rows = daily_statistics(data).merge(
        risk.rename(columns={"timestamp": "at"})[["gpu", "at"]].assign(gpu=risk["gpu"].astype(str)), on=["gpu", "at"]
    )
    failures = pd.read_parquet(memoryless.truth / "failures.parquet")
    rows["at"] = rows["at"].astype("datetime64[ms, UTC]")
    ahead = pd.merge_asof(
        rows[["gpu", "at"]]
        .assign(row=np.arange(len(rows)), after=(rows["at"] + pd.Timedelta(minutes=10)).astype("datetime64[ms, UTC]"))
        .sort_values("after"),
        failures[["gpu", "start"]]
        .assign(gpu=failures["gpu"].astype(str), after=failures["start"])
        .sort_values("after"),
        on="after",
        by="gpu",
        direction="forward",
        allow_exact_matches=False,
    )
    label = np.zeros(len(rows), bool)
    label[ahead["row"].to_numpy()] = (ahead["start"] - ahead["after"] <= DAY).to_numpy()
    model = data.inventory().set_index("gpu")["model"].loc[rows["gpu"]].to_numpy()
    # Within a day and a model: those are known to differ, and are the same for all.
    stratum = pd.factorize(rows["at"].astype("int64").astype(str) + model)[0]
    values = pd.concat([rows.drop(columns=["gpu", "at"]), history(data, rows)], axis=1)
    assert label.sum() > 90
    scores = {}
    for name in values:
        column = values[name].to_numpy(dtype=float)
        ok = np.isfinite(column)
        share = pd.Series(column[ok]).groupby(stratum[ok]).rank(pct=True).to_numpy()
        size = pd.Series(column[ok]).groupby(stratum[ok]).transform("size").to_numpy()
        centred = share - (size + 1) / (2 * size)
        hits = centred[label[ok]]
        if len(hits) > 30 and hits.std() > 0:
            scores[name] = hits.mean() / np.sqrt(centred.var() / len(hits))
    assert len(scores) > 60
    worst = max(scores, key=lambda name: abs(scores[name]))
    # The largest of about a hundred correlated scores is below 4 in 99 runs of 100.
    assert abs(scores[worst]) < 4.0, (worst, scores[worst])
    assert np.std(list(scores.values())) < 1.8
