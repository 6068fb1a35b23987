from datetime import timedelta

import numpy as np
import pytest

from features.vocabulary import FeatureColumn
from models.learners.baselines import HistoryCount, RandomScore, VendorRules
from models.rows.ranking import mix, name_hashes

ANYONE = np.zeros(0, np.uint64)
H1, H24, D30, D90 = timedelta(hours=1), timedelta(hours=24), timedelta(days=30), timedelta(days=90)


def telemetry(channel, statistic, window):
    return FeatureColumn.of("telemetry", channel, statistic, window=window)


def history(channel, scope, window=D30):
    return FeatureColumn.of("history", channel, "count", window=window, scope=scope)


def points(columns, **values):
    row = np.full((1, len(columns)), np.nan, dtype=np.float32)
    for i, column in enumerate(columns):
        if column.name in values:
            row[0, i] = values[column.name]
    return float(VendorRules(columns).points(row, ANYONE)[0])


@pytest.mark.parametrize(
    ("channel", "statistic", "below", "hit", "severity"),
    [
        ("row_remap_failure", "last", 0, 1, 3),
        ("row_remap_uncorrectable_total", "last", 511, 512, 3),
        ("retired_pages_sbe_total", "last", 62, 63, 3),
        ("retired_pages_dbe_total", "last", 15, 16, 3),
        ("ecc_dbe_volatile_total", "rise", 0, 1, 2),
        ("row_remap_pending", "last", 0, 1, 2),
        ("nvlink_crc_flit_total", "rise", 359_999, 360_000, 2),  # 100 a second for an hour
        ("pcie_replay_total", "rise", 960, 961, 1),  # more than 16 a minute for an hour
        ("nvlink_replay_total", "rise", 0, 1, 1),
        ("nvlink_recovery_total", "rise", 0, 1, 1),
    ],
)
def test_vendor_thresholds(channel, statistic, below, hit, severity):
    column = telemetry(channel, statistic, H1)
    assert points([column], **{column.name: below}) == 0
    assert points([column], **{column.name: hit}) == severity


def test_rates_take_the_shortest_window_and_single_events_the_longest():
    columns = [telemetry("pcie_replay_total", "rise", w) for w in (H24, H1)]
    columns += [telemetry("nvlink_replay_total", "rise", w) for w in (H1, H24)]
    assert points(columns, telemetry__pcie_replay_total__rise__1h=2000) == 1
    assert points(columns, telemetry__pcie_replay_total__rise__24h=2000) == 0
    assert points(columns, telemetry__nvlink_replay_total__rise__24h=1) == 1


def test_severities_add_up_and_unknown_values_hit_nothing():
    columns = [telemetry("row_remap_failure", "last", H1), telemetry("row_remap_pending", "last", H1)]
    assert points(columns) == 0
    assert points(columns, telemetry__row_remap_failure__last__1h=1, telemetry__row_remap_pending__last__1h=1) == 5


def test_history_counts_the_gpu_before_the_node_over_thirty_days():
    columns = [
        history("incident", "gpu"),
        history("xid_memory", "gpu"),
        history("xid_app", "gpu"),
        history("incident", "gpu", D90),
        history("incident", "node"),
    ]
    X = np.array([[1, 1, 50, 9, 0], [1, 0, 50, 9, 90], [0, 0, 50, 9, 0], [np.nan] * 5], dtype=np.float32)
    score = HistoryCount(columns).points(X, ANYONE)
    assert score[0] == 2
    assert 1.9 < score[1] < 2
    assert score[2] == score[3] == 0


def test_history_takes_the_longest_window_where_thirty_days_are_not_there():
    columns = [history("incident", "node", timedelta(days=1)), history("incident", "node", D90)]
    score = HistoryCount(columns).points(np.array([[5, 1], [0, 2]], dtype=np.float32), ANYONE)
    assert score[1] > score[0]


def test_history_is_constant_without_history_columns():
    assert HistoryCount([telemetry("power_w", "mean", H1)]).points(np.ones((3, 1)), ANYONE).tolist() == [0, 0, 0]


def test_random_follows_the_row_and_not_its_place():
    identity = mix(name_hashes(["a", "b", "c"]), np.array([1, 1, 1]))
    X = np.zeros((3, 2))
    score = RandomScore(seed=1).points(X, identity)
    assert len(set(score.tolist())) == 3
    assert np.array_equal(RandomScore(seed=1).points(X[:2], identity[[2, 0]]), score[[2, 0]])
    assert not np.array_equal(RandomScore(seed=2).points(X, identity), score)
