"""An LSTM or a convolutional network as a scikit-learn classifier: window and statics in, risk out."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Self

import numpy as np
from scipy.special import expit

from features.times import duration_ms
from models.binary import BinaryClassifier
from models.ranking import Bools, Floats, Ints
from models.sequence.extra import require_torch
from models.sequence.layout import SequenceLayout
from models.sequence.scaling import SequenceScaler


class SequenceClassifier(BinaryClassifier):
    """A network that reads a raw window as a sequence, with the static features repeated at every step.

    Fitted with Adam on the weighted binary cross-entropy. The last share of the rows in time is held out, apart from
    the rest by the purge, and fitting ends where its loss no longer falls; the weights are those of the best epoch.
    Where either part would lack a class, ``fixed_epochs`` are run on all rows instead.

    ``network``: one layer of LSTM whose last state decides, or three convolutions with pooling.
    ``layout``: where window and statics stand in a row; None: every feature is a step of a single channel.
    ``filters``: filters of each convolution; the LSTM has none.
    ``patience``: passes without a better tail after which fitting ends.
    ``fixed_epochs``: passes where there is no usable tail.
    ``purge``: gap + horizon: rows to fit on end that long before the tail begins, so that no incident stands in both.
    ``random_state``: seed of first weights and order of batches; None: 0, because a learner that differs from run to
    run is of no use here.
    ``scaler_``: what makes a row fit for the network.
    ``epochs_``: passes over the rows that the weights have seen.
    ``early_stopped_``: whether a tail ended the fitting.
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
        ``sample_weight``: Weights; shape (n_rows,).
        ``times``: decision times in milliseconds; None: rows are in the order of time, and nothing is purged; shape
        (n_rows,).
        Raises ``InputError`` if PyTorch is not installed.
        """
        require_torch(self.network)
        from models.sequence.network import Inputs, Schedule, fit_network  # noqa: PLC0415 - PyTorch is an extra

        X, codes, weight = self._begin_fit(X, y, sample_weight)
        seed = 0 if self.random_state is None else int(self.random_state)
        at = np.arange(len(codes)) if times is None else np.asarray(times, dtype=np.int64)
        fit_on, tail = self._split(codes, weight, at, purged=times is not None)
        self.scaler_ = SequenceScaler.fit(X, self.layout or SequenceLayout.plain(X.shape[1]))

        def inputs(rows: Bools) -> Inputs:
            window, static = self.scaler_.transform(X[rows])
            return Inputs(window, static, codes[rows].astype(np.float32), weight[rows].astype(np.float32))

        self.early_stopped_ = tail is not None
        schedule = Schedule(
            self.learning_rate,
            self.weight_decay,
            self.batch_size,
            self.epochs if self.early_stopped_ else self.fixed_epochs,
            self.patience,
        )
        held = None if tail is None else inputs(tail)
        self.weights_, self.epochs_ = fit_network(self._shape(), inputs(fit_on), held, schedule, seed=seed)
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
        from models.sequence.network import NetworkShape  # noqa: PLC0415 - PyTorch is an extra

        inputs = 2 * self.scaler_.layout.channels + self.scaler_.static_width
        return NetworkShape(self.network, inputs, self.hidden, self.filters)

    def check_weights(self) -> None:
        """Refuse weights that are not those of this network, as in a file that was changed.

        Raises ``ValueError`` if a weight is missing, too many, or of another shape.
        """
        from models.sequence.network import weight_shapes  # noqa: PLC0415 - PyTorch is an extra

        found = {name: value.shape for name, value in self.weights_.items()}
        wanted = weight_shapes(self._shape())
        if found != wanted:
            raise ValueError(f"weights of shapes {found} where {wanted} were expected")

    def _positive(self, X: np.ndarray) -> np.ndarray:
        return expit(self._score(len(X), lambda begin, end: self.scaler_.transform(X[begin:end])))

    def _score(self, rows: int, inputs: Any) -> Floats:
        require_torch(self.network)
        from models.sequence.network import network_log_odds  # noqa: PLC0415 - PyTorch is an extra

        return network_log_odds(self._shape(), self.weights_, inputs, rows)

    def occluded(self, X: Any) -> Floats:
        """Give what each channel and static adds to the log-odds: the score less that with it at its median.

        ``X``: Rows; shape (n_rows, n_features).
        Returns: a channel's addition stands at its newest step, 0 at the others; features the network does not read
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
        tags.input_tags.allow_nan = True
        return tags
