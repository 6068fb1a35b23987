"""The check of a matrix against its plain reading, which a time is told after, finds a wrong value."""

from datetime import timedelta

import numpy as np
import pytest

from benchmarks.features_out_of_core import check_rows
from benchmarks.generated import channels_of, generate
from features.config import DecisionSection, FeatureSection, LabelSection
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
    channels = channels_of(gauges=6, counters=2, flags=1, enums=1)
    dataset = generate(folder / "fleet", gpus=8, days=5, channels=channels, buckets=2, failures=0.0)
    build_matrix(
        dataset,
        folder / "matrix",
        decision=DecisionSection(),
        labels=LabelSection(),
        features=FeatureSection(
            groups=("telemetry",), windows=(timedelta(hours=1), timedelta(hours=6)), delay=timedelta(minutes=10)
        ),
        training=TrainingSection(augmentation=0),
        seed=1,
    )
    return dataset, FeatureMatrix.open(folder / "matrix")


def test_a_matrix_is_as_its_plain_reading_says(world, capsys):
    check_rows(*world)
    assert "equal to their plain reading: 8 rows of" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        "telemetry__power_w__mean__6h",
        "telemetry__clocks_event_reasons_hw_slowdown__share__6h",
    ],
)
def test_one_wrong_column_ends_the_run(world, name):
    dataset, matrix = world
    with pytest.raises(SystemExit, match=name):
        check_rows(dataset, Poisoned(matrix, name))
