"""The benchmarks' check of a matrix against its plain reading finds a wrong value in each feature group."""

from datetime import timedelta

import numpy as np
import pytest

from benchmarks.generated import channels_of, generate
from benchmarks.plain_check import check_rows
from features.config import GROUPS, DecisionSection, FeatureSection, LabelSection
from features.matrix.building import build_matrix
from features.matrix.matrix import FeatureMatrix
from models.config import TrainingSection


class Poisoned:
    """A matrix of which one column is wrong by a thousandth, and by a hundredth of one at least."""

    def __init__(self, matrix, name):
        self._matrix, self._name = matrix, name
        self.columns, self.rows, self.config = matrix.columns, matrix.rows, matrix.config

    def values(self, rows, names):
        found = self._matrix.values(rows, names)
        if self._name in names:
            at = list(names).index(self._name)
            found[:, at] += 0.01 + 0.001 * np.abs(found[:, at])
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    # power and use of the GPU are the sixth and the twelfth gauge, errors the fifth counter
    channels = channels_of(gauges=12, counters=5, flags=1, enums=1)
    dataset = generate(folder / "fleet", gpus=48, days=9, channels=channels, buckets=2, failures=40.0)
    build_matrix(
        dataset,
        folder / "matrix",
        decision=DecisionSection(),
        labels=LabelSection(),
        features=FeatureSection(windows=(timedelta(hours=1), timedelta(hours=6)), delay=timedelta(minutes=10)),
        training=TrainingSection(augmentation=0),
        seed=1,
    )
    return dataset, FeatureMatrix.open(folder / "matrix")


def test_a_matrix_is_as_its_plain_reading_says(world, capsys):
    check_rows(*world)
    told = capsys.readouterr().out
    assert all(group in told for group in GROUPS)


@pytest.mark.parametrize(
    "name",
    [
        "telemetry__power_w__mean__6h",
        "telemetry__clocks_event_reasons_hw_slowdown__share__6h",
        "history__node_xid_app__count__7d",
        "peers__gpu_temp_c__node_deviation__6h",
        "peers__gpu_temp_c__fleet_deviation__6h",
        "onset__ecc_sbe_volatile_total__surge__6h",
        "onset__errors__excess_sum__24h",
        "gaps__samples__age",
        "gaps__node_units__fresh__1h",
        "workload__power_w__swing__1h",
        "static__age__days",
    ],
)
def test_one_wrong_column_ends_the_run(world, name):
    dataset, matrix = world
    with pytest.raises(SystemExit, match=name):
        check_rows(dataset, Poisoned(matrix, name))
