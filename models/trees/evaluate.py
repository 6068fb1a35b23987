"""Scores of a tree model by the compiled kernel: the probabilities that its library would give, faster.

Bit for bit: LightGBM's and the forest's sums and means, XGBoost's float32 sums; and both sigmoids, wherever NumPy's
runtime and the libraries use the same C library's exponential.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from models.trees import kernel
from models.trees.errors import UnsupportedModelError, damaged
from models.trees.forest_skops import read_forest
from models.trees.lightgbm_text import read_lightgbm
from models.trees.model import Output, TreeModel
from models.trees.xgboost_ubj import read_xgboost

READERS: Final[dict[str, Callable[[bytes, str], TreeModel]]] = {
    ".txt": read_lightgbm,
    ".ubj": read_xgboost,
    ".skops": read_forest,
}
"""Reader of a learner's file, by its suffix."""


class TreeEvaluator:
    """A tree model that scores rows; has the part of scikit-learn's contract that scoring needs.

    It holds nothing that changes: any number of threads may use one at once, and the compiled part lets the others run.

    ``classes_``: 0 and 1.
    ``n_features_in_``: features of a row.
    """

    def __init__(self, model: TreeModel) -> None:
        self.model = model
        self.classes_ = np.array([0, 1])
        self.n_features_in_ = model.trees.features

    def margins(self, X: np.ndarray, base: np.ndarray | None = None) -> np.ndarray:
        """Give the sum of the trees for each row: the library's raw score.

        ``X``: Rows; NaN: unknown. Infinities are larger or smaller than every threshold; shape (n_rows, n_features).
        ``base``: what the model was fitted on top of. As in the libraries, XGBoost's sums start from it (as float32) in
        the place of the model's own start, and LightGBM's are added to it; shape (n_rows,).
        Returns: float64, or float32 where the model is XGBoost's. Of a forest, the sum of its trees' shares of
        positives; shape (n_rows,).
        Raises ``TypeError`` if ``X`` is not of float32: a silently rounded number may fall on the other side of a
        threshold.
        Raises ``ValueError`` if its shape is wrong.
        """
        trees = self.model.trees
        bits = self._bits(X)
        of_xgboost = trees.value.dtype == np.float32
        if base is not None and np.shape(base) != (len(bits),):
            raise ValueError(f"base is of shape {np.shape(base)}, X has {len(bits)} rows.")
        total = np.full(len(bits), self.model.start, trees.value.dtype)
        if base is not None and of_xgboost:
            total[:] = base
        kernel.add_trees(
            bits,
            trees.column,
            trees.column_zero,
            trees.first,
            trees.node,
            trees.mask,
            trees.walked,
            trees.value_first,
            trees.value,
            total,
        )
        return total if base is None or of_xgboost else total + np.asarray(base, np.float64)

    def positive(self, X: np.ndarray) -> np.ndarray:
        """Give the probability of the positive class.

        ``X``: as :meth:`margins` takes them; shape (n_rows, n_features).
        Returns: float64, or float32 where the model is XGBoost's; shape (n_rows,).
        Raises ``TypeError, ValueError`` as :meth:`margins` does; and ValueError if its file does not say how margins
        become probabilities.
        """
        output = self.model.output
        if self.model.wrapped or output in (Output.LIGHTGBM_MARGIN, Output.XGBOOST_MARGIN):
            raise ValueError("The trees of this model give margins; the learner around them makes probabilities of it.")
        margins = self.margins(X)
        if output is Output.FOREST_SUM:
            return margins / self.model.trees.n_trees
        out = np.empty_like(margins)
        if output is Output.LIGHTGBM_SIGMOID:
            kernel.sigmoid_double(margins, self.model.slope, out)
        else:
            kernel.sigmoid_single(margins, out)
        return out

    def contributions(self, X: np.ndarray) -> np.ndarray:
        """Take the log-odds apart: what each feature added, float64 of the shape of ``X``.

        Exact for boosted trees, whose margin they make up; a forest's parts of its probability are scaled to log-odds
        (:func:`models.light.contributions.as_log_odds`).

        Raises ``ValueError`` if the file does not say how many rows went each way.
        """
        from models.trees.contributions import tree_contributions  # noqa: PLC0415 - it compiles, for who explains

        values, base = tree_contributions(self.model, X)
        if self.model.output is not Output.FOREST_SUM:
            return values
        from models.light.contributions import as_log_odds  # noqa: PLC0415 - which knows this module's classes

        trees = self.model.trees.n_trees
        return as_log_odds(values / trees, np.full(len(values), base / trees))

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        """Give the probability of both classes, shape (n_rows, 2); takes and raises what :meth:`positive` does."""
        positive = self.positive(X)
        return np.column_stack([1 - positive, positive])

    def _bits(self, X: np.ndarray) -> np.ndarray:
        rows = np.asarray(X)
        if rows.dtype != np.float32:
            raise TypeError(f"X is of {rows.dtype}: give float32, as features are computed.")
        if rows.ndim != 2 or rows.shape[1] != self.n_features_in_:
            raise ValueError(f"X is of shape {rows.shape}: give rows of {self.n_features_in_} features.")
        return np.require(rows, np.float32, ["C", "A"]).view(np.uint32)


def read_evaluator(content: bytes, where: str, features: int | None = None) -> TreeEvaluator:
    """Build the evaluator of a learner's file.

    ``where``: its name, whose suffix says whose it is: one of :data:`READERS`.
    Raises ``UnsupportedModelError`` if the file is no tree model or holds what only its library scores.
    Raises ``InputError`` if it is damaged, or of another number of features.
    """
    suffix = "." + where.rpartition(".")[2]
    if suffix not in READERS:
        raise UnsupportedModelError(f"a '{suffix}' file holds no trees", where)
    model = READERS[suffix](content, where)
    if features is not None and model.trees.features != features:
        raise damaged(f"it is of {model.trees.features} features, the bundle of {features}", where)
    return TreeEvaluator(model)


def evaluator_or_library(
    content: bytes, where: str, features: int, library: Callable[[], Any]
) -> tuple[Any, str | None]:
    """Build the evaluator of a learner's file, or have its library load it where there is none.

    ``library``: loads the learner with its own library; called only where it is needed.
    Returns: what scores, and why it is the library's: None where it is the evaluator.
    Raises ``InputError`` if the file is damaged. The library is not asked then: it might read what is not there.
    """
    try:
        return read_evaluator(content, where, features), None
    except UnsupportedModelError as unsupported:
        return library(), unsupported.what
