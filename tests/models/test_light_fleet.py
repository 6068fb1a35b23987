"""The light scorer on the bundle of a real small fleet: every profile, every row of the matrix."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from features.matrix.matrix import FeatureMatrix
from models.bundle import load_bundle
from models.bundle_files import sealed
from models.light.bundle import load_light
from pipeline.params import Params
from pipeline.stages import train_bundle


def test_every_profile_of_a_trained_bundle_is_scored_bit_for_bit(
    small_params: Params, small_backtest: Path, tmp_path: Path
) -> None:
    matrix = FeatureMatrix.open(small_backtest / "matrix")
    train_bundle(matrix, small_params, tmp_path / "bundle")
    fitted = load_bundle(tmp_path / "bundle").fitted
    X, frame = matrix.values(), matrix.rows
    times = pd.DatetimeIndex(frame["decision_time"]).as_unit("ms").asi8
    units = frame["unit"].astype(object).tolist()
    scored = fitted.score(X, frame["decision_time"], units)
    content = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert len(fitted.models) > 8
    for profile in fitted.models:
        (tmp_path / "bundle" / "manifest.json").write_bytes(sealed(content | {"profile": profile}))
        found = load_light(tmp_path / "bundle", columns=matrix.columns).score(X, times, units)
        mine = scored[scored["model"] == profile]
        for name in ("score", "risk", "rank", "alert"):
            assert getattr(found, name).tobytes() == mine[name].to_numpy().tobytes(), (profile, name)
        risks = fitted.risks(profile, mine["score"].to_numpy())
        assert {name: each.tobytes() for name, each in found.risks.items()} == {
            name: each.tobytes() for name, each in risks.items()
        }
    assert not np.isnan(found.risk).any()
