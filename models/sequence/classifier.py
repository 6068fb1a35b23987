"""LSTM or convolutional network as a scikit-learn classifier: recipe, fit, and file format.

The file is safetensors, with everything but the weights as JSON in its header: reading it cannot run code.
"""

import json
from dataclasses import asdict
from typing import Any, Self

import numpy as np
from pydantic import TypeAdapter
from scipy.special import expit
from sklearn.base import BaseEstimator

from models.config import Recipe
from models.rows.ranking import Bools, Floats, Ints
from models.rows.training_set import purged
from models.sequence.layout import SequenceLayout, SequenceScaler, require_torch


class SequenceClassifier(BaseEstimator):
    """A network that reads a raw window as a sequence, with the static features repeated at every step.

    Fitted with AdamW on the weighted binary cross-entropy. The latest share of the rows is held out for early stopping,
    and no incident is in both parts; the weights are those of the best epoch. If either part would lack a class,
    ``fixed_epochs`` are run on all rows.

    ``network``: ``lstm`` or ``cnn1d``, see :class:`models.sequence.network.NetworkShape`.
    ``layout``: positions of window and static features in a row; must be set before a fit.
    ``patience``: epochs without a better tail loss before early stopping.
    ``fixed_epochs``: epochs without a usable tail.
    ``random_state``: seed of initial weights and batch order.
    ``epochs_``: epochs that the weights were trained for.
    """

    def __init__(
        self,
        network: str = "lstm",
        layout: SequenceLayout | None = None,
        hidden: int = 64,
        filters: int = 32,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        batch_size: int = 256,
        epochs: int = 20,
        patience: int = 3,
        fixed_epochs: int = 5,
        tail_share: float = 0.2,
        random_state: int = 0,
    ) -> None:
        self.network = network
        self.layout = layout
        self.hidden = hidden
        self.filters = filters
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.epochs = epochs
        self.patience = patience
        self.fixed_epochs = fixed_epochs
        self.tail_share = tail_share
        self.random_state = random_state

    def fit(
        self,
        X: np.ndarray,
        y: Ints,
        sample_weight: Floats | None = None,
        times: Ints | None = None,
        purge_ms: int = 0,
    ) -> Self:
        """Fit scaler and network.

        ``X``: rows in ``layout``; NaN: unknown; shape (n_rows, n_features).
        ``y``: 0 and 1; shape (n_rows,).
        ``times``: decision times in milliseconds, shape (n_rows,); None: the rows are in order of time.
        ``purge_ms``: see :func:`models.rows.training_set.purged`.
        """
        from models.sequence.network import FitSchedule, Inputs, fit_network  # PyTorch is optional

        assert self.layout is not None
        self.classes_, self.n_features_in_ = np.array([0, 1]), X.shape[1]
        weight = np.ones(len(y)) if sample_weight is None else sample_weight
        fit_on, tail = self._split(y, weight, np.arange(len(y)) if times is None else times, purge_ms)
        self.scaler_ = SequenceScaler.fit(X, self.layout)

        def inputs(rows: Bools) -> Inputs:
            window, static = self.scaler_.transform(X[rows])
            return Inputs(window, static, y[rows].astype(np.float32), weight[rows].astype(np.float32))

        self.early_stopped_ = tail is not None
        schedule = FitSchedule(
            self.learning_rate,
            self.weight_decay,
            self.batch_size,
            self.epochs if self.early_stopped_ else self.fixed_epochs,
            self.patience,
        )
        tail_inputs = None if tail is None else inputs(tail)
        self.weights_, self.epochs_ = fit_network(
            self._shape(), inputs(fit_on), tail_inputs, schedule, seed=self.random_state
        )
        return self

    def _split(self, y: Ints, weight: Floats, times: Ints, purge_ms: int) -> tuple[Bools, Bools | None]:
        """Return the rows to fit on, and the later ones for early stopping; None: no usable tail."""
        usable = weight > 0  # rows without weight must not affect early stopping either
        border = np.quantile(times[usable], 1 - self.tail_share, method="higher")
        training, validation = usable & purged(times, border, purge_ms), usable & (times >= border)
        if len(np.unique(y[training])) < 2 or len(np.unique(y[validation])) < 2:
            return usable, None
        return training, validation

    def _shape(self) -> Any:
        from models.sequence.network import NetworkShape  # PyTorch is optional

        inputs = 2 * self.scaler_.layout.channels + self.scaler_.static_width
        return NetworkShape(self.network, inputs, self.hidden, self.filters)

    def check_weights(self) -> None:
        """Validate that the weights match the network, as a file may have been modified.

        Raises ``ValueError`` if a weight is missing, unexpected, or of another shape.
        """
        from models.sequence.network import weight_shapes  # PyTorch is optional

        shapes = {name: value.shape for name, value in self.weights_.items()}
        expected = weight_shapes(self._shape())
        if shapes != expected:
            raise ValueError(f"weights of shapes {shapes} where {expected} were expected")

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        """Return the probability of both classes, shape (n_rows, 2), for ``X`` of shape (n_rows, n_features)."""
        positive = expit(self._score(len(X), lambda begin, end: self.scaler_.transform(X[begin:end])))
        return np.column_stack([1 - positive, positive])

    def _score(self, rows: int, inputs: Any) -> Floats:
        from models.sequence.network import network_log_odds  # PyTorch is optional

        return network_log_odds(self._shape(), self.weights_, inputs, rows)

    def occluded(self, X: np.ndarray) -> Floats:
        """Return how much each channel and static feature adds to the log-odds, relative to its median.

        An unknown category replaces the median of categorical features.

        Returns: a channel's contribution is at its newest step, 0 at the others; features that the network does not use
        have 0; shape (n_rows, n_features).
        """
        layout = self.scaler_.layout
        window, static = self.scaler_.transform(X)
        score = self._score(len(X), lambda begin, end: (window[begin:end], static[begin:end]))
        out = np.zeros(X.shape)
        for channel in range(layout.channels):
            without = window.copy()
            without[:, :, channel] = 0
            column = layout.begin + (layout.steps - 1) * layout.channels + channel
            changed = self._score(len(X), lambda b, e, w=without: (w[b:e], static[b:e]))
            out[:, column] = score - changed
        begin = 0
        for column, count in zip(layout.statics, layout.categories, strict=True):
            less = static.copy()
            less[:, begin : begin + (count or 1)] = 0
            out[:, column] = score - self._score(len(X), lambda b, e, s=less: (window[b:e], s[b:e]))
            begin += count or 2
        return out


_DEFAULTS: dict[str, Any] = {
    "hidden": 64,
    "learning_rate": 1e-3,
    "weight_decay": 0.0,
    "batch_size": 128,
    # Maximum; early stopping may end it sooner.
    "epochs": 20,
    "patience": 3,
    "fixed_epochs": 5,
    "tail_share": 0.2,
}


def recipe(name: str) -> Recipe:
    """Return the recipe of ``lstm`` or ``cnn1d``.

    Raises ``InputError`` if PyTorch is not installed.
    """
    require_torch(name)
    defaults = {**_DEFAULTS, "filters": 32} if name == "cnn1d" else _DEFAULTS

    def build(seed: int, settings: dict[str, Any]) -> SequenceClassifier:
        return SequenceClassifier(name, **settings, random_state=seed)

    return Recipe(defaults, build)


_KEY = "predrain"
_SCALER = ("center", "scale", "static_center", "static_scale")


def dump_sequence(learner: SequenceClassifier) -> bytes:
    """Serialize a fitted sequence learner; the same learner gives the same bytes."""
    from safetensors.numpy import save

    scaler = learner.scaler_
    header = {
        "format": 1,
        "network": learner.network,
        "hidden": learner.hidden,
        "filters": learner.filters,
        "layout": asdict(scaler.layout),
        "features": int(learner.n_features_in_),
        "epochs": int(learner.epochs_),
        "early_stopped": bool(learner.early_stopped_),
    }
    tensors = {f"weights.{name}": np.ascontiguousarray(value) for name, value in sorted(learner.weights_.items())}
    tensors |= {f"scaler.{name}": np.ascontiguousarray(getattr(scaler, name)) for name in _SCALER}
    return bytes(save(tensors, metadata={_KEY: json.dumps(header, sort_keys=True)}))


def load_sequence(name: str, content: bytes) -> SequenceClassifier:
    """Load the result of :func:`dump_sequence`; probabilities are bit-identical with the same number of threads.

    Raises ``InputError`` if PyTorch is not installed.
    Raises ``ValueError`` if it is not a file of that learner.
    """
    require_torch(name)
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(content)
        header = _header(content)
        if header["format"] != 1 or header["network"] != name:
            raise ValueError(f"it holds format {header['format']} of {header['network']}")
        layout = TypeAdapter(SequenceLayout).validate_python(header["layout"])
        learner = SequenceClassifier(name, layout, hidden=int(header["hidden"]), filters=int(header["filters"]))
        learner.scaler_ = SequenceScaler(layout, *(tensors[f"scaler.{part}"] for part in _SCALER))
        learner.weights_ = {
            key.removeprefix("weights."): value for key, value in tensors.items() if key.startswith("weights.")
        }
        learner.classes_ = np.array([0, 1])
        learner.n_features_in_ = int(header["features"])
        learner.epochs_, learner.early_stopped_ = int(header["epochs"]), bool(header["early_stopped"])
        learner.check_weights()
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(str(error)) from None
    return learner


def _header(content: bytes) -> Any:
    # Safetensors header: eight bytes of length, then JSON, whose ``__metadata__`` the NumPy reader does not return.
    length = int.from_bytes(content[:8], "little")
    return json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_KEY])
