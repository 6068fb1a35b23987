"""Bundles with sequence learners: the raw windows of a scored decision are those of the training matrix."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from features.config import SequenceSection
from foundation.errors import InputError
from models.bundle.store import Bundle
from models.config import ServingSection
from models.sequence.windows import WindowedMatrix
from serving.scores.feature_settings import live_config, window_plan
from serving.scores.fleet_rows import fleet_rows
from tests.features.small_fleet import HOUR, SMALL, T0, events_of, gpus, inventory_of, make_matrix, write_dataset
from tests.serving.batch_world import DECISION, HOURS, LABELS, manifest, telemetry

SECTION = SequenceSection(
    channels=("gpu_temp_c", "power_w", "ecc_sbe_volatile_total"), window=6 * HOUR, step=timedelta(minutes=30)
)


@pytest.mark.parametrize("hour", [3, 12, 24])
def test_a_row_holds_the_window_of_the_matrix(tmp_path: Path, hour: int) -> None:
    features = SMALL.model_copy(update={"sequence": SECTION})
    inventory = inventory_of(gpus(12))
    dataset = write_dataset(
        tmp_path / "data", inventory, samples=telemetry(inventory), events=events_of([]), hours=HOURS
    )
    matrix = make_matrix(dataset, tmp_path / "matrix", features=features, decision=DECISION, labels=LABELS)
    windowed = WindowedMatrix(matrix)
    fitted = type("Fitted", (), {"columns": tuple(windowed.columns)})()
    bundle = Bundle(tmp_path, fitted, manifest(matrix, features=features), "d")
    config = live_config(bundle, dataset.meta)
    assert config.columns == matrix.config.columns
    t = T0 + hour * HOUR
    served = fleet_rows(dataset, config, ServingSection(), t, window_plan(bundle, config))
    rows = matrix.rows
    mine = np.flatnonzero((rows["decision_time"] == t).to_numpy() & ~rows["augmented"].to_numpy())
    assert served.keys["unit"].tolist() == rows["unit"].iloc[mine].tolist()
    np.testing.assert_array_equal(served.values, windowed.values(mine))
    assert np.isfinite(served.values[:, len(config.columns) :]).any()
    other = config.features.model_copy(update={"sequence": SECTION.model_copy(update={"window": 3 * HOUR})})
    with pytest.raises(InputError, match="this version of predrain computes other raw windows"):
        window_plan(bundle, replace(config, features=other))
