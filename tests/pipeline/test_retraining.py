"""Retraining, promotion and rollback on a small simulated fleet."""

import json
import re
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml

from features.matrix.matrix import FeatureMatrix
from foundation.errors import InputError, TooEarlyError
from models.bundle.store import load_bundle
from models.registry.champion import ChampionHistory, champion_history
from models.registry.store import opened_store
from pipeline import retraining
from pipeline.held_out import untouched
from pipeline.matrix_stage import make_matrix
from pipeline.params import Params, load_params
from pipeline.promotion import EXPERIMENT, promote, roll_back
from pipeline.retraining import FLOOD, MEAN_RISK, QUIET, page_of, retrain
from pipeline.stages import train_bundle
from predrain.learn.promotion import summary_text
from serving.scores.writing import TEXTFILE
from simulator.simulate import simulate
from tests.processes import invoke

RegistryAt = Callable[[datetime], Path]
OLD, NEWER = datetime(2026, 1, 20, tzinfo=UTC), datetime(2026, 2, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def small_params(light_params_file: Path) -> Params:
    return load_params([light_params_file])


@pytest.fixture(scope="module")
def matrix(small_fleet: Path, small_params: Params, tmp_path_factory: pytest.TempPathFactory) -> FeatureMatrix:
    return make_matrix(small_fleet, small_params, tmp_path_factory.mktemp("retrain") / "matrix")


def quick(params: Params) -> Params:
    return params.model_copy(update={"models": params.models.model_copy(update={"profile": "lightgbm"})})


@pytest.fixture
def params(small_params: Params) -> Params:
    return quick(small_params)


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> str:
    shutil.copy(empty_store, tmp_path)
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture(scope="module")
def registered(matrix, small_params, empty_store, tmp_path_factory):
    """Give the store in which a fit until a time is the champion; each is made once."""

    @cache
    def make(until: datetime) -> Path:
        folder = tmp_path_factory.mktemp("champion")
        file = Path(shutil.copy(empty_store, folder))
        train_bundle(matrix, quick(small_params), folder / "bundle", registry=f"sqlite:///{file}", until=until)
        reason = "the test begins with it"
        promote(None, quick(small_params), registry=f"sqlite:///{file}", model="predrain", force_reason=reason)
        return file

    return make


def other(params: Params) -> Params:
    return params.model_copy(update={"training": params.training.model_copy(update={"negative_ratio": 150})})


def gate(params: Params, **limits: object) -> Params:
    return params.model_copy(update={"promotion": params.promotion.model_copy(update=limits)})


def test_the_first_fit_goes_live_and_a_second_run_keeps_it(matrix: FeatureMatrix, params: Params, store: str) -> None:
    first = retrain(matrix, params, registry=store, model="predrain")
    assert (first.action, first.champion_before, first.champion) == ("promoted", None, 1)
    again = retrain(matrix, params, registry=store, model="predrain")
    assert (again.action, again.champion) == ("kept", 1)


@pytest.mark.parametrize("until", [OLD, NEWER])
def test_the_champions_recipe_with_newer_data_goes_live_though_nothing_is_decided(
    matrix: FeatureMatrix, params: Params, store: str, tmp_path: Path, registered: RegistryAt, until: datetime
) -> None:
    undecided = gate(params, min_incidents=10_000, risk_ratio=(0.01, 100.0), brier_margin=9.0)
    shutil.copy(registered(until), tmp_path)
    result = retrain(matrix, undecided, registry=store, model="predrain")
    assert (result.action, result.champion) == ("promoted", 2)
    assert result.reason.startswith("the recipe of the champion")
    assert (result.verdict is None) == (until == NEWER)


def test_another_recipe_has_to_pass_the_gate(matrix, params, store, tmp_path, registered):
    shutil.copy(registered(NEWER), tmp_path)
    undecided = gate(other(params), min_incidents=10_000)
    refused = retrain(matrix, undecided, registry=store, model="predrain")
    assert (refused.action, refused.champion) == ("refused", 1)
    assert champion_history(store, "predrain").champion == 1
    lenient = gate(
        other(params), precision_margin=1.0, margin_share=1.0, risk_ratio=(0.001, 1000.0), brier_margin=99.0,
        recall_margin=1.0, min_incidents=1,
    )  # fmt: skip
    passed = retrain(matrix, lenient, registry=store, model="predrain")
    assert (passed.action, champion_history(store, "predrain").champion) == ("promoted", passed.version), passed.reason


def test_a_recipe_that_is_shown_to_be_worse_is_refused(matrix, params, store, tmp_path, registered):
    shutil.copy(registered(OLD), tmp_path)
    impossible = gate(params, risk_ratio=(0.0001, 0.0002))
    refused = retrain(matrix, impossible, registry=store, model="predrain")
    assert refused.action == "refused"
    assert "worse in" in refused.reason
    page = page_of(OLD, refused)
    (line,) = [line for line in page.splitlines() if line.startswith("predrain_retrain_refused{")]
    failed = [criterion.name for criterion in refused.verdict.criteria if criterion.outcome == "failed"]
    assert all(name in line for name in failed)
    assert "predrain_retrain_success 0" in page
    assert champion_history(store, "predrain").champion == 1


@pytest.mark.parametrize(("flood", "limits", "reason"), [(4, (0.5, 2.0), FLOOD), (10**9, (0.9, 1.1), MEAN_RISK)])
def test_a_fit_to_a_week_of_wrong_labels_is_refused_though_nothing_can_be_compared(
    small_fleet, matrix, params, store, tmp_path, registered, monkeypatch, flood, limits, reason
):
    monkeypatch.setattr(retraining, "_FLOOD_FACTOR", flood)
    params = gate(params, min_incidents=5, risk_ratio=limits)
    shutil.copy(registered(NEWER), tmp_path)
    dataset = tmp_path / "fleet"
    shutil.copytree(small_fleet, dataset)
    events = pq.read_table(dataset / "events.parquet")
    gpus = pq.read_table(dataset / "inventory.parquet", columns=["gpu", "node"]).to_pylist()
    (failure, *_) = events.filter(pc.field("type") == "failure").to_pylist()
    times = [matrix.span[1] - timedelta(hours=10 + 150 * at / len(gpus)) for at in range(len(gpus))]
    false_failures = [failure | gpu | {"timestamp": at, "known_at": at} for gpu, at in zip(gpus, times, strict=True)]
    all_events = pa.concat_tables([events, pa.Table.from_pylist(false_failures, schema=events.schema)])
    pq.write_table(all_events.sort_by("timestamp"), dataset / "events.parquet")
    broken = make_matrix(dataset, params, tmp_path / "broken")
    refused = retrain(broken, params, registry=store, model="predrain")
    assert (refused.action, refused.verdict, champion_history(store, "predrain").champion) == ("refused", None, 1)
    assert f'refused{{reason="{reason}"}} 1' in page_of(OLD, refused)
    assert reason in summary_text(refused)


@pytest.mark.parametrize(("weeks", "action"), [(1, "promoted"), (3, "refused")])
def test_a_fit_to_weeks_in_which_events_stayed_away_is_refused_once_chance_does_not_explain_it(
    small_fleet, params, store, tmp_path, registered, monkeypatch, weeks, action
):
    monkeypatch.setattr(retraining, "_RECENT", timedelta(weeks=weeks))
    shutil.copy(registered(NEWER), tmp_path)
    dataset = tmp_path / "fleet"
    shutil.copytree(small_fleet, dataset)
    events = pq.read_table(dataset / "events.parquet")
    end = pc.scalar(datetime(2026, 2, 15, tzinfo=UTC) - timedelta(weeks=3))
    pq.write_table(events.filter(pc.field("timestamp") < end), dataset / "events.parquet")
    lenient = gate(params, min_incidents=10_000)
    result = retrain(make_matrix(dataset, params, tmp_path / "quiet"), lenient, registry=store, model="predrain")
    assert result.action == action
    assert (f'refused{{reason="{QUIET}"}} 1' in page_of(OLD, result)) is (action == "refused")


def test_what_cannot_be_compared_for_another_reason_than_too_little_data_does_not_go_live(
    matrix, params, store, tmp_path, registered, monkeypatch
):
    shutil.copy(registered(OLD), tmp_path)
    damaged = InputError("is damaged", "the champion", "Train it again.")
    monkeypatch.setattr(retraining, "compared", lambda *_: (_ for _ in ()).throw(damaged))
    with pytest.raises(InputError, match="is damaged"):
        retrain(matrix, params, registry=store, model="predrain")
    assert champion_history(store, "predrain").champion == 1


def test_a_run_after_one_that_was_killed_before_its_promotion_ends_right(matrix, params, store, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(retraining, "carry_out", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            retrain(matrix, params, registry=store, model="predrain")
    assert champion_history(store, "predrain").champion is None
    assert retrain(matrix, params, registry=store, model="predrain").champion == 1


def test_scoring_waits_for_the_first_champion(
    small_fleet: Path, store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scores = tmp_path / "scores"
    result = invoke("score", "--dataset", small_fleet, "--model", "champion", "--registry", store, "--out", scores)
    assert result.output.count("no model predrain is registered yet") == 1
    assert caplog.messages == [], "the reason is reported once"
    assert not (scores / TEXTFILE).exists(), "waiting is neither a success nor a failure"
    assert registry_of(store) is None


@pytest.fixture(scope="module")
def tiny_fleet(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a fleet of 16 GPUs, which over 20 days ends before :data:`NEWER`."""

    def make(seed: int, days: int, last_event: datetime | None = None) -> Path:
        dataset = tmp_path_factory.mktemp("tiny") / "fleet"
        simulate(dataset, gpus=16, days=days, seed=seed, scenario="base", acceleration=60.0)
        if last_event is not None:
            events = pq.read_table(dataset / "events.parquet")
            late = events.slice(0, 1).to_pylist()[0] | {"timestamp": last_event, "known_at": last_event}
            all_events = pa.concat_tables([events, pa.Table.from_pylist([late], schema=events.schema)])
            pq.write_table(all_events.sort_by("timestamp"), dataset / "events.parquet")
            facts = json.loads((dataset / "dataset.json").read_text())
            facts["span"][1] = last_event.isoformat()
            (dataset / "dataset.json").write_text(json.dumps(facts))
        return dataset

    return make


def registry_of(store: str) -> ChampionHistory | None:
    try:
        return champion_history(store, "predrain")
    except TooEarlyError:
        return None


@pytest.mark.parametrize(
    ("champion", "data", "message"),
    [
        (NEWER, (5, 20), r"data ends at 2026-01-2\d .*before version 1, the champion, was fitted"),
        (OLD, (6, 30), "another fleet: it has 0% of the gpus"),
        (None, (5, 20, datetime(2026, 3, 1, tzinfo=UTC)), r"no telemetry after 2026-01-2\d, .*data ends on 2026-03-01"),
    ],
)
def test_data_that_does_not_continue_the_champions_is_refused_before_the_fit(
    tiny_fleet, small_params_file, store, tmp_path, registered, champion, data, message
):
    if champion is not None:
        shutil.copy(registered(champion), tmp_path)
    dataset = tiny_fleet(*data)
    history = registry_of(store)
    arguments = ("retrain", "--dataset", dataset, "--params", small_params_file, "--registry", store)
    assert re.search(message, invoke(*arguments, code=1).output)
    assert registry_of(store) == history
    assert "predrain_retrain_success 0" in dataset.with_name("fleet-retrain.prom").read_text()


def test_scoring_fails_where_the_registry_lost_a_model_that_scored_before(
    small_fleet: Path, store: str, empty_store: Path, tmp_path: Path, registered: RegistryAt
) -> None:
    shutil.copy(registered(NEWER), tmp_path)
    scores = tmp_path / "scores"

    arguments = ["score", "--dataset", small_fleet, "--model", "champion", "--out", scores, "--at", "2026-02-10T00:00Z"]
    invoke(*arguments, "--registry", store)
    failed = invoke(*arguments, "--registry", f"sqlite:///{empty_store}", code=1)
    assert "the registry no longer has a champion" in failed.output
    assert "predrain_score_success 0" in (scores / TEXTFILE).read_text()


EARLY, LATE = datetime(2026, 1, 22, tzinfo=UTC), datetime(2026, 1, 29, tzinfo=UTC)


@pytest.fixture(scope="module")
def world(small_fleet: Path, small_params: Params, empty_store: Path, tmp_path_factory: pytest.TempPathFactory):
    """A matrix, lenient params, and a store with two versions, trained until different times."""
    folder = tmp_path_factory.mktemp("life")
    # a fleet this small is told apart by what all members see
    models = small_params.models.model_copy(update={"groups": {}})
    small_params = small_params.model_copy(update={"models": models})
    matrix = make_matrix(small_fleet, small_params, folder / "matrix")
    store = f"sqlite:///{shutil.copy(empty_store, folder)}"
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
    with pytest.raises(InputError, match=r"no decisions to compare on: whole knows labels up to.*--until 2026-01-3"):
        untouched(matrix, [*bundles, ("whole", load_bundle(folder / "whole"))], timedelta(days=28))


def test_a_model_lives_from_its_first_promotion_to_a_rollback(world) -> None:
    folder, matrix, store, params = world
    tried = promote(lambda: matrix, params, registry=store, model="predrain", to=1, dry_run=True)
    assert tried.verdict.champion == "history_count, vendor_rules"
    assert champion_history(store, "predrain").champion is None
    strict = params.model_copy(update={"promotion": params.promotion.model_copy(update={"min_incidents": 10_000})})
    refused = promote(lambda: matrix, strict, registry=store, model="predrain", to=1)
    assert (refused.action, refused.champion) == ("refused", None)
    first = promote(None, params, registry=store, model="predrain", to=1, force_reason="nobody else")
    assert (first.action, first.champion_before, first.champion) == ("forced", None, 1)
    second = promote(lambda: matrix, params, registry=store, model="predrain", force_reason="take it whatever it is")
    assert (second.version, second.verdict.challenger, second.verdict.champion) == (2, "version 2", "version 1")
    assert second.champion == champion_history(store, "predrain").champion == 2
    with pytest.raises(InputError, match="version 2 is already the champion"):
        promote(lambda: matrix, params, registry=store, model="predrain")
    (bundle,) = (folder / "mlartifacts").glob("predrain/models/*/artifacts/artifacts/early")
    gone = bundle.rename(folder / "gone")
    with pytest.raises(InputError, match=r"contains no bundles.*Bring the files of version 1 back"):
        roll_back(registry=store, model="predrain")
    assert champion_history(store, "predrain").champion == 2
    gone.rename(bundle)
    back = roll_back(registry=store, model="predrain", reason="precision fell")
    assert (back.action, back.version, back.champion) == ("rolled back", 2, 1)
    assert champion_history(store, "predrain").history == (1,)
    with pytest.raises(InputError, match="version 1 has no previous champion"):
        roll_back(registry=store, model="predrain")
    with opened_store(store) as mlflow:
        client = mlflow.MlflowClient()
        runs = client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id], order_by=["start_time"])
        assert [run.data.tags["decision"] for run in runs] == ["refused", "forced", "promoted", "rolled back"]
        assert [run.data.tags["applied"] for run in runs] == ["nothing to apply", "yes", "yes", "yes"]
        record = mlflow.artifacts.download_artifacts(run_id=runs[2].info.run_id)
        assert json.loads((Path(record) / "verdict.json").read_text())["version"] == 2
        assert "## Comparison at promotion" in (Path(record) / "MODEL_CARD.md").read_text()
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
    copy = FeatureMatrix(matrix.path, matrix.meta)
    bundle = load_bundle(folder / "early")
    bundle.manifest["params"]["labels"]["horizon"] = "2d"
    with pytest.raises(InputError, match=r"early was trained for labels\.horizon 2d, but the matrix has 1d"):
        untouched(copy, [("early", bundle)], timedelta(days=28))
