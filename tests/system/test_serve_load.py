"""The load run of benchmarks/serve_load.py, shortened: swaps and kills under mixed traffic."""

from pathlib import Path

import pytest

from benchmarks.serve_load import Place, run_load, show
from models.bundle.store import save_bundle
from tests.serving.batch_world import fitted_on, make_world, manifest

pytestmark = pytest.mark.system


def test_nothing_is_wrong_lost_or_dropped_under_mixed_traffic(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    other = save_bundle(tmp_path / "other", fitted_on(world.matrix), manifest(world.matrix) | {"profile": "lightgbm"})
    found = run_load(Place(tmp_path, [world.bundle.path, other.path]), 25, 30)
    show(found)
    assert found["faults"] == []
    answers = found["answers"]
    assert {"node 200", "nodes 200", "fleet 200", "watch 200"} <= answers.keys()
    assert found["done"]["swaps"] >= 5
    assert found["done"]["kills"] == 2
