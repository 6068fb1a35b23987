from dataclasses import replace
from datetime import timedelta
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from models.bundle.store import load_bundle, save_bundle
from models.calibration.horizons import HorizonLabels, HorizonMap, Link, add_risks, fit_horizons
from models.config import ModelsSection, TrainingSection
from models.training.trainer import Trainer
from tests.models.fake_matrix import FakeMatrix
from tests.models.small_models import fitted_models

H = timedelta(hours=1)
links = st.builds(Link, st.just(0.0), st.floats(-20, 20), st.floats(0, 3))


@settings(deadline=None, max_examples=100)
@given(
    shorter=st.lists(links, max_size=3),
    longer=st.lists(links, max_size=2),
    base=st.floats(-12, 0),
    risks=st.lists(st.floats(1e-6, 1 - 1e-6), min_size=1, max_size=50),
)
def test_risks_never_fall_with_the_horizon_nor_with_the_risk_and_keep_the_main_one(shorter, longer, base, risks):
    fitted_map = HorizonMap(24.0, base, tuple(shorter), tuple(longer))
    risk = np.sort(np.array(risks))
    out = fitted_map.risks(risk)
    assert (np.diff(out, axis=1) >= 0).all()
    assert (np.diff(out, axis=0) >= -1e-15).all()
    assert ((out >= 0) & (out <= 1)).all()
    np.testing.assert_array_equal(out[:, len(shorter)], risk)


def fleet(seed, n=60_000, more=1.6):
    """Exponential times to failure, with what comes within a day coming sooner the higher the risk."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=n)
    hazard = expit(-5 + more * z) / 24
    hours = rng.exponential(1, n) / hazard
    risk = 1 - np.exp(-24 * hazard)
    labels = {h * H: HorizonLabels((hours <= h).astype(int), int((hours <= h).sum())) for h in (1, 6, 24, 72)}
    return risk, labels


def fitted(seed=0):
    risk, labels = fleet(seed)
    further = {span: labels[span] for span in labels if span != 24 * H}
    fitted_map = fit_horizons(risk, labels[24 * H], further, horizon=24 * H, base_rate=labels[24 * H].label.mean())
    return fitted_map, risk, labels


def test_each_horizon_is_calibrated_on_rows_it_has_not_seen():
    fitted_map, _, _ = fitted(0)
    assert fitted_map.hours == (1.0, 6.0, 24.0, 72.0)
    risk, labels = fleet(1)
    out = fitted_map.risks(risk)
    top = np.argsort(-risk)[:6000]
    for i, hours in enumerate(fitted_map.hours):
        y = labels[hours * H].label
        assert out[:, i].mean() == pytest.approx(y.mean(), rel=0.25)
        assert out[top, i].mean() == pytest.approx(y[top].mean(), rel=0.3)


def test_without_incidents_the_hazard_is_taken_as_constant():
    none = HorizonLabels(np.zeros(100, int), 0)
    fitted_map = fit_horizons(np.full(100, 0.001), none, {6 * H: none, 72 * H: none}, horizon=24 * H, base_rate=0.001)
    out = fitted_map.risks(np.array([0.001]))[0]
    assert out[0] == pytest.approx(0.001 / 4, rel=1e-6)
    assert out[2] == pytest.approx(0.003, rel=0.01)


def test_labels_that_are_not_known_yet_do_not_count():
    risk, labels = fleet(0)
    hidden = dict(labels)
    half = np.arange(len(risk)) % 2 == 0
    for hours in (1, 72):
        label = np.where(half, 1 - labels[hours * H].label, labels[hours * H].label)
        hidden[hours * H] = HorizonLabels(np.where(half, -1, label), labels[hours * H].incidents)
    out = fit_horizons(risk, labels[24 * H], hidden, horizon=24 * H, base_rate=0.01)
    halved = {span: HorizonLabels(np.where(half, -1, known.label), known.incidents) for span, known in labels.items()}
    halved[6 * H] = labels[6 * H]
    assert out == fit_horizons(risk, labels[24 * H], halved, horizon=24 * H, base_rate=0.01)


def test_rows_of_several_folds_take_their_own_maps():
    maps = [HorizonMap(24.0, -5.0, (Link(6.0, -1.0 - i, 0.1),)) for i in range(2)]
    risk, fold = np.array([0.01, 0.02, 0.03]), np.array([1, 0, 1])
    out = add_risks(risk, fold, maps)
    assert list(out) == ["risk_6h", "risk_24h"]
    for i in range(3):
        assert out["risk_6h"][i] == np.float32(maps[fold[i]].risks(risk[i : i + 1])[0, 0])


def test_a_bundle_keeps_the_horizons_and_scores_them_alike(tmp_path):
    maps = {
        name: HorizonMap(24.0, -6.0, (Link(6.0, -1.2, 0.1),), (Link(72.0, -5.0, 0.5),)) for name in ("mlp", "logistic")
    }
    fitted = replace(fitted_models(), horizons=maps)
    loaded = save_and_load(fitted, tmp_path)
    assert loaded.horizons == maps
    scores = np.linspace(-8, 2, 20, dtype=np.float32)
    reported = loaded.risks("mlp", scores)
    assert list(reported) == ["risk_6h", "risk_24h", "risk_72h"]
    np.testing.assert_array_equal(reported["risk_24h"], loaded.risk("mlp", scores))
    for name, values in fitted.risks("mlp", scores).items():
        np.testing.assert_array_equal(values, reported[name])
    assert loaded.risks("xgboost", scores) == {}


def save_and_load(fitted, path):
    save_bundle(path / "bundle", fitted, {"profile": "mlp"})
    return load_bundle(path / "bundle").fitted


def trained(matrix, level):
    section = ModelsSection(
        profile="logistic",
        learners=("logistic",),
        parallel={"members": ("logistic",)},
        cascade={"stages": ("logistic",)},
        horizons=(H, 6 * H, 24 * H, 72 * H),
        calibration={"level": level},
    )
    trainer = Trainer(matrix, training=TrainingSection(window=timedelta(days=20)), models=section, k=2, seed=1)
    refit = matrix.span[0] + timedelta(days=32)
    refit_ms = int(refit.timestamp() * 1000)
    return trainer.fit(refit_ms, trainer.labels_at(refit_ms), timedelta(days=20)), refit


@cache
def trained_once(level):
    return trained(FakeMatrix(incidents=60), level)


@pytest.mark.parametrize("level", ["slice", "recent"])
def test_a_refit_fits_the_horizons_of_the_profile_and_never_reads_the_future(level):
    fitted, refit = trained_once(level)
    assert set(fitted.horizons) == {"logistic"}
    fitted_map = fitted.horizons["logistic"]
    assert fitted_map.hours == (1.0, 6.0, 24.0, 72.0)
    # The link of the main horizon to itself: nothing is lost on the way.
    out = fitted_map.risks(np.array([0.01, 0.1]))
    assert (np.diff(out, axis=1) > 0).all()

    poisoned = FakeMatrix(incidents=60)
    late = poisoned.events["known_at"] > refit
    poisoned.events.loc[late, "unit"] = "gpu-001"
    again, _ = trained(poisoned, level)
    assert again.horizons == fitted.horizons
    assert again.calibrators == fitted.calibrators


def test_a_level_that_follows_recent_failures_moves_the_risks_and_no_rank():
    slice_level, recent = (trained_once(level)[0] for level in ("slice", "recent"))
    assert slice_level.calibrators["logistic"].slope == recent.calibrators["logistic"].slope
    assert slice_level.calibrators["logistic"].intercept != recent.calibrators["logistic"].intercept
