"""An LSTM or a convolutional network as a scikit-learn classifier: its recipe, its fit, and its file.

The file is safetensors, with all but the weights as JSON in its header: nothing in it can run.
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

    Fitted with Adam on the weighted binary cross-entropy. The last share of the rows in time is held out, apart from
    the rest by the purge, and fitting ends where its loss no longer falls; the weights are those of the best epoch.
    Where either part would lack a class, ``fixed_epochs`` are run on all rows instead.

    ``network``: one layer of LSTM whose last state decides, or three convolutions with pooling.
    ``layout``: positions of window and statics in a row; None: every feature is a step of a single channel.
    ``patience``: passes without a better tail after which fitting ends.
    ``fixed_epochs``: passes where there is no usable tail.
    ``purge``: gap + horizon: rows to fit on end that long before the tail begins, so that no incident is in both.
    ``random_state``: seed of first weights and order of batches; None: 0, because a learner that differs from run to
    run is of no use here.
    ``epochs_``: passes over the rows that the weights have seen.
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

        ``X``: rows as ``layout`` says; NaN: unknown; shape (n_rows, n_features).
        ``y``: two classes; the second in sorted order is the positive one; shape (n_rows,).
        ``times``: decision times in milliseconds; None: rows are in the order of time, and nothing is purged; shape
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
        """Tell which rows to fit on, and which, later ones, end the fitting; None: none do."""
        everything = weight > 0  # a row that weighs nothing must not end the fitting either
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
        """Refuse weights that are not those of this network, as in a file that was changed.

        Raises ``ValueError`` if a weight is missing, too many, or of another shape.
        """
        from models.sequence.network import weight_shapes  # PyTorch is optional

        shapes = {name: value.shape for name, value in self.weights_.items()}
        wanted = weight_shapes(self._shape())
        if shapes != wanted:
            raise ValueError(f"weights of shapes {shapes} where {wanted} were expected")

    def _begin_fit(self, X: Any, y: Any, sample_weight: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Check the training data, remember the classes, and give ``X``, ``y`` as 0 and 1, and the weights."""
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
        """Give the probability of both classes, shape (n_rows, 2), for ``X`` of shape (n_rows, n_features)."""
        X = self._checked(X)
        positive = expit(self._score(len(X), lambda begin, end: self.scaler_.transform(X[begin:end])))
        return np.column_stack([1 - positive, positive])

    def predict(self, X: Any) -> np.ndarray:
        """Give the more probable class of each row, shape (n_rows,)."""
        above = (self.predict_proba(X)[:, 1] > 0.5).astype(int)
        return self.classes_[above]

    def _score(self, rows: int, inputs: Any) -> Floats:
        require_torch(self.network)
        from models.sequence.network import network_log_odds  # PyTorch is optional

        return network_log_odds(self._shape(), self.weights_, inputs, rows)

    def occluded(self, X: Any) -> Floats:
        """Give what each channel and static adds to the log-odds: the score less that with it at its median.

        Returns: a channel's addition is at its newest step, 0 at the others; features the network does not read
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
    # At most; the tail ends it.
    "epochs": 20,
    "patience": 3,
    "fixed_epochs": 5,
    "tail_share": 0.2,
}


def recipe(name: str) -> Recipe:
    """Give the recipe of ``lstm`` or ``cnn1d``.

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
    """Write a fitted sequence learner; the same learner gives the same bytes."""
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
    """Read what :func:`dump_sequence` wrote; probabilities are bit-identical on the same number of threads.

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
    # Eight bytes of length, then JSON: the format's own header, whose ``__metadata__`` the NumPy reader does not give.
    length = int.from_bytes(content[:8], "little")
    return json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_KEY])
