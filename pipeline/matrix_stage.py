"""The stage from a dataset to its feature matrix; apart, so that `predrain features` loads no learner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from features.engine import Engine
from features.matrix.building import build_matrix
from features.matrix.matrix import FeatureMatrix
from foundation.durations import format_duration
from foundation.errors import InputError
from foundation.place import Place
from pipeline.params import Params, differences, flatten, name_some
from telemetry.dataset.store import Dataset

Progress = Callable[[int, int], None]
"""Called with the work done and all work, in the units of the stage."""


def make_matrix(
    dataset: Place, params: Params, out: Path, *, progress: Progress | None = None, engine: Engine | None = None
) -> FeatureMatrix:
    """Compute the feature matrix of a dataset, or take the one at ``out`` if it is the same.

    ``dataset``: its folder, or where it is on S3-compatible storage.
    ``engine``: who does the work; default: this machine's cores. The matrix is the same, byte for byte.
    Raises ``InputError`` if there is no dataset, its step is not ``telemetry.step``, or a parameter does not fit it.
    """
    opened = Dataset.open(dataset)
    if opened.meta.step != params.telemetry.step:
        is_step, wanted = map(format_duration, (opened.meta.step, params.telemetry.step))
        raise InputError(
            f"the dataset's step is {is_step}, telemetry.step is {wanted}",
            str(dataset),
            "Set telemetry.step to the dataset's step, or import it again with the other one.",
        )
    return build_matrix(
        opened,
        out,
        decision=params.decision,
        labels=params.labels,
        features=params.features,
        training=params.training,
        seed=params.seed,
        progress=progress,
        engine=engine,
    )


def check_made_with(matrix: FeatureMatrix, params: Params) -> None:
    """Refuse parameters that say something else of a matrix's rows, labels and columns than what it was made with.

    What is fitted on a matrix answers the matrix's question, whatever the parameters say; card, scores and report would
    tell of another one. ``seed`` and ``training.negative_ratio`` may differ: they matter to what is fitted as well.

    Raises ``InputError`` if ``decision``, ``labels``, ``features`` or ``training.augmentation`` differs.
    """
    config = matrix.config
    made = {"training.augmentation": str(config.augmentation)}
    asked = {"training.augmentation": str(params.training.augmentation)}
    for name in ("decision", "labels", "features"):
        made |= flatten({name: getattr(config, name).model_dump(mode="json")})
        asked |= flatten({name: getattr(params, name).model_dump(mode="json")})
    others = differences(made, asked)
    if others:
        raise InputError(
            f"the matrix was made with {name_some(others)}",
            f"matrix {matrix.path}",
            "Make it again with these parameters (`predrain features`), or give the ones that it was made with.",
        )
