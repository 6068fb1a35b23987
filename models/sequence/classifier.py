"""LSTM or convolutional network as a scikit-learn classifier: recipe, fit, and file format.

The file is safetensors, with everything but the weights as JSON in its header: reading it cannot run code.
"""

import json
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Self

import numpy as np
from pydantic import TypeAdapter
from scipy.special import expit
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from foundation.times import duration_ms
from models.config import Recipe
from models.rows.ranking import Bools, Floats, Ints
from models.sequence.layout import SequenceLayout, SequenceScaler, require_torch


class SequenceClassifier(ClassifierMixin, BaseEstimator):
    """A network that reads a raw window as a sequence, with the static features repeated at every step.

    Fitted with AdamW on the weighted binary cross-entropy. The last share of the rows in time is held out, separated
    from the rest by the purge, for early stopping; the weights are those of the best epoch. If either part would lack a
    class, ``fixed_epochs`` are run on all rows instead.

    ``network``: ``lstm`` or ``cnn1d``, see :class:`models.sequence.network.NetworkShape`.
    ``layout``: positions of window and static features in a row; None: every feature is a step of a single channel.
    ``patience``: epochs without a better tail loss before early stopping.
    ``fixed_epochs``: epochs without a usable tail.
    ``purge``: gap + horizon: rows to fit on end that long before the tail starts, so that no incident is in both.
    ``random_state``: seed of initial weights and batch order; None: 0, for reproducibility.
    ``epochs_``: epochs that the weights were trained for.
    """

    classes_: np.ndarray

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
        purge: timedelta | None = None,
        random_state: int | None = None,
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
        self.purge = purge
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, times: Any = None) -> Self:
        """Fit scaler and network.

        ``X``: rows in ``layout``; NaN: unknown; shape (n_rows, n_features).
        ``y``: two classes; the second in sorted order is the positive one; shape (n_rows,).
        ``times``: decision times in milliseconds; None: rows are in order of time, and nothing is purged; shape
        (n_rows,).
        Raises ``InputError`` if PyTorch is not installed.
        """
        require_torch(self.network)
        from models.sequence.network import FitSchedule, Inputs, fit_network  # PyTorch is optional

        X, codes, weight = self._begin_fit(X, y, sample_weight)
        seed = 0 if self.random_state is None else int(self.random_state)
        row_times = np.arange(len(codes)) if times is None else np.asarray(times, dtype=np.int64)
        fit_on, tail = self._split(codes, weight, row_times, purged=times is not None)
        self.scaler_ = SequenceScaler.fit(X, self.layout or SequenceLayout.plain(X.shape[1]))

        def inputs(rows: Bools) -> Inputs:
            window, static = self.scaler_.transform(X[rows])
            return Inputs(window, static, codes[rows].astype(np.float32), weight[rows].astype(np.float32))

        self.early_stopped_ = tail is not None
        schedule = FitSchedule(
            self.learning_rate,
            self.weight_decay,
            self.batch_size,
            self.epochs if self.early_stopped_ else self.fixed_epochs,
            self.patience,
        )
        tail_inputs = None if tail is None else inputs(tail)
        self.weights_, self.epochs_ = fit_network(self._shape(), inputs(fit_on), tail_inputs, schedule, seed=seed)
        return self

    def _split(self, y: Ints, weight: Floats, times: Ints, *, purged: bool) -> tuple[Bools, Bools | None]:
        """Return the rows to fit on, and the later ones for early stopping; None: no usable tail."""
        everything = weight > 0  # rows without weight must not affect early stopping either
        used = np.flatnonzero(everything)
        border = np.quantile(times[used], 1 - self.tail_share, method="higher")
        gap = 0 if self.purge is None or not purged else duration_ms(self.purge)
        early, late = everything & (times < border - gap), everything & (times >= border)
        if len(np.unique(y[early])) < 2 or len(np.unique(y[late])) < 2:
            return everything, None
        return early, late

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
        wanted = weight_shapes(self._shape())
        if shapes != wanted:
            raise ValueError(f"weights of shapes {shapes} where {wanted} were expected")

    def _begin_fit(self, X: Any, y: Any, sample_weight: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Validate the training data, set the classes, and return ``X``, ``y`` as 0 and 1, and the weights."""
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_all_finite="allow-nan")
        check_classification_targets(y)
        kind = type_of_target(y, input_name="y")
        if kind != "binary":
            raise ValueError(f"Only binary classification is supported. The type of the target is {kind}.")
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"{type(self).__name__} needs two classes, found one class: {self.classes_.tolist()}")
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, allow_all_zero_weights=False)
        return X, codes.astype(np.int64), weight

    def _checked(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        return validate_data(self, X, dtype=[np.float64, np.float32], ensure_all_finite="allow-nan", reset=False)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of both classes, shape (n_rows, 2), for ``X`` of shape (n_rows, n_features)."""
        X = self._checked(X)
        positive = expit(self._score(len(X), lambda begin, end: self.scaler_.transform(X[begin:end])))
        return np.column_stack([1 - positive, positive])

    def predict(self, X: Any) -> np.ndarray:
        """Return the more probable class of each row, shape (n_rows,)."""
        above = (self.predict_proba(X)[:, 1] > 0.5).astype(int)
        return self.classes_[above]

    def _score(self, rows: int, inputs: Any) -> Floats:
        require_torch(self.network)
        from models.sequence.network import network_log_odds  # PyTorch is optional

        return network_log_odds(self._shape(), self.weights_, inputs, rows)

    def occluded(self, X: Any) -> Floats:
        """Return how much each channel and static feature adds to the log-odds, relative to its median.

        An unknown category replaces the median of categorical features.

        Returns: a channel's contribution is at its newest step, 0 at the others; features that the network does not use
        have 0; shape (n_rows, n_features).
        """
        X = self._checked(X)
        layout = self.scaler_.layout
        window, static = self.scaler_.transform(X)
        whole = self._score(len(X), lambda begin, end: (window[begin:end], static[begin:end]))
        out = np.zeros(X.shape)
        for channel in range(layout.channels):
            without = window.copy()
            without[:, :, channel] = 0
            at = layout.begin + (layout.steps - 1) * layout.channels + channel
            changed = self._score(len(X), lambda b, e, w=without: (w[b:e], static[b:e]))
            out[:, at] = whole - changed
        begin = 0
        for at, count in zip(layout.statics, layout.categories, strict=True):
            less = static.copy()
            less[:, begin : begin + (count or 1)] = 0
            out[:, at] = whole - self._score(len(X), lambda b, e, s=less: (window[b:e], s[b:e]))
            begin += count or 2
        return out

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        tags.input_tags.allow_nan = True
        return tags


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
    require_torch(learner.network)
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
