"""One fit over several workers: which rows each of them reads, and what a library's own trainer makes of a learner.

What is fitted on stands in a folder that all machines see: positions of rows, labels, weights. A worker is told the
folder and the number of its share, and reads the features of its share out of the matrix.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import xgboost
from sklearn.base import clone
from sklearn.utils.class_weight import compute_class_weight

from features.errors import InputError
from models.cascade import CascadeEnsemble
from models.config import ModelsSection
from models.fit_facts import FitFacts
from models.fits import FitRows, fit_cascade
from models.learners import fit_learners
from models.ranking import Ints
from models.sequence.tabular import FirstColumns
from models.sequence.windows import with_windows
from models.shared_folder import SHARED, TURN, open_shared
from models.training_set import Matrix

STRETCHES = 8
"""Stretches of rows that a share is dealt. LightGBM takes the bin edges of a feature from the rows of one worker, so a
share must look like the whole span; and a worker decodes each file of the matrix that its stretches touch, so they must
not be many."""

_FITTED_ON_ONE = {"machines": "", "local_listen_port": "12400", "num_machines": "1", "tree_learner": "serial"}


@dataclass(frozen=True, slots=True)
class SpreadOrder:
    """Where a worker finds the rows of a fit.

    ``folder``: of the positions, labels and weights; absolute, named at random.
    ``matrix``: folder of the matrix; absolute.
    ``models``: tells whether rows hold raw windows.
    """

    folder: Path
    matrix: Path
    digest: str
    models: ModelsSection

    @classmethod
    def write(cls, within: Path, matrix: Path, digest: str, models: ModelsSection, rows: FitRows) -> SpreadOrder:
        """Write the rows of a fit.

        ``within``: folder that all machines see; made if it is not there.
        Raises ``OSError`` if they cannot be written.
        """
        order = cls(within.resolve() / secrets.token_hex(16), matrix.resolve(), digest, models)
        order.folder.mkdir(parents=True)
        facts = rows.facts
        for name, each in (
            ("positions", rows.positions),
            ("label", rows.label),
            ("weight", rows.weight),
            ("groups", rows.groups),
            ("times", facts.times),
        ):
            if each is not None:
                np.save(order.folder / f"{name}.npy", each)
        return order

    def read(self) -> FitRows:
        """Read the rows, as another machine does.

        Raises ``InputError`` if this machine does not see the folder.
        """
        rows = self._array("positions")
        label, weight, groups = (self._array(name) for name in ("label", "weight", "groups"))
        times = self._array("times") if (self.folder / "times.npy").exists() else None
        return FitRows(label, weight, groups, FitFacts(times, rows))

    def open(self) -> Matrix:
        """Open the matrix; see :func:`models.shared_folder.open_shared`."""
        return with_windows(open_shared(self.matrix, self.digest), self.models)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _array(self, name: str) -> np.ndarray:
        try:
            return np.asarray(np.load(self.folder / f"{name}.npy", allow_pickle=False))
        except FileNotFoundError as error:
            raise InputError(
                "a worker does not see the rows that it is to fit on", str(error.filename), SHARED
            ) from None


def deal(count: int, of: int) -> list[Ints]:
    """Deal rows in the order of time to shares, :data:`STRETCHES` stretches of neighbours to each.

    Returns: positions among the rows, ascending; every row is in one share.
    """
    bounds = np.linspace(0, count, of * STRETCHES + 1).astype(np.int64)
    return [
        np.concatenate([np.arange(bounds[at], bounds[at + 1]) for at in range(share, of * STRETCHES, of)])
        for share in range(of)
    ]


def most_shares(label: Ints, most: int) -> int:
    """Give the largest number of shares, up to ``most``, in which each share holds both classes.

    A worker that saw one class only would give LightGBM wrong labels.
    """
    return next(
        of
        for of in range(max(most, 1), 0, -1)
        if of == 1 or all(len(np.unique(label[s])) == 2 for s in deal(len(label), of))
    )


@dataclass(frozen=True, slots=True)
class ShareTask:
    """Reads a share of the rows on the worker that fits on it; can be sent to another machine.

    ``columns``: features to give: the first ones of a row.
    ``by_class``: what the weights of negatives and of positives are multiplied with.
    """

    order: SpreadOrder
    columns: int
    by_class: tuple[float, float]
    name: str = "share"

    def __call__(self, share: int, of: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Give features, labels and weights of a share, in the order of the matrix."""
        rows = self.order.read()
        mine = deal(len(rows.label), of)[share]
        # the features alone, without raw windows: no trainer here reads those
        values = open_shared(self.order.matrix, self.order.digest).values(rows.positions[mine])
        label = rows.label[mine]
        return values[:, : self.columns], label, rows.weight[mine] * np.asarray(self.by_class)[label]


@dataclass(frozen=True, slots=True)
class OneFit:
    """A learner to fit, by its name."""

    name: str
    learner: Any

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class FitTask:
    """Fits a learner on all rows, on one worker; can be sent to another machine."""

    order: SpreadOrder
    name: str = "fit"

    def __call__(self, fit: OneFit) -> Any:
        """Do one."""
        with TURN:
            rows = self.order.read()
            values = self.order.open().values(rows.positions)
            return fit_learners({fit.name: fit.learner}, values, rows.label, rows.weight, rows.facts)[fit.name]


@dataclass(frozen=True, slots=True)
class CascadeTask:
    """Fits a cascade on all rows, on one worker; can be sent to another machine.

    ``held``: positions of later positives that thresholds are set on.
    """

    order: SpreadOrder
    unfitted: CascadeEnsemble
    first: Any
    held: Ints | None
    thresholds: tuple[float, ...] | None
    name: str = "fit"

    @classmethod
    def of(
        cls,
        order: SpreadOrder,
        unfitted: CascadeEnsemble,
        first: Any,
        held: Ints | None,
        thresholds: Sequence[float] | None,
    ) -> CascadeTask:
        """Make a task."""
        return cls(order, unfitted, first, held, None if thresholds is None else tuple(thresholds))

    def __call__(self, _name: str) -> CascadeEnsemble:
        """Do it."""
        with TURN:
            rows, matrix = self.order.read(), self.order.open()
            held = None if self.held is None else matrix.values(self.held)
            values = matrix.values(rows.positions)
            return fit_cascade(
                self.unfitted, values, rows, first=self.first, positives=held, thresholds=self.thresholds
            )


def classifier_of(learner: Any) -> Any:
    """Give the classifier that a learner fits on the features: itself, or the one inside a :class:`FirstColumns`."""
    return learner.classifier if isinstance(learner, FirstColumns) else learner


def can_spread(learner: Any) -> bool:
    """Tell whether a learner's library can fit it over several workers: LightGBM's and XGBoost's classifiers."""
    return type(classifier_of(learner)) in (lightgbm.LGBMClassifier, xgboost.XGBClassifier)


def class_factors(learner: Any, label: Ints) -> tuple[float, float]:
    """Give what a learner's ``class_weight`` makes of the weights of negatives and of positives.

    LightGBM would work it out on each worker, from the rows there.
    """
    asked = getattr(classifier_of(learner), "class_weight", None)
    if asked is None:
        return 1.0, 1.0
    negative, positive = compute_class_weight(asked, classes=np.array([0, 1]), y=label)
    return float(negative), float(positive)


def take_xgboost(learner: Any, booster: xgboost.Booster, features: int) -> Any:
    """Give a learner the trees of a fit, as if it had grown them.

    ``features``: columns of a row of the matrix.
    """
    made = clone(classifier_of(learner))
    # what its own fit leaves behind; its load_model would overwrite settings as well
    made._Booster, made.n_classes_ = xgboost.Booster({"nthread": made.n_jobs}), 2
    made._Booster.load_model(bytearray(booster.save_raw("ubj")))
    return _wrapped(learner, made, features)


def take_lightgbm(learner: Any, fitted: lightgbm.LGBMClassifier, features: int) -> Any:
    """Give a learner the trees of a fit, as if it had grown them.

    The text of a model says with which settings it was fitted. What is left out of it here is who fitted it: addresses
    and ports, which differ from fit to fit.

    ``fitted``: as ``lightgbm.dask`` gives it.
    ``features``: columns of a row of the matrix.
    """
    made = clone(classifier_of(learner))
    settings = made.get_params()
    text = fitted.booster_.model_to_string(num_iteration=-1)
    for name, value in {**_FITTED_ON_ONE, "num_threads": str(made.n_jobs), "time_out": "120"}.items():
        text = re.sub(rf"^\[{name}: .*\]$", f"[{name}: {value}]", text, flags=re.MULTILINE)
    for name, value in vars(fitted).items():  # what lightgbm.dask's own to_local copies
        if name not in settings and name != "_other_params":
            setattr(made, name, value)
    made._Booster = lightgbm.Booster(model_str=text)
    return _wrapped(learner, made, features)


def _wrapped(learner: Any, fitted: Any, features: int) -> Any:
    if not isinstance(learner, FirstColumns):
        return fitted
    assert learner.columns is not None
    return FirstColumns.around(fitted, learner.columns, features)
