"""Learners by name, with default settings for rare failures; includes the factories of the five classic ones.

Each is a plain scikit-learn classifier: ``fit(X, y, sample_weight=None)``, ``predict_proba(X)``, NaN allowed. The same
data, seed and settings give a bit-identical model.

Defaults are strongly regularized: training windows contain tens of incidents and hundreds of features, and on simulated
fleets fewer leaves, fewer features per tree and larger penalties each raised precision at the alert budget.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import joblib
import lightgbm
import numpy as np
import xgboost
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from threadpoolctl import threadpool_limits

from foundation.errors import InputError
from foundation.text import nearest_hint
from models.config import ALL_LEARNERS, SEQUENCE, THREADS, Recipe
from models.learners.prepared import PreparedClassifier
from models.rows.ranking import Ints

CONCURRENT_LEARNERS = 2
"""Learners fitted concurrently; does not change the result."""

_UNREACHABLE = 1e9

_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: | at \S+, line \d+ ?\.?$")
"""Source location that a library adds to its messages."""

_LIGHTGBM: dict[str, Any] = {
    # Few and large leaves: the positives of a training set come from tens of incidents, not hundreds.
    "n_estimators": 150,
    "learning_rate": 0.05,
    "num_leaves": 4,
    "min_child_samples": 40,
    # A leaf of 40 rows at a rate of 0.07 % has a hessian of 0.03. The minimum must be well below that, or no leaf can
    # hold the positives; without the L2 term, the Newton step of such a leaf is so large that the model collapses.
    "min_child_weight": 1e-4,
    "reg_lambda": 5.0,
    "subsample": 0.7,
    "subsample_freq": 1,
    "colsample_bytree": 0.2,
    "max_bin": 127,
    "n_jobs": THREADS,
}

_XGBOOST: dict[str, Any] = {
    "n_estimators": 150,
    "learning_rate": 0.05,
    "max_depth": 2,
    # Sum of hessians, p(1 - p) per row: see above.
    "min_child_weight": 0.02,
    "reg_lambda": 5.0,
    "max_delta_step": 2.0,
    "subsample": 0.7,
    "colsample_bytree": 0.2,
    "max_bin": 128,
    "n_jobs": THREADS,
}

MANY_INCIDENTS = 500
"""Incidents from which boosted trees get larger. On subsets of Titan's GPUs, small trees rank better up to 370
incidents; large ones are no worse at 710 and better at 1,410 (docs/decisions/0026)."""

_MANY: dict[str, dict[str, Any]] = {"lightgbm": {"num_leaves": 8}, "xgboost": {"max_depth": 3}}

_RANDOM_FOREST: dict[str, Any] = {
    "n_estimators": 50,
    "max_depth": 7,
    "min_samples_leaf": 10,
    "max_features": "sqrt",
    "max_samples": 0.1,
}

_LOGISTIC: dict[str, Any] = {
    "C": 0.001,
    "max_iter": 300,
    "tol": 1e-4,
}

_MLP: dict[str, Any] = {
    "hidden_layer_sizes": (64,),
    # The library divides it by the sum of weights of a batch, not of all rows: tune it with batch_size; with smaller
    # batches, the same value prevents any learning.
    "alpha": 8.0,
    "batch_size": 1024,
    "learning_rate_init": 2e-3,
    # Passes over the training rows, at least 3 (not a scikit-learn parameter).
    "epochs": 10,
}


def _lightgbm(seed: int, settings: dict[str, Any]) -> lightgbm.LGBMClassifier:
    return lightgbm.LGBMClassifier(
        **settings, random_state=seed, deterministic=True, force_col_wise=True, verbose=-1, importance_type="gain"
    )


def _xgboost(seed: int, settings: dict[str, Any]) -> xgboost.XGBClassifier:
    return xgboost.XGBClassifier(
        **settings, random_state=seed, tree_method="hist", objective="binary:logistic", verbosity=0
    )


def _random_forest(seed: int, settings: dict[str, Any]) -> RandomForestClassifier:
    # No n_jobs: with two threads, a forest sums its trees in order of completion, and the last bit of a score varies
    # between runs.
    return RandomForestClassifier(**settings, random_state=seed)


def _logistic(seed: int, settings: dict[str, Any]) -> PreparedClassifier:
    return PreparedClassifier(LogisticRegression(**settings, solver="lbfgs", random_state=seed))


def _mlp(seed: int, settings: dict[str, Any]) -> PreparedClassifier:
    # A fixed number of epochs and no validation split: scikit-learn's random split would put windows of one incident on
    # both sides. An unreachable tolerance stops training after exactly that many epochs, whereas reaching max_iter
    # would warn.
    settings = dict(settings)
    size, epochs = settings.pop("hidden_layer_sizes"), settings.pop("epochs")
    layers = tuple(size) if isinstance(size, list | tuple) else (size,)
    network = MLPClassifier(
        **settings,
        hidden_layer_sizes=layers,
        max_iter=epochs + 1,
        tol=_UNREACHABLE,
        n_iter_no_change=max(epochs - 2, 1),
        solver="adam",
        random_state=seed,
    )
    return PreparedClassifier(network)


_RECIPES: dict[str, Recipe] = {
    "lightgbm": Recipe(
        _LIGHTGBM,
        _lightgbm,
        (
            "reg_alpha",
            "max_depth",
            "min_split_gain",
            "scale_pos_weight",
            "class_weight",
            "max_delta_step",
            "path_smooth",
            "extra_trees",
        ),
    ),
    "xgboost": Recipe(
        _XGBOOST,
        _xgboost,
        (
            "reg_alpha",
            "gamma",
            "scale_pos_weight",
            "colsample_bylevel",
            "colsample_bynode",
            "grow_policy",
            "max_leaves",
        ),
    ),
    "random_forest": Recipe(
        _RANDOM_FOREST,
        _random_forest,
        ("criterion", "min_samples_split", "class_weight", "max_leaf_nodes", "ccp_alpha"),
    ),
    "logistic": Recipe(_LOGISTIC, _logistic, ("class_weight", "l1_ratio")),
    "mlp": Recipe(_MLP, _mlp, ("activation",)),
}


def make_learner(name: str, *, seed: int, settings: Mapping[str, Any] | None = None, incidents: int = 0) -> Any:
    """Create an unfitted learner. Its library validates the settings when fitting.

    ``incidents``: number of incidents it will be fitted on, which determines its size.
    ``settings``: overrides of the defaults, by the library's own names (and ``epochs`` of ``mlp``).
    Raises ``InputError`` for an unknown learner or setting (suggesting the nearest valid name).
    """
    recipe = _recipe(name)
    overrides = dict(settings or {})
    valid = (*recipe.defaults, *recipe.more)
    for key in sorted(overrides):
        if key not in valid:
            raise InputError(
                f"unknown setting '{key}' of learner {name}",
                f"parameter models.settings.{name}",
                nearest_hint(key, valid, f"Valid names: {', '.join(sorted(valid))}."),
            )
    larger = _MANY.get(name, {}) if incidents >= MANY_INCIDENTS else {}
    return recipe.build(seed % 2**31, {**recipe.defaults, **larger, **overrides})


class LoadedLightGBM:
    """A LightGBM model read from text, with the part of the scikit-learn interface that scoring needs."""

    def __init__(self, booster: lightgbm.Booster) -> None:
        self.booster_ = booster
        self.classes_ = np.array([0, 1])

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        """Return the probability of both classes, shape (n_rows, 2), bit-identical to the fitted classifier's."""
        positive = np.asarray(self.booster_.predict(X, num_threads=THREADS))
        return np.column_stack([1 - positive, positive])


@dataclass(frozen=True)
class FitRows:
    """Training rows of both classes, shared by the learners fitted on them.

    ``times``: decision times in milliseconds; None: unknown.
    ``purge_ms``: gap + horizon, between the rows that a learner fits on and those it validates on.
    """

    X: np.ndarray
    y: np.ndarray
    weight: np.ndarray | None = None
    times: Ints | None = None
    purge_ms: int = 0

    @cached_property
    def digest(self) -> str:
        """Hash of the content, cached."""
        arrays = [array for array in (self.X, self.y, self.weight, self.times) if array is not None]
        shapes = [(array.shape, str(array.dtype)) for array in arrays]
        digest = hashlib.blake2b(repr((shapes, self.purge_ms)).encode(), digest_size=16)
        for array in arrays:
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Fit:
    """A learner to fit: its name in :data:`models.config.ALL_LEARNERS`, the unfitted classifier, and its rows."""

    name: str
    learner: Any
    rows: FitRows


LearnerStore = Callable[[Fit, Callable[[], Any]], Any]
"""Returns a fit's learner from a cache, or fits it with the given function and caches it."""


def fit_all(
    fits: Sequence[Fit], fitted: Callable[[str], None] | None = None, store: LearnerStore | None = None
) -> list[Any]:
    """Fit learners, :data:`CONCURRENT_LEARNERS` concurrently, and return them in the same order.

    ``fitted``: called from a thread with the name of each learner once it is fitted.
    Raises ``InputError`` with the library's message if a library rejects a fit, usually for its settings.
    """

    def fit(task: Fit) -> Any:
        rows = task.rows
        split = {"times": rows.times, "purge_ms": rows.purge_ms} if task.name in SEQUENCE else {}
        try:
            return task.learner.fit(rows.X, rows.y, sample_weight=rows.weight, **split)
        except (lightgbm.basic.LightGBMError, TypeError, ValueError) as error:  # XGBoost's is a ValueError
            line = _PLACE.sub("", next(iter(str(error).strip().splitlines()), type(error).__name__)).rstrip(" .")
            raise InputError(
                f"{task.name} could not be fitted: {line}",
                f"parameter models.settings.{task.name}",
                "Correct the setting that the error names. If it names none, report a bug.",
            ) from error

    def run(task: Fit) -> Any:
        learner = fit(task) if store is None else store(task, lambda: fit(task))
        if fitted is not None:
            fitted(task.name)
        return learner

    # One limit around all fits: concurrent fits would lift each other's limit too early.
    with threadpool_limits(limits=THREADS):
        return list(
            joblib.Parallel(n_jobs=CONCURRENT_LEARNERS, backend="threading")(joblib.delayed(run)(fit) for fit in fits)
        )


def fit_learners(
    learners: Mapping[str, Any],
    rows: FitRows,
    fitted: Callable[[str], None] | None = None,
    store: LearnerStore | None = None,
) -> dict[str, Any]:
    """Fit several learners on the same rows; see :func:`fit_all`."""
    fits = [Fit(name, learner, rows) for name, learner in learners.items()]
    return dict(zip(learners, fit_all(fits, fitted, store), strict=True))


def _recipe(name: str) -> Recipe:
    if name in _RECIPES:
        return _RECIPES[name]
    if name in SEQUENCE:
        from models.sequence.classifier import recipe  # PyTorch is optional

        return recipe(name)
    hint = nearest_hint(name, ALL_LEARNERS, f"Valid names: {', '.join(sorted(ALL_LEARNERS))}.")
    raise InputError(f"unknown learner '{name}'", "parameter models", hint)
