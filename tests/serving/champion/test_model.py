"""The bundle that scores rows in the service."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.bundle.store import load_bundle, save_bundle
from models.ensembles.combining import Stacker
from serving.champion.model import FeatureRows, load_model
from tests.models.small_models import fitted_models, rows

ROOT = Path(__file__).resolve().parents[3]
FACTS = {"profile": "logistic", "version": 7, "params": {"labels": {"horizon": "24h"}}}


def some_rows() -> FeatureRows:
    values, _ = rows(40, seed=6)
    return FeatureRows(values, [f"g{at % 20}" for at in range(40)], np.arange(40) // 20 * 3_600_000)


def test_a_bundle_is_loaded_and_scores_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_bundle(tmp_path / "bundle", fitted_models(), FACTS).path
    model = load_model(path)
    assert model.about() == {"digest": load_bundle(path).digest, "profile": "logistic", "version": "7"}
    assert model.horizon_seconds == 86_400
    assert caplog.records == []
    answers = model.score(some_rows())
    assert [set(answer) for answer in answers] == [{"unit", "risk", "score", "rank", "alert"}] * 40
    assert [answer["unit"] for answer in answers] == some_rows().units
    assert sorted(answer["rank"] for answer in answers[:20]) == list(range(1, 21))


LOADS = """
import json, sys
from pathlib import Path
from serving.champion.model import load_model

load_model(Path(sys.argv[1]))
others = ("mlflow", "torch", "shap", "skops", "matplotlib", "numba")
print(json.dumps([name for name in others if name in sys.modules]))
"""


def test_a_server_that_scores_rows_imports_only_what_the_profile_needs(tmp_path: Path) -> None:
    whole = fitted_models()
    alone = replace(
        whole, models=("lightgbm",), learners={"lightgbm": whole.learners["lightgbm"]}, members=(), cascade=None
    )
    alone = replace(alone, stacker=Stacker(()))
    path = save_bundle(tmp_path / "bundle", alone, {"profile": "lightgbm"}).path
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(path)], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == []
