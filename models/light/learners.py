"""A learner's file as something that scores rows, without the library that fitted it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from models.config import SEQUENCE
from models.light.errors import HeavyModelError
from models.light.prepared import read_prepared
from models.trees.errors import UnsupportedModelError

_PREPARED: Final = ("logistic", "mlp")


class FirstFeatures:
    """A scorer that sees the first columns of the rows only, beside others that also read the window after them.

    ``features``: how many a row has.
    """

    def __init__(self, scorer: Any, columns: int, features: int) -> None:
        self.inner = scorer
        self.columns = columns
        self.classes_ = np.array([0, 1])
        self.n_features_in_ = features

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        """Give the probability of both classes, shape (n_rows, 2)."""
        positive = self.inner.predict_proba(np.ascontiguousarray(X[:, : self.columns]))[:, 1]
        return np.column_stack([1 - positive, positive])


def read_light(name: str, content: bytes, where: str, features: int) -> Any:
    """Read a learner's file.

    ``content``: the file, already verified by its hash and by :func:`models.structure.check_file`.
    Returns: has ``predict_proba``, ``classes_`` and ``n_features_in_``; its probabilities are the library's, bit for
    bit.
    Raises ``HeavyModelError`` if only the library scores it.
    Raises ``InputError`` if it is damaged.
    """
    if name in SEQUENCE:
        raise HeavyModelError(f"{name} is scored by PyTorch", where)
    if name in _PREPARED:
        return read_prepared(name, content, where, features)
    from models.trees.evaluate import read_evaluator  # noqa: PLC0415 - numba, for trees only

    try:
        return read_evaluator(content, where)
    except UnsupportedModelError as unsupported:
        raise HeavyModelError(unsupported.what, where) from None
