"""Logistic regression and the small network behind their scaler, from their skops archives: arrays and numbers only.

The steps are scikit-learn's own in its order and types, and products of matrices are taken on one thread as in
:class:`models.prepared.PreparedClassifier`, so probabilities are the same bit for bit on one machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from scipy.special import expit
from threadpoolctl import threadpool_limits

from features.errors import InputError
from models.light.errors import HeavyModelError
from models.signed_log import scaled
from models.skops_archive import SkopsArchive, fields_of, kind_of, plain_of

_PREPARED: Final = ("PreparedClassifier", "models.prepared")
_SCALER: Final = ("SignedLogScaler", "models.prepared")
_LOGISTIC: Final = ("LogisticRegression", "sklearn.linear_model._logistic")
_NETWORK: Final = ("MLPClassifier", "sklearn.neural_network._multilayer_perceptron")


def _tanh(values: np.ndarray) -> None:
    np.tanh(values, out=values)


def _relu(values: np.ndarray) -> None:
    np.maximum(values, 0, out=values)


def _logistic(values: np.ndarray) -> None:
    expit(values, out=values)


def _identity(_: np.ndarray) -> None:
    pass


_ACTIVATIONS: Final[dict[str, Callable[[np.ndarray], None]]] = {
    "identity": _identity,
    "logistic": _logistic,
    "tanh": _tanh,
    "relu": _relu,
}


@dataclass(frozen=True, slots=True)
class PreparedScorer:
    """A scaler and layers of weights; logistic regression is one layer.

    ``center``, ``scale``: of the scaler; shape (n_features,).
    ``weights``: of the layers, the last with one output; shape (n_in, n_out).
    ``intercepts``: of the layers; shape (n_out,).
    ``activation``: between layers; the last one's is the logistic function.
    ``classes_``: 0 and 1.
    """

    center: np.ndarray
    scale: np.ndarray
    clip: float
    weights: tuple[np.ndarray, ...]
    intercepts: tuple[np.ndarray, ...]
    activation: str
    classes_: np.ndarray

    @property
    def n_features_in_(self) -> int:
        """Features of a row."""
        return len(self.center)

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        """Give the probability of both classes, shape (n_rows, 2), of rows of float32; NaN: unknown."""
        values = scaled(X, self.center, self.scale, self.clip)
        hidden = _ACTIVATIONS[self.activation]
        with threadpool_limits(limits=1):
            for at, (weights, intercepts) in enumerate(zip(self.weights, self.intercepts, strict=True)):
                values = values @ weights
                values = values + intercepts
                if at < len(self.weights) - 1:
                    hidden(values)
        positive = expit(values.ravel())
        return np.stack([1 - positive, positive], axis=1)


def read_prepared(name: str, content: bytes, where: str, features: int) -> PreparedScorer:
    """Read the archive of ``logistic`` or ``mlp``.

    Raises ``HeavyModelError`` if it holds another classifier than these two, or one of several outputs.
    Raises ``InputError`` if it is damaged or of another number of features.
    """
    try:
        archive = SkopsArchive(content)
        if kind_of(archive.root) != _PREPARED:
            raise ValueError(f"it holds a {str(kind_of(archive.root)[0])[:60]}")
        outer = fields_of(archive.root)
        scaler, inner = outer["scaler_"], outer["classifier_"]
        if kind_of(scaler) != _SCALER:
            raise ValueError(f"its scaler is a {str(kind_of(scaler)[0])[:60]}")
        weights, intercepts, activation = _layers(archive, inner, where)
        facts = fields_of(scaler)
        found = PreparedScorer(
            _numbers(archive, facts["center_"]),
            _numbers(archive, facts["scale_"]),
            float(plain_of(facts["clip"])),
            weights,
            intercepts,
            activation,
            archive.array(outer["classes_"]),
        )
        _check(found, features)
    except InputError:
        raise
    except Exception as error:  # a damaged zip or array header raises whatever its readers meet: there is no list of it
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        first = (said.strip().splitlines() or [type(error).__name__])[0][:200]
        raise InputError(f"not a readable {name} model: {first}", where, "Train the bundle again.") from None
    return found


def _layers(archive: SkopsArchive, node: Any, where: str) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...], str]:
    kind, facts = kind_of(node), fields_of(node)
    if kind == _LOGISTIC:
        return (_numbers(archive, facts["coef_"]).T,), (_numbers(archive, facts["intercept_"]),), "identity"
    if kind != _NETWORK:
        raise HeavyModelError(f"it holds a {str(kind[0])[:60]}", where)
    activation, last = plain_of(facts["activation"]), plain_of(facts["out_activation_"])
    if activation not in _ACTIVATIONS or last != "logistic":
        raise HeavyModelError(f"its activations are {str(activation)[:40]} and {str(last)[:40]}", where)
    weights, intercepts = (
        tuple(_numbers(archive, each) for each in facts[key]["content"]) for key in ("coefs_", "intercepts_")
    )
    return weights, intercepts, activation


def _numbers(archive: SkopsArchive, node: Any) -> np.ndarray:
    found = archive.array(node)
    if found.dtype not in (np.float32, np.float64) or not np.isfinite(found).all():
        raise ValueError("an array is not of finite numbers")
    return found.copy(order="K")  # aligned, as the library has it


def _check(found: PreparedScorer, features: int) -> None:
    """Check that the layers fit the features and each other."""
    if found.classes_.tolist() != [0, 1]:
        raise ValueError(f"its classes are {str(found.classes_.tolist())[:40]}")
    if found.center.shape != (features,) or found.scale.shape != (features,):
        raise ValueError(f"its scaler is of {found.center.shape} features, the bundle of {features}")
    if not found.weights or len(found.weights) != len(found.intercepts):
        raise ValueError("its layers are misstated")
    width = features
    for weights, intercepts in zip(found.weights, found.intercepts, strict=True):
        if weights.ndim != 2 or weights.shape[0] != width or intercepts.shape != weights.shape[1:]:
            raise ValueError(f"a layer of shape {weights.shape} follows {width} numbers")
        width = weights.shape[1]
    if width != 1:
        raise ValueError(f"it has {width} outputs")
