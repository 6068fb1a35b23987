"""What the learners of this package share: a booster of LightGBM or XGBoost, and how it becomes a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import lightgbm
import numpy as np
import xgboost
from sklearn.utils.validation import check_is_fitted

from models.binary import BinaryClassifier
from models.learners import THREADS
from models.ranking import Floats

Library = Literal["lightgbm", "xgboost"]

_HEADER = "predrain "
"""How the first line of a LightGBM text of ours begins; JSON follows."""


class BoostedObjective(BinaryClassifier):
    """Base of a two-class classifier around one booster.

    A subclass names in ``_saved`` the fitted attributes (numbers and lists of them) that scoring needs besides the
    booster; they travel in the learner's file.

    ``classes_``: the two classes, ascending.
    """

    _saved: ClassVar[tuple[str, ...]] = ()

    booster_: Any

    def _begin_fit(self, X: Any, y: Any, sample_weight: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        X, codes, weight = super()._begin_fit(X, y, sample_weight)
        if not all(weight[codes == code].sum() > 0 for code in (0, 1)):
            raise ValueError(f"{type(self).__name__} needs two classes, found rows with a weight of one class only.")
        return X, codes, weight

    def contributions(self, X: np.ndarray) -> Floats:
        """Contribution of each feature to the margin that orders rows, by the library's exact TreeSHAP.

        ``X``: Rows; NaN: unknown; shape (n_rows, n_features).
        Returns shape (n_rows, n_features).
        """
        check_is_fitted(self)
        return shap_values(self.booster_, np.asarray(X))

    def to_bytes(self) -> bytes:
        """Write the fitted learner: LightGBM's text after a line of JSON, or XGBoost's UBJSON with it as attribute."""
        check_is_fitted(self)
        state = json.dumps({name: getattr(self, name) for name in self._saved}, allow_nan=False)
        if isinstance(self.booster_, lightgbm.Booster):
            return f"{_HEADER}{state}\n{self.booster_.model_to_string(num_iteration=-1)}".encode()
        self.booster_.set_attr(predrain=state)
        return bytes(self.booster_.save_raw("ubj"))

    @classmethod
    def from_bytes(cls, content: bytes, library: Library) -> Self:
        """Read what :meth:`to_bytes` wrote; scores are bit-identical to those of the learner that was written.

        Returns: ready to score, with classes 0 and 1.
        Raises ``ValueError, UnicodeDecodeError, lightgbm.basic.LightGBMError, xgboost.core.XGBoostError`` if the file
        is not what it should be.
        """
        learner = cls()
        if "library" in learner.get_params():
            learner.set_params(library=library)
        if library == "lightgbm":
            header, _, text = content.decode("utf-8").partition("\n")
            if not header.startswith(_HEADER):
                raise ValueError(f"no line '{_HEADER.strip()} ...' before the trees")
            state = json.loads(header.removeprefix(_HEADER))
            learner.booster_ = lightgbm.Booster(model_str=text)
            learner.n_features_in_ = learner.booster_.num_feature()
        else:
            learner.booster_ = xgboost.Booster({"nthread": THREADS})
            learner.booster_.load_model(bytearray(content))
            state = json.loads(learner.booster_.attr("predrain") or "null")
            learner.n_features_in_ = learner.booster_.num_features()
        if not isinstance(state, dict) or set(state) != set(cls._saved):
            raise ValueError(f"the facts beside the trees are not {', '.join(cls._saved)}")
        for name, value in state.items():
            if not _plain_numbers(value):
                raise ValueError(f"'{name}' is {value!r}")
            setattr(learner, name, value)
        learner.classes_ = np.array([0, 1])
        learner._restored()
        return learner

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _restored(self) -> None:
        """Set what follows from the saved facts; called once they are read."""


def _plain_numbers(value: Any) -> bool:
    if isinstance(value, list):
        return all(_plain_numbers(each) for each in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def margin(booster: Any, X: np.ndarray, base: Floats | None = None) -> Floats:
    """Give the booster's raw scores.

    ``X``: Rows; NaN: unknown; shape (n_rows, n_features).
    ``base``: what the booster was fitted on top of; shape (n_rows,).
    Returns: raw scores, ``base`` included; shape (n_rows,).
    """
    if isinstance(booster, lightgbm.Booster):
        raw = np.asarray(booster.predict(X, raw_score=True, num_threads=THREADS), dtype=np.float64)
        return raw if base is None else raw + base
    given = None if base is None else base.astype(np.float32)
    return np.asarray(booster.inplace_predict(X, predict_type="margin", base_margin=given), dtype=np.float64)


def shap_values(booster: Any, X: np.ndarray) -> Floats:
    """Give exact path-dependent TreeSHAP values, shape of ``X``, as LightGBM and XGBoost compute them."""
    if isinstance(booster, lightgbm.Booster):
        return np.asarray(booster.predict(X, pred_contrib=True, num_threads=THREADS), np.float64)[:, :-1]
    return np.asarray(booster.predict(xgboost.DMatrix(X), pred_contribs=True), np.float64)[:, :-1]


def library_settings(library: Library, settings: Mapping[str, Any] | None, seed: int | None) -> dict[str, Any]:
    """Give all settings that a booster of a library is made with, in the names of its scikit-learn interface.

    ``library``: ``lightgbm`` or ``xgboost``.
    """
    own = {"n_jobs": THREADS, **(settings or {}), "random_state": 0 if seed is None else seed}
    if library == "lightgbm":
        return own | {"deterministic": True, "force_col_wise": True, "verbose": -1}
    return own | {"tree_method": "hist", "verbosity": 0}
