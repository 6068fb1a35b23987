"""Runs and model versions in MLflow's own database, without a network."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from foundation.errors import InputError
from models.bundle.store import save_bundle
from models.registry import champion
from models.registry import store as registry
from models.registry.champion import PREVIOUS_TAG, champion_history, restore_previous, set_champion, version_at
from models.registry.store import log_run
from tests.models.small_models import COLUMNS, T0, fitted_models, rows
from tests.processes import printed_by


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A database with one run and two versions of a model: (uri, run id, versions, bundle)."""
    folder = tmp_path_factory.mktemp("store")
    bundle = save_bundle(folder / "bundle", fitted_models(), {"profile": "mean_rank"})
    uri = f"sqlite:///{folder / 'tracking' / 'mlflow.db'}"
    note = folder / "note.txt"
    note.write_text("kept")
    run = log_run(
        uri,
        "backtest",
        params={f"models.p{i}": i for i in range(130)} | {"long": "x" * 9000},
        metrics={"precision": 0.25, "recall": None, "brier": float("nan")},
        tags={"dataset_digest": "d1", "code_revision": "c1"},
        artifacts=[note, bundle.path],
        name="first",
    )
    first = save_bundle(folder / "first", fitted_models(), {"profile": "lightgbm"})
    versions = [
        registry.register_bundle(uri, "predrain", stored.path, run_id=run) for stored in (first, bundle, bundle)
    ]
    return uri, run, versions, bundle


def client(uri):
    with registry.opened_store(uri) as mlflow:
        return mlflow.MlflowClient(uri, uri)


def test_a_run_keeps_params_metrics_tags_and_artifacts(store):
    uri, run_id, _, bundle = store
    run = client(uri).get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    assert len(run.data.params) == 131
    assert run.data.params["models.p7"] == "7"
    assert run.data.metrics == {"precision": 0.25}
    assert run.data.tags["dataset_digest"] == "d1"
    (recorded,) = run.inputs.dataset_inputs
    assert (recorded.dataset.name, recorded.dataset.digest) == ("dataset", "d1")
    with registry.opened_store(uri) as mlflow:
        manifest = mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path="bundle/manifest.json")
    assert Path(manifest).read_bytes() == (bundle.path / "manifest.json").read_bytes()


def test_a_damaged_store_is_reported_in_one_line(tmp_path):
    (tmp_path / "bad.db").write_text("hello, this is no database\n" * 100)
    with (
        pytest.raises(InputError, match=r"MLflow .*not a database.*Check that the store exists"),
        registry.opened_store(f"sqlite:///{tmp_path / 'bad.db'}") as mlflow,
    ):
        mlflow.MlflowClient().search_experiments(max_results=1)


def test_the_challenger_is_the_version_registered_last_and_a_bundle_is_one_version(store):
    uri, _, versions, bundle = store
    assert versions == [1, 2, 2]
    assert champion_history(uri, "predrain").aliases == {registry.CHALLENGER: 2}
    assert client(uri).get_model_version("predrain", "2").tags["bundle_digest"] == bundle.digest


def test_the_registered_model_answers_with_the_profiles_risks(store):
    uri = store[0]
    X, _ = rows(30, seed=5)
    X[np.isnan(X)] = 0
    frame = pd.DataFrame(X.astype(float), columns=[column.name for column in COLUMNS])
    frame["unit"] = [f"g{i:02d}" for i in range(30)]
    with registry.opened_store(uri) as mlflow:
        model = mlflow.pyfunc.load_model("models:/predrain/2")
        answered = model.predict(frame)
        timed = model.predict(frame.assign(decision_time=T0.isoformat()))
    scored = fitted_models().score(X, pd.Series([T0] * 30), frame["unit"])
    expected = scored[scored["model"] == "mean_rank"].reset_index(drop=True)
    assert list(answered["unit"]) == list(frame["unit"])
    np.testing.assert_array_equal(answered["risk"], expected["risk"].astype(float))
    np.testing.assert_array_equal(answered["rank"], expected["rank"])
    np.testing.assert_array_equal(answered["alert"], expected["alert"])
    pd.testing.assert_frame_equal(timed, answered)


def test_a_version_comes_with_an_example_that_it_answers(store):
    uri, _, versions, _ = store
    with registry.opened_store(uri) as mlflow:
        example = mlflow.models.Model.load(f"models:/predrain/{versions[0]}").load_input_example()
        model = mlflow.pyfunc.load_model(f"models:/predrain/{versions[0]}")
        assert list(model.predict(example)["unit"]) == ["GPU-0", "GPU-1"]


def test_the_registered_model_refuses_in_words_what_it_cannot_score(store):
    X, _ = rows(2, seed=5)
    X[np.isnan(X)] = 0
    frame = pd.DataFrame(X.astype(float), columns=[column.name for column in COLUMNS])
    frame["unit"] = ["g1", "g2"]
    hot = COLUMNS[0].name
    with registry.opened_store(store[0]) as mlflow:
        model = mlflow.pyfunc.load_model("models:/predrain/2")
        for changed, message in (
            ({"unit": ["g1", None]}, "row 1 has no unit. Give the GPU (or node) of each row."),
            ({hot: [60.0, float("inf")]}, f"{hot} of row 1 is inf, which is infinite in 32 bits. Give a finite number"),
            ({hot: [-1e39, 60.0]}, f"{hot} of row 0 is -1e+39, which is infinite in 32 bits. Give a finite number"),
            (
                {"decision_time": ["2026-01-01T00:00:00Z", "2026-13-01"]},
                "decision_time of row 1 is '2026-13-01', which is not a time. Give it as 2026-01-31T06:00:00Z.",
            ),
            ({"decision_time": [None, T0.isoformat()]}, "row 0 has no decision_time. Give it for all rows, or for"),
            ({"decision_time": ["", ""]}, "decision_time of row 0 is '', which is not a time."),
        ):
            with pytest.raises(mlflow.exceptions.MlflowException, match=re.escape(message)):
                model.predict(frame.assign(**changed))
        with_unknown = model.predict(frame.assign(**{hot: [None, 61.0]}))
        assert with_unknown["risk"].between(0, 1).all()
        two = model.predict(frame.assign(decision_time=["2026-01-01T00:00:00Z", "2026-01-01T06:00:00+00:00"]))
        assert list(two["rank"]) == [1, 1]  # each is the riskiest of its time
        one = model.predict(frame.assign(decision_time=["2026-01-01T00:00:00Z", "2026-01-01T02:00:00+02:00"]))
        assert sorted(one["rank"]) == [1, 2]


def test_nothing_is_pickled_and_artifacts_stand_beside_the_database(store):
    folder = store[3].path.parent / "tracking"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"pyfunc.py", "manifest.json", "note.txt", "mlflow.db"} <= {path.name for path in files}
    assert not [path for path in files if path.suffix in (".pkl", ".pickle")]


def test_a_run_is_recorded_once_with_its_steps_and_filled_after_a_kill(store, monkeypatch):
    uri = store[0]

    def log(last):
        steps = [{"refit.precision": value} for value in (0.1, None, last)]
        return log_run(
            uri, "series", name="b", params={"p": 1}, metrics={"all": 0.5}, tags={}, steps=steps, only_once=True
        )

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("mlflow.MlflowClient.set_terminated", killed)
        with pytest.raises(KeyboardInterrupt):
            log(0.3)
    run_id = log(0.3)
    assert log(0.3) == run_id
    assert log(0.4) != run_id
    mlflow_client = client(uri)
    assert len(mlflow_client.search_runs([mlflow_client.get_experiment_by_name("series").experiment_id])) == 2
    run = mlflow_client.get_run(run_id)
    assert run.info.status == "FINISHED"
    history = mlflow_client.get_metric_history(run_id, "refit.precision")
    assert [(metric.step, metric.value) for metric in history] == [(0, 0.1), (2, 0.3)]


def test_champions_follow_each_other_and_are_unwound_step_by_step(store):
    uri = store[0]
    set_champion(uri, "predrain", 2, expected=champion_history(uri, "predrain").champion, tags={"why": "first"})
    start = champion_history(uri, "predrain").history
    set_champion(uri, "predrain", 1, expected=2, tags={})
    assert champion_history(uri, "predrain").history == (*start, 1)
    assert version_at(uri, "predrain", 1).tags[PREVIOUS_TAG] == "2"
    with pytest.raises(InputError, match=r"the champion was version 2 .* and is version 1 now"):
        set_champion(uri, "predrain", 2, expected=2, tags={})
    assert restore_previous(uri, "predrain", expected=1, tags={"rolled_back_reason": "worse"}) == 2
    assert champion_history(uri, "predrain").history == start
    assert champion_history(uri, "predrain").aliases[registry.CHAMPION] == 2


@pytest.mark.parametrize(
    ("written", "alias", "history"),
    [
        ("[1,2]", 2, (1, 2)),
        ("[1,2,3]", 2, (1, 2)),  # killed between the two writes of a promotion, or of a rollback
        ("[1,2]", 7, (1, 2, 7)),  # moved by somebody else
        (None, 1, (1,)),  # killed after the first champion got the alias
        ("nonsense", 2, (2,)),
        ("7", 2, (2,)),
    ],
)
def test_the_history_ends_with_the_alias_wherever_a_kill_came(written, alias, history):
    assert champion._repair_history(champion._parse_history(written), alias) == history


def test_two_promotions_at_once_do_not_interleave(store):
    with (
        champion.promotion_lock(store[0]),
        pytest.raises(InputError, match="another promotion is running on this store"),
        champion.promotion_lock(store[0]),
    ):
        pass
    with champion.promotion_lock(store[0]):
        pass


def test_an_absent_store_is_not_made(tmp_path):
    with pytest.raises(InputError, match="store does not exist"):
        champion_history(f"sqlite:///{tmp_path / 'absent.db'}", "predrain")
    assert not (tmp_path / "absent.db").exists()


def test_a_store_or_model_that_does_not_exist_is_refused(store, tmp_path):
    with pytest.raises(InputError, match=r"'\./mlruns' is not an MLflow 3 store .*Give sqlite:///PATH"):
        log_run("./mlruns", "x", name="r", params={}, metrics={}, tags={})
    with pytest.raises(InputError, match=r"no model nobody is registered yet"):
        champion_history(store[0], "nobody")
    with pytest.raises(InputError, match="no bundle in"):
        registry.register_bundle(store[0], "predrain", tmp_path / "nowhere", run_id=store[1])
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot create the folder of the store"):
        version_at(f"sqlite:///{tmp_path / 'file' / 'x' / 'mlflow.db'}", "predrain", 1)


def test_the_module_itself_does_not_import_mlflow():
    assert printed_by("import sys, models.registry.store; print('mlflow' in sys.modules)") == "False\n"
