"""Champion and challenger of a small simulated fleet, from training to rollback."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from features.matrix.matrix import FeatureMatrix
from foundation.errors import InputError
from models.bundle.store import load_bundle
from models.registry.champion import standing_of
from models.registry.store import opened_store
from pipeline.held_out import untouched
from pipeline.matrix_stage import make_matrix
from pipeline.params import Params
from pipeline.promotion import EXPERIMENT, promote, roll_back
from pipeline.stages import train_bundle

EARLY, LATE = datetime(2026, 1, 22, tzinfo=UTC), datetime(2026, 1, 29, tzinfo=UTC)


@pytest.fixture(scope="module")
def world(small_fleet: Path, small_params: Params, tmp_path_factory: pytest.TempPathFactory):
    """A matrix, lenient params, and a store with two versions, trained until different times."""
    folder = tmp_path_factory.mktemp("life")
    # a fleet this small is told apart by what all members see
    models = small_params.models.model_copy(update={"groups": {}})
    small_params = small_params.model_copy(update={"models": models})
    matrix = make_matrix(small_fleet, small_params, folder / "matrix")
    store = f"sqlite:///{folder / 'mlflow.db'}"
    for name, until in (("early", EARLY), ("late", LATE)):
        train_bundle(matrix, small_params, folder / name, registry=store, until=until)
    gate = small_params.promotion.model_copy(
        update={"precision_margin": 1.0, "margin_share": 1.0, "risk_ratio": (0.01, 100.0), "brier_margin": 9.0,
                "recall_margin": 1.0, "min_incidents": 1, "bootstrap": 100}
    )  # fmt: skip
    return folder, matrix, store, small_params.model_copy(update={"promotion": gate})


def test_decisions_to_compare_on_begin_when_no_side_knows_a_label(world) -> None:
    folder, matrix, _, params = world
    bundles = [(name, load_bundle(folder / name)) for name in ("early", "late")]
    positions = untouched(matrix, bundles, timedelta(days=365))
    rows = matrix.rows.iloc[positions]
    assert rows["decision_time"].min() >= LATE
    assert not rows["augmented"].any()
    assert (matrix.labels(None).iloc[positions]["complete_at"] <= matrix.span[1]).all()
    train_bundle(matrix, params, folder / "whole")
    with pytest.raises(InputError, match="no decision to compare on: whole knows labels up to") as raised:
        untouched(matrix, [*bundles, ("whole", load_bundle(folder / "whole"))], timedelta(days=28))
    assert "`predrain train --until 2026-01-3" in raised.value.do


def test_a_model_lives_from_its_first_promotion_to_a_rollback(world) -> None:
    folder, matrix, store, params = world
    tried = promote(lambda: matrix, params, registry=store, model="predrain", to=1, dry_run=True)
    assert tried.verdict.champion == "history_count, vendor_rules"
    assert standing_of(store, "predrain").champion is None
    strict = params.model_copy(update={"promotion": params.promotion.model_copy(update={"min_incidents": 10_000})})
    refused = promote(lambda: matrix, strict, registry=store, model="predrain", to=1)
    assert (refused.action, refused.champion) == ("refused", None)
    first = promote(None, params, registry=store, model="predrain", to=1, force_reason="nobody else")
    assert (first.action, first.champion_before, first.champion) == ("forced", None, 1)
    second = promote(lambda: matrix, params, registry=store, model="predrain", force_reason="take it whatever it is")
    assert (second.version, second.verdict.challenger, second.verdict.champion) == (2, "version 2", "version 1")
    assert second.champion == standing_of(store, "predrain").champion == 2
    with pytest.raises(InputError, match="version 2 is already the champion"):
        promote(lambda: matrix, params, registry=store, model="predrain")
    (bundle,) = (folder / "mlartifacts").glob("predrain/models/*/artifacts/artifacts/early")
    gone = bundle.rename(folder / "gone")
    with pytest.raises(InputError, match="it holds no bundles") as raised:
        roll_back(registry=store, model="predrain")
    assert raised.value.do.startswith("Bring the files of version 1 back, or give the alias to a version whose files")
    assert standing_of(store, "predrain").champion == 2
    gone.rename(bundle)
    back = roll_back(registry=store, model="predrain", reason="precision fell")
    assert (back.action, back.version, back.champion) == ("rolled back", 2, 1)
    assert standing_of(store, "predrain").history == (1,)
    with pytest.raises(InputError, match="version 1 is the first champion: there is no previous champion"):
        roll_back(registry=store, model="predrain")
    with opened_store(store) as mlflow:
        client = mlflow.MlflowClient()
        runs = client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id], order_by=["start_time"])
        assert [run.data.tags["decision"] for run in runs] == ["refused", "forced", "promoted", "rolled back"]
        assert [run.data.tags["applied"] for run in runs] == ["nothing to apply", "yes", "yes", "yes"]
        kept = mlflow.artifacts.download_artifacts(run_id=runs[2].info.run_id)
        assert json.loads((Path(kept) / "verdict.json").read_text())["version"] == 2
        assert "## How it was compared at promotion" in (Path(kept) / "MODEL_CARD.md").read_text()
        assert client.get_model_version("predrain", "2").tags["rolled_back_reason"] == "precision fell"


def test_the_card_says_data_features_and_parameters(world) -> None:
    card = (world[0] / "early" / "MODEL_CARD.md").read_text()
    assert "## Features" in card
    assert "incidents known by the refit" in card
    settings = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert settings["labels"]["horizon"] == "1d"
    assert "No backtest was given." in card


def test_a_bundle_of_another_question_is_refused(world, small_fleet: Path, tmp_path: Path) -> None:
    folder, matrix, _, _ = world
    other = FeatureMatrix(matrix.path, matrix.meta)
    bundle = load_bundle(folder / "early")
    bundle.manifest["params"]["labels"]["horizon"] = "2d"
    with pytest.raises(InputError, match=r"early was trained for labels\.horizon 2d, the matrix has 1d"):
        untouched(other, [("early", bundle)], timedelta(days=28))
