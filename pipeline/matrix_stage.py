"""The stage from a dataset to its feature matrix; apart, so that `predrain features` loads no learner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from features.building import build_matrix
from features.engine import Engine
from features.matrix import FeatureMatrix
from pipeline.params import Params
from telemetry.errors import InputError
from telemetry.store import Dataset, Place

Progress = Callable[[int, int], None]
"""Called with the work done and all work, in the units of the stage."""


def make_matrix(
    dataset: Place, params: Params, out: Path, *, progress: Progress | None = None, engine: Engine | None = None
) -> FeatureMatrix:
    """Compute the feature matrix of a dataset, or take the one at ``out`` if it is the same.

    Parameters
    ----------
    dataset : Path or S3Place
        Its folder, or where it is on S3-compatible storage.
    engine : Engine, optional
        Who does the work; default: this machine's cores. The matrix is the same, byte for byte.

    Raises
    ------
    InputError
        If there is no dataset, its step is not ``telemetry.step``, or a parameter does not fit it.
    """
    found = Dataset.open(dataset)
    if found.meta.step != params.telemetry.step:
        raise InputError(
            f"the dataset's step is {found.meta.step}, telemetry.step is {params.telemetry.step}",
            str(dataset),
            "Set telemetry.step to the dataset's step, or import it again with the other one.",
        )
    return build_matrix(
        found,
        out,
        decision=params.decision,
        labels=params.labels,
        features=params.features,
        training=params.training,
        seed=params.seed,
        progress=progress,
        engine=engine,
    )
