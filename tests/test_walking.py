"""What the benchmarks share that walk over development fleets."""

from __future__ import annotations

import numpy as np

from benchmarks.walking import Held
from features.building import build_matrix
from features.config import DecisionSection, LabelSection
from tests.features.small_fleet import HOUR, SMALL, Training, gpus, inventory_of, samples_of, write_dataset


def test_matrices_in_folders_of_the_same_name_are_held_apart(tmp_path):
    matrices = []
    for number, units in enumerate((3, 4)):
        inventory = inventory_of(gpus(units))
        dataset = write_dataset(
            tmp_path / f"{number}" / "fleet", inventory, hours=24, samples=samples_of(inventory, 24)
        )
        matrix = build_matrix(
            dataset,
            tmp_path / f"{number}" / "matrix",
            decision=DecisionSection(every=HOUR),
            labels=LabelSection(horizon=6 * HOUR),
            features=SMALL,
            training=Training(),
            seed=5,
        )
        matrices.append(matrix)
    for _ in range(2):  # made, then found
        for matrix in matrices:
            held = Held(matrix, tmp_path)
            np.testing.assert_array_equal(held.read(np.arange(len(matrix.rows))), matrix.values())
