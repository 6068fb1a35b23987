"""A failure of a node counts once, however many GPUs it takes, and so does what takes several nodes."""

import json
from datetime import timedelta

import numpy as np
import pandas as pd
import pytest

from evaluation.backtest.promises import decisions_frame, walk_promises
from evaluation.backtest.promotion_gate import evaluate_gate
from evaluation.metrics.aggregation import split_predictions
from evaluation.metrics.evaluation import evaluate
from evaluation.metrics.lead_time import unforeseen_incidents
from evaluation.value.verdict import predictability
from foundation.times import milliseconds
from models.config import PromotionSection
from models.rows.ranking import top_nodes
from models.rows.training_set import node_codes
from tests.evaluation.fleet_matrix import SECTION, FleetMatrix, folds, predictions
from tests.models.fleet_predictions import fleet

COPIES = 4
REACH = timedelta(hours=30)
MODELS = [("xgboost", "sliding", 0.7), ("parallel", "sliding", 0.9), ("history_count", "sliding", 3.0)]


def copied(frame):
    """Every GPU as four that fail together, with the same scores; alerts as a budget of two nodes gives them."""
    copies = [
        frame.assign(
            unit=frame["unit"] + f"/{copy}",
            gpu=frame["gpu"] + f"/{copy}",
            incident=frame["incident"] * COPIES + copy,
            rank=(frame["rank"] - 1) * COPIES + copy + 1,
        )
        for copy in range(COPIES)
    ]
    return pd.concat(copies, ignore_index=True)


def with_alerts(frame, k=2):
    frame = frame.reset_index(drop=True)
    alert = np.zeros(len(frame), dtype=bool)
    for rows in frame.groupby(["model", "variant"]).indices.values():
        of_node = frame.iloc[rows]
        time, rank = milliseconds(of_node["decision_time"]), of_node["rank"].to_numpy(dtype=np.int64)
        alert[rows] = top_nodes(time, rank, node_codes(of_node), k)
    voted = (frame["model"] == "parallel") & (frame["decision_time"].dt.hour == 0)
    return frame.assign(alert=alert & ~voted)


def measures(frame):
    measured = evaluate(frame, k=2, bootstrap=40, seed=3, drain_reach=REACH)
    content = measured.to_metrics()
    detail = content.pop("units"), [
        (entry.pop("by_unit"), entry.pop("calibration_error")) for model in content["models"].values()
        for entry in model.values()
    ]  # fmt: skip
    assert detail
    unforeseen = unforeseen_incidents(frame)
    return measured, content, unforeseen


def rounded(content):
    return json.loads(json.dumps(content), parse_float=lambda text: round(float(text), 9))


@pytest.mark.parametrize(("seed", "per_node"), [(0, 1), (1, 3), (2, 2)])
def test_four_gpus_that_fail_together_change_no_count_interval_or_verdict(seed, per_node):
    one = with_alerts(fleet(seed, MODELS, times=16, units=18, incidents=8, per_node=per_node))
    four = with_alerts(copied(one))
    before, after = measures(one), measures(four)
    assert rounded(after[1]) == rounded(before[1])
    pd.testing.assert_frame_equal(after[2], before[2])
    verdicts = [predictability(m, f, s, "xgboost", seed=1) for f, (m, _, s) in ((one, before), (four, after))]
    assert repr(verdicts[0]) == repr(verdicts[1])
    gates = []
    for frame in (one, four):
        sides = {part.model: part for part in split_predictions(frame, 2)}
        section = PromotionSection(bootstrap=100)
        gates.append(
            evaluate_gate(sides["xgboost"], [sides["history_count"]], section, seed=1, champion=True).to_json()
        )
    assert rounded(gates[0]) == rounded(gates[1])


class Copied:
    """A matrix whose GPUs are four each."""

    def __init__(self, matrix):
        self.matrix, self.span = matrix, matrix.span
        rows = [matrix.rows.assign(unit=matrix.rows["unit"] + f"/{copy}") for copy in range(COPIES)]
        self.rows = pd.concat(rows, ignore_index=True)

    def incidents(self, as_of=None):
        frame = self.matrix.incidents(as_of)
        parts = [frame.assign(incident=frame["incident"] * COPIES + copy) for copy in range(COPIES)]
        return pd.concat(parts, ignore_index=True)

    def labels(self, as_of=None, *, horizon=None, rows=None):
        frame = self.matrix.labels(as_of, horizon=horizon)
        parts = [frame.assign(incident=frame["incident"] * COPIES + copy) for copy in range(COPIES)]
        labels = pd.concat(parts, ignore_index=True)
        return labels if rows is None else labels.iloc[rows]


def test_four_gpus_that_fail_together_change_no_promise():
    matrix = FleetMatrix()
    frame = predictions(matrix)
    promises = walk_promises(frame, folds(), matrix, SECTION, k=2)
    again = walk_promises(copied(frame), folds(), Copied(matrix), SECTION, k=2)
    assert promises.folds["promised"].any()
    pd.testing.assert_frame_equal(again.folds, promises.folds)
    pd.testing.assert_frame_equal(again.pooled, promises.pooled)
    pd.testing.assert_frame_equal(decisions_frame(again), decisions_frame(promises))


def under_one_cause(frame, number):
    in_incident = frame["node_incident"].notna()
    return frame.assign(common_cause=frame["common_cause"].mask(in_incident, number))


def test_failures_of_several_nodes_with_one_cause_are_one_piece_of_evidence():
    frame = with_alerts(fleet(5, [("xgboost", "sliding", 0.3)], times=16, units=18, incidents=8))
    apart, together = (
        evaluate(one, k=2, bootstrap=200, seed=0, drain_reach=REACH) for one in (frame, under_one_cause(frame, 3))
    )
    many, single = apart.row("xgboost", "sliding"), together.row("xgboost", "sliding")
    assert many["incidents"] > 3
    assert (single["incidents"], single["caught"]) == (1, 1)
    assert together.lead_times["nodes"].tolist() == [many["incidents"]]
    assert single["precision"] == many["precision"], "each drain stands by itself, right or wrong"
    assert single["precision_low"] < many["precision_low"]


def test_a_cause_is_caught_with_half_of_its_nodes():
    frame = with_alerts(fleet(5, [("xgboost", "sliding", 0.3)], times=16, units=18, incidents=8))
    incidents = sorted(frame["node_incident"].dropna().unique())
    for caught in range(len(incidents) + 1):
        alert = frame["node_incident"].isin(incidents[:caught])
        row = evaluate(under_one_cause(frame.assign(alert=alert), 0), k=2, bootstrap=0, seed=0).row(
            "xgboost", "sliding"
        )
        assert row["caught"] == (2 * caught >= len(incidents))


def test_a_gpu_without_a_known_outcome_does_not_speak_for_its_node():
    frame = fleet(5, [("xgboost", "sliding", 0.3)], times=8, units=2, incidents=1, per_node=2)
    broken = frame["unit"] == "g00"
    frame = frame.assign(alert=broken, label=pd.array(np.where(broken, pd.NA, 0), dtype="Int8"))
    row = evaluate(frame, k=1, bootstrap=0, seed=0).row("xgboost", "sliding")
    assert (row["alerts"], row["labelled"]) == (0, 8)
    unknown = frame.assign(label=pd.array([pd.NA] * len(frame), dtype="Int8"))
    row = evaluate(unknown, k=1, bootstrap=0, seed=0).row("xgboost", "sliding")
    assert (row["alerts"], row["labelled"]) == (8, 0)


def test_an_incident_of_two_families_counts_in_each():
    frame = fleet(5, [("xgboost", "sliding", 0.3)], times=16, units=8, incidents=1, per_node=2)
    hit = frame[frame["label"].fillna(0) == 1]
    node, other = hit["node"].iloc[0], frame[(frame["node"] == hit["node"].iloc[0])]["unit"].unique()
    spare = next(unit for unit in other if unit != hit["unit"].iloc[0])
    times = hit["decision_time"]
    rows = (frame["unit"] == spare) & frame["decision_time"].isin(times)
    values = {"label": 1, "failure_class": "bus", "incident": 9, "node_incident": 0, "common_cause": 0}
    for name, value in (values | {"incident_start": hit["incident_start"].iloc[0]}).items():
        frame.loc[rows, name] = value
    measured = evaluate(with_alerts(frame), k=2, bootstrap=0, seed=0)
    assert measured.row("xgboost", "sliding")["incidents"] == 1
    assert measured.lead_times[["node", "failure_class"]].values.tolist() == [[node, "bus, memory"]]
    assert measured.by_class[["failure_class", "incidents"]].values.tolist() == [["bus", 1], ["memory", 1]]


def test_units_that_are_acted_on_alone_count_as_nodes_of_their_own():
    hosts = fleet(4, MODELS, times=16, units=18, incidents=8, per_node=3)
    alone = hosts.assign(node=hosts["unit"], node_incident=hosts["incident"])
    disks = alone.assign(node=hosts["node"], acted_on=hosts["unit"])
    assert np.array_equal(with_alerts(disks)["alert"], with_alerts(alone)["alert"])
    one, other = (measures(with_alerts(frame)) for frame in (disks, alone))
    assert rounded(one[1]) == rounded(other[1])
    assert rounded(one[1]) != rounded(measures(with_alerts(hosts))[1])
