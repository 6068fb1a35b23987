from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import lightgbm
import numpy as np
import pytest
import xgboost
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score

from features.config import DecisionSection, LabelSection
from features.errors import InputError
from features.matrix.building import build_matrix
from features.matrix.matrix import FeatureMatrix
from models.bundle.store import load_bundle
from models.config import ModelsSection
from models.fit_facts import FitFacts
from models.fits import FitRows, LocalFits
from models.learners import make_learner
from models.odds import log_odds
from models.ranking import name_hashes
from models.sequence.tabular import FirstColumns
from models.spread import STRETCHES, ShareTask, SpreadOrder, deal, most_shares
from pipeline import dask_fits
from pipeline.dask_engine import DaskEngine
from pipeline.dask_fits import DaskFits, Team, running_tasks
from pipeline.stages import train_bundle
from tests.features.small_fleet import HOUR, SMALL, Training, gpus, inventory_of, samples_of, write_dataset

BOTH = ("lightgbm", "xgboost")
WHOLE = {"subsample": 1.0, "colsample_bytree": 1.0, "n_estimators": 50}

# Where a worker is killed, distributed leaves sockets to it to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")


@pytest.fixture(scope="module")
def cluster():
    with DaskEngine(workers=2, threads=1) as engine:
        yield engine
    gc.collect()  # here, and not in a test of another module


@pytest.fixture(scope="module")
def matrix(tmp_path_factory) -> FeatureMatrix:
    path = tmp_path_factory.mktemp("fleet")
    inventory = inventory_of(gpus(40))
    dataset = write_dataset(path / "fleet", inventory, hours=192, samples=samples_of(inventory, 192), buckets=4)
    return build_matrix(
        dataset,
        path / "matrix",
        decision=DecisionSection(every=HOUR),
        labels=LabelSection(horizon=6 * HOUR),
        features=SMALL.model_copy(update={"groups": ("telemetry",)}),
        training=Training(),
        seed=5,
    )


@pytest.fixture(scope="module")
def label(matrix) -> np.ndarray:
    """A thing to learn: hot and hungry GPUs are at risk, and chance is in it too."""
    hot, hungry = matrix.values(None, ["telemetry__gpu_temp_c__mean__4h", "telemetry__power_w__max__2h"]).T
    risk = np.nan_to_num((hot - 50) / 5) + np.nan_to_num((hungry - 85) / 10)
    risk += np.random.default_rng(3).normal(size=len(risk))
    return (risk > np.quantile(risk, 0.93)).astype(np.int64)


@pytest.fixture(scope="module")
def rows(matrix, label) -> FitRows:
    return rows_of(matrix, label, len(label) * 3 // 4)


def rows_of(matrix: FeatureMatrix, label: np.ndarray, count: int) -> FitRows:
    positions = np.arange(count)
    times = matrix.rows["decision_time"].astype("int64").to_numpy()[:count]
    ties = name_hashes(matrix.rows["unit"])[:count]
    return FitRows(label[:count], np.where(label[:count] == 1, 1.0, 1.5), ties, FitFacts(times, positions))


def made(*names: str, **settings) -> dict:
    return {name: make_learner(name, seed=7, settings=settings) for name in names}


def fitted_here(matrix: FeatureMatrix, rows: FitRows, unfitted: dict) -> dict:
    with LocalFits(matrix.values).on(rows) as fits:
        return fits.learners(unfitted)


def fitted_there(cluster, matrix: FeatureMatrix, rows: FitRows, unfitted: dict, scratch: Path) -> dict:
    with DaskFits(cluster, matrix, ModelsSection(), scratch / "scratch").on(rows) as fits:
        fitted = fits.learners(unfitted)
    assert list(scratch.iterdir()) == []
    return fitted


def content(learner) -> bytes:
    if isinstance(learner, lightgbm.LGBMClassifier):
        return learner.booster_.model_to_string().encode()
    return bytes(learner.get_booster().save_raw("ubj"))


@pytest.mark.system
def test_a_model_over_two_workers_is_close_to_one_of_this_process(cluster, matrix, label, rows, tmp_path):
    """The tolerance that docs/scale.md states, for fits that draw neither rows nor columns."""
    here = fitted_here(matrix, rows, made(*BOTH, **WHOLE))
    there = fitted_there(cluster, matrix, rows, made(*BOTH, **WHOLE), tmp_path)
    later = matrix.values()[len(rows.label) :]
    for name in BOTH:
        assert type(there[name]) is type(here[name])
        assert repr(there[name].get_params()) == repr(here[name].get_params())
        one, two = log_odds(here[name], later), log_odds(there[name], later)
        assert content(there[name]) != content(here[name])  # two workers did fit it
        assert np.abs(one - two).mean() < 0.2
        assert np.corrcoef(one, two)[0, 1] > 0.98
        precision = [average_precision_score(label[len(rows.label) :], each) for each in (one, two)]
        assert precision[1] == pytest.approx(precision[0], abs=0.03)
        assert precision[0] > 0.4


@pytest.mark.system
def test_fits_that_draw_rows_and_columns_are_as_good_and_the_same_again(cluster, matrix, label, rows, tmp_path):
    here = fitted_here(matrix, rows, made(*BOTH))
    there = fitted_there(cluster, matrix, rows, made(*BOTH, "logistic"), tmp_path)
    again = fitted_there(cluster, matrix, rows, made("xgboost", "lightgbm"), tmp_path)
    later, happened = matrix.values()[len(rows.label) :], label[len(rows.label) :]
    for name in BOTH:
        assert content(again[name]) == content(there[name])
        one, two = (average_precision_score(happened, log_odds(each[name], later)) for each in (here, there))
        assert two == pytest.approx(one, abs=0.06)
    assert list(there) == [*BOTH, "logistic"]
    assert np.array_equal(
        there["logistic"].predict_proba(later),
        fitted_here(matrix, rows, made("logistic"))["logistic"].predict_proba(later),
    )


def test_a_model_over_one_worker_is_the_same_bit_for_bit(cluster, matrix, label, tmp_path):
    first = np.zeros(len(label), dtype=np.int64)
    first[:150] = label[:150]  # only one share can hold positives, so only one worker fits
    rows = rows_of(matrix, first, 2000)
    assert most_shares(rows.label, 2) == 1
    balanced = made("lightgbm", class_weight="balanced") | made("xgboost", scale_pos_weight=3.0)
    here, there = fitted_here(matrix, rows, balanced), fitted_there(cluster, matrix, rows, balanced, tmp_path)
    for name in BOTH:
        assert content(there[name]) == content(here[name])
        assert np.array_equal(here[name].predict_proba(matrix.values()), there[name].predict_proba(matrix.values()))


def test_a_bundle_is_trained_on_a_cluster(cluster, small_backtest, small_params, tmp_path):
    matrix = FeatureMatrix.open(small_backtest / "matrix")
    here = train_bundle(matrix, small_params, tmp_path / "here")
    there = train_bundle(matrix, small_params, tmp_path / "there", engine=cluster)
    assert {**there, "bundle": None} == {**here, "bundle": None}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"]
    one, two = (
        {path.name: path for path in (tmp_path / name).rglob("*") if path.is_file()} for name in ("here", "there")
    )
    assert one.keys() == two.keys()
    assert one["logistic.skops"].read_bytes() == two["logistic.skops"].read_bytes()
    assert one["lightgbm.txt"].read_bytes() != two["lightgbm.txt"].read_bytes()
    bundles = [load_bundle(tmp_path / name, columns=matrix.columns) for name in ("here", "there")]
    times = matrix.rows["decision_time"]
    newest = np.flatnonzero(((times >= times.max() - 72 * HOUR) & ~matrix.rows["augmented"]).to_numpy())
    scored = [
        each.fitted.score(matrix.values(newest), times.iloc[newest], matrix.rows["unit"].iloc[newest])
        for each in bundles
    ]
    for name in ("lightgbm", "cascade", "mean_log_odds"):
        first, second = (frame[frame["model"] == name]["score"].to_numpy() for frame in scored)
        assert spearmanr(first, second).statistic > 0.5  # ten trees each, most rows without any sign


@pytest.mark.system
def test_a_model_says_nothing_of_the_machines_that_fitted_it(cluster, matrix, rows, tmp_path):
    text = content(fitted_there(cluster, matrix, rows, made("lightgbm", n_estimators=3), tmp_path)["lightgbm"]).decode()
    assert "127.0.0.1" not in text
    for line in ("[machines: ]", "[num_machines: 1]", "[local_listen_port: 12400]", "[tree_learner: serial]"):
        assert line in text


@pytest.mark.system
def test_a_learner_beside_sequences_keeps_to_its_columns(cluster, matrix, rows, tmp_path):
    order = SpreadOrder.write(tmp_path, matrix.path, matrix.digest, ModelsSection(), rows)
    X, y, weight = ShareTask(order, 3, (2.0, 5.0))(1, 2)
    mine = deal(len(rows.label), 2)[1]
    assert np.array_equal(X, matrix.values(mine)[:, :3], equal_nan=True)
    assert np.array_equal(weight, rows.weight[mine] * np.where(y == 1, 5.0, 2.0))
    order.remove()
    wrapped = {name: FirstColumns(learner, len(matrix.columns)) for name, learner in made(*BOTH).items()}
    there = fitted_there(cluster, matrix, rows, wrapped, tmp_path)
    plain = fitted_there(cluster, matrix, rows, made(*BOTH), tmp_path)
    for name in BOTH:
        assert content(there[name].classifier_) == content(plain[name])


class Killer(threading.Thread):
    """Kills a worker that is in the middle of a library's fit, a number of times."""

    def __init__(self, cluster: DaskEngine, times: int) -> None:
        super().__init__(daemon=True)
        self.cluster, self.times, self.killed, self.over = cluster, times, [], threading.Event()

    def run(self) -> None:
        while len(self.killed) < self.times and not self.over.wait(0.05):
            found = self.cluster.client.run(busy_pid, on_error="ignore")
            busy = sorted(pid for pid in found.values() if pid is not None and pid not in self.killed)
            if len(busy) == 2:  # both have begun
                time.sleep(0.3)
                os.kill(busy[0], signal.SIGKILL)
                self.killed.append(busy[0])

    def __enter__(self) -> Killer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join(timeout=60)


def busy_pid(dask_worker) -> int | None:
    fits = [key for key in running_tasks(dask_worker) if key.startswith(("_train_part-", "fn-"))]
    return os.getpid() if fits else None


def two_workers(cluster: DaskEngine) -> None:
    deadline = time.monotonic() + 60
    while len(cluster.workers) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("name", ["lightgbm", pytest.param("xgboost", marks=pytest.mark.system)])
def test_a_fit_that_loses_a_worker_begins_again_on_those_left(
    cluster, matrix, label, rows, tmp_path, monkeypatch, name
):
    two_workers(cluster)
    monkeypatch.setattr(dask_fits, "END_S", 2.0)
    monkeypatch.setattr(dask_fits, "NOTICE_S", 2.0)
    begun = []

    class Counted(Team):
        def __init__(self, *arguments) -> None:
            begun.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(dask_fits, "Team", Counted)
    with Killer(cluster, 1) as killer:
        there = fitted_there(cluster, matrix, rows, made(name, n_estimators=600), tmp_path)[name]
    assert len(killer.killed) == 1
    assert len(begun) == 2
    trees = there.booster_.num_trees() if name == "lightgbm" else there.get_booster().num_boosted_rounds()
    assert trees == 600
    later = matrix.values()[len(rows.label) :]
    assert average_precision_score(label[len(rows.label) :], log_odds(there, later)) > 0.4
    # nothing of the broken fit is left in the workers: a fit on one of them is what it would be here
    alone = fitted_there(cluster, matrix, rows, made("random_forest"), tmp_path)["random_forest"]
    here = fitted_here(matrix, rows, made("random_forest"))["random_forest"]
    assert np.array_equal(alone.predict_proba(later), here.predict_proba(later))


@pytest.mark.system
def test_a_fit_that_loses_a_worker_each_time_is_given_up(cluster, matrix, rows, tmp_path, monkeypatch):
    two_workers(cluster)
    monkeypatch.setattr(dask_fits, "RESTARTS", 0)
    with (
        Killer(cluster, 1),
        pytest.raises(InputError, match=r"fit of xgboost was begun 1 times and lost a worker each time; the last time"),
    ):
        fitted_there(cluster, matrix, rows, made("xgboost", n_estimators=3000), tmp_path)
    assert list(tmp_path.iterdir()) == []


def hangs(path: Path) -> None:
    path.touch()
    time.sleep(600)


def test_a_worker_that_hangs_in_a_broken_fit_is_ended(cluster, tmp_path, monkeypatch):
    two_workers(cluster)
    monkeypatch.setattr(dask_fits, "END_S", 0.5)
    monkeypatch.setattr(dask_fits, "NOTICE_S", 1.0)
    pinned = [sorted(cluster.workers)[0]]
    task = cluster.client.submit(hangs, tmp_path / "began", key="_train_part-hangs", workers=pinned, pure=False)
    while not (tmp_path / "began").exists():
        time.sleep(0.05)
    (hanging,) = [pid for pid in cluster.client.run(busy_pid).values() if pid is not None]

    def breaks() -> None:
        raise lightgbm.basic.LightGBMError("Socket recv error, Connection reset by peer (code: 104)")

    def fit() -> None:
        with Team(cluster, 2) as team:
            team.run("lightgbm", breaks)

    with pytest.raises(dask_fits.BrokenTeamError, match="did not reach each other: Socket recv error"):
        fit()
    task.release()
    deadline = time.monotonic() + 30
    while hanging in cluster.client.run(os.getpid, on_error="ignore").values():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.system
@pytest.mark.parametrize(("name", "setting"), [("lightgbm", {"num_leaves": 1}), ("xgboost", {"subsample": 7.0})])
def test_a_setting_that_the_library_refuses_is_told_once(cluster, matrix, rows, tmp_path, monkeypatch, name, setting):
    two_workers(cluster)
    monkeypatch.setattr(dask_fits, "NOTICE_S", 0.5)
    (refused,) = setting
    with pytest.raises(InputError, match=rf"(?s)^{name} could not be fitted over 2 workers: .*{refused}"):
        fitted_there(cluster, matrix, rows, made(name, **setting), tmp_path)


def test_a_worker_that_reads_for_too_long_is_named(cluster, matrix, rows, tmp_path, monkeypatch):
    two_workers(cluster)
    monkeypatch.setattr(dask_fits, "EXCHANGE_S", 0)
    with pytest.raises(InputError, match=r"not read its rows within 0 seconds \(worker tls://127\.0\.0\.1:\d+"):
        fitted_there(cluster, matrix, rows, made("xgboost"), tmp_path)


def test_a_worker_that_does_not_see_the_rows_says_so(matrix, rows, tmp_path):
    order = SpreadOrder.write(tmp_path, matrix.path, matrix.digest, ModelsSection(), rows)
    task = ShareTask(replace(order, folder=tmp_path / "elsewhere"), 3, (1.0, 1.0))
    with pytest.raises(InputError, match=r"a worker does not see the rows that it is to fit on .*elsewhere"):
        task(0, 1)
    with pytest.raises(InputError, match=r"a worker sees another matrix"):
        ShareTask(replace(order, digest="another"), 3, (1.0, 1.0))(0, 1)


def test_a_share_is_asked_for_in_a_few_kilobytes(matrix, rows, tmp_path):
    order = SpreadOrder.write(tmp_path, matrix.path, matrix.digest, ModelsSection(), rows)
    assert len(pickle.dumps((ShareTask(order, len(matrix.columns), (1.0, 1.0)), 0, 2))) < 20_000
    read = order.read()
    for name in ("label", "weight", "groups", "positions"):
        assert np.array_equal(getattr(read, name), getattr(rows, name))


@given(count=st.integers(0, 400), of=st.integers(1, 9))
def test_each_row_is_dealt_to_one_share_and_shares_are_alike(count, of):
    shares = deal(count, of)
    assert sorted(np.concatenate(shares)) == list(range(count))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= STRETCHES
    for share in shares:
        assert (np.diff(share) > 0).all()
        assert (np.diff(share) > 1).sum() < STRETCHES


@given(label=st.lists(st.integers(0, 1), min_size=1, max_size=120), most=st.integers(1, 6))
def test_no_share_holds_one_class_only_unless_there_is_but_one(label, most):
    found = most_shares(np.array(label), most)
    assert 1 <= found <= most

    def good(of: int) -> bool:
        return all({label[at] for at in share} == {0, 1} for share in deal(len(label), of))

    assert found == 1 or good(found)
    assert not any(good(of) for of in range(found + 1, most + 1))


def test_xgboost_and_lightgbm_are_what_is_spread():
    spread = [name for name in (*BOTH, "random_forest") if dask_fits.can_spread(make_learner(name, seed=1))]
    assert spread == list(BOTH)
    assert isinstance(make_learner("xgboost", seed=1), xgboost.XGBClassifier)
