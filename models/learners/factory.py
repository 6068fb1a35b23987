"""The learners by name, with settings that hold up when failures are rare; the five classic ones are made here.

Each is an ordinary scikit-learn classifier: ``fit(X, y, sample_weight=None)``, ``predict_proba(X)``, NaN allowed.
Given the same data, seed and settings, each gives the same model bit for bit.

The defaults are regularised strongly: a training set holds windows of tens of incidents and hundreds of features, and
on simulated fleets fewer leaves, fewer features a tree and larger penalties each raised precision at the alert budget.
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

AT_ONCE = 2
"""Learners fitted at the same time; does not change the result."""

_UNREACHABLE = 1e9

_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: | at \S+, line \d+ ?\.?$")
"""Where in its own source a library noticed something."""

_LIGHTGBM: dict[str, Any] = {
    # Few leaves and large ones: the positives of a training set come from tens of incidents, not from hundreds.
    "n_estimators": 150,
    "learning_rate": 0.05,
    "num_leaves": 4,
    "min_child_samples": 40,
    # A leaf of 40 rows at a rate of 0.07 % has a hessian of 0.03. The floor must lie well below that, or no leaf can
    # hold the positives; without the l2 term such a leaf's Newton step is so long that the model collapses.
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
    # In units of hessian, p(1 - p) a row: see the note above.
    "min_child_weight": 0.02,
    "reg_lambda": 5.0,
    "max_delta_step": 2.0,
    "subsample": 0.7,
    "colsample_bytree": 0.2,
    "max_bin": 128,
    "n_jobs": THREADS,
}

MANY_INCIDENTS = 500
"""Boosted trees are larger where a training set holds this many incidents. On subsets of Titan's GPUs small ones rank
better up to 370 incidents, large ones no worse at 710 and better at 1,410 (docs/decisions/0026)."""

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
    # The library divides it by the weights of a batch, not of all rows: it goes together with batch_size, and the same
    # with smaller batches leaves nothing learned.
    "alpha": 8.0,
    "batch_size": 1024,
    "learning_rate_init": 2e-3,
    # Passes over the training rows, 3 or more (our name, not the library's).
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
    # No n_jobs: a forest that predicts on two threads adds its trees in the order in which they happen to finish, and
    # the last bit of a score changes from run to run.
    return RandomForestClassifier(**settings, random_state=seed)


def _logistic(seed: int, settings: dict[str, Any]) -> PreparedClassifier:
    return PreparedClassifier(LogisticRegression(**settings, solver="lbfgs", random_state=seed))


def _mlp(seed: int, settings: dict[str, Any]) -> PreparedClassifier:
    # A fixed number of epochs and no validation share: scikit-learn would draw that share at random over rows, so that
    # windows of one incident were on both sides of it. An improvement that no epoch can reach makes the library stop
    # after exactly that many, where reaching max_iter would warn.
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
    """Make an unfitted learner.

    ``incidents``: those that it will be fitted on; its size follows them.
    ``settings``: overrides of the defaults, in the library's own names (and ``epochs`` of ``mlp``).
    Returns: ``lightgbm.LGBMClassifier``, ``xgboost.XGBClassifier``, ``RandomForestClassifier``, or a
    :class:`models.learners.prepared.PreparedClassifier` around ``LogisticRegression`` or ``MLPClassifier``.
    Raises ``InputError`` if there is no such learner or setting (the nearest valid name is given). Values are refused
    by the library when it fits.
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
    """A LightGBM model read from its text, with the part of scikit-learn's contract that scoring needs."""

    def __init__(self, booster: lightgbm.Booster) -> None:
        self.booster_ = booster
        self.classes_ = np.array([0, 1])

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        """Give the probability of both classes, shape (n_rows, 2), bit-identical to the fitted classifier's."""
        positive = np.asarray(self.booster_.predict(X, num_threads=THREADS))
        return np.column_stack([1 - positive, positive])


@dataclass(frozen=True)
class FitRows:
    """Rows of both classes to fit on: features, labels and weights, shared by all learners that are fitted on them."""

    X: np.ndarray
    y: np.ndarray
    weight: np.ndarray | None = None

    @cached_property
    def digest(self) -> str:
        """Hash of the content, computed once."""
        arrays = [self.X, self.y] if self.weight is None else [self.X, self.y, self.weight]
        digest = hashlib.blake2b(repr([(array.shape, str(array.dtype)) for array in arrays]).encode(), digest_size=16)
        for array in arrays:
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Fit:
    """A learner to fit: its name among :data:`models.config.ALL_LEARNERS`, unfitted, and its rows."""

    name: str
    learner: Any
    rows: FitRows


LearnerStore = Callable[[Fit, Callable[[], Any]], Any]
"""Gives a fit's learner from a store, or fits it by the function given and keeps it."""


def fit_all(
    fits: Sequence[Fit], fitted: Callable[[str], None] | None = None, store: LearnerStore | None = None
) -> list[Any]:
    """Fit learners, :data:`AT_ONCE` at a time, and give them in the same order.

    ``fitted``: called with the name of each learner when it is fitted, from a thread.
    Raises ``InputError`` with the library's first line if a library refuses a fit, mostly for its settings.
    """

    def fit(one: Fit) -> Any:
        try:
            return one.learner.fit(one.rows.X, one.rows.y, sample_weight=one.rows.weight)
        except (lightgbm.basic.LightGBMError, TypeError, ValueError) as error:  # XGBoost's is a ValueError
            line = _PLACE.sub("", next(iter(str(error).strip().splitlines()), type(error).__name__)).rstrip(" .")
            raise InputError(
                f"{one.name} could not be fitted: {line}",
                f"parameter models.settings.{one.name}",
                "Correct the named setting; without one, report a bug.",
            ) from error

    def run(one: Fit) -> Any:
        learner = fit(one) if store is None else store(one, lambda: fit(one))
        if fitted is not None:
            fitted(one.name)
        return learner

    # One limit around all: set and lifted by each of two fits at a time, it would be lifted too early for the other.
    with threadpool_limits(limits=THREADS):
        return list(joblib.Parallel(n_jobs=AT_ONCE, backend="threading")(joblib.delayed(run)(fit) for fit in fits))


def fit_learners(
    learners: Mapping[str, Any],
    X: np.ndarray,
    y: np.ndarray,
    sample_weight: np.ndarray | None = None,
    fitted: Callable[[str], None] | None = None,
    store: LearnerStore | None = None,
) -> dict[str, Any]:
    """Fit several learners on the same rows; see :func:`fit_all`."""
    rows = FitRows(X, y, sample_weight)
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
