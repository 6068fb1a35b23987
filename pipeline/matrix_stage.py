"""The stage from a dataset to its feature matrix; a module of its own, so that `predrain features` loads no learner."""

from pathlib import Path

from features.engine import Engine
from features.matrix.building import build_matrix
from features.matrix.matrix import FeatureMatrix
from foundation.errors import InputError
from foundation.place import Place
from foundation.running import Progress
from pipeline.params import Params, differences, flatten, name_some, with_step
from telemetry.dataset.store import Dataset


def make_matrix(
    dataset: Place, params: Params, out: Path, *, progress: Progress | None = None, engine: Engine | None = None
) -> FeatureMatrix:
    """Compute the feature matrix of a dataset, or reuse the one at ``out`` if it is up to date.

    ``engine``: default: this machine's cores. The matrix is byte-identical with any engine.
    Raises ``InputError`` if there is no dataset, its step is not ``telemetry.step``, or a parameter is invalid for it.
    """
    source = Dataset.open(dataset)
    params = with_step(params, source.meta.step, str(dataset))
    return build_matrix(
        source,
        out,
        decision=params.decision,
        labels=params.labels,
        features=params.features,
        training=params.training,
        seed=params.seed,
        progress=progress,
        engine=engine,
    )


def check_made_with(matrix: FeatureMatrix, params: Params) -> Params:
    """Check that parameters match a matrix, and return them with the matrix's step.

    A model learns the labels and features of the matrix, whatever the parameters say, but card, scores and report would
    describe the parameters. ``seed`` and ``training.negative_ratio`` may differ, because they also apply to the fit.

    Raises ``InputError`` if ``decision``, ``labels``, ``features`` or ``training.augmentation`` differs.
    """
    config = matrix.config
    stored = {"training.augmentation": str(config.augmentation)}
    requested = {"training.augmentation": str(params.training.augmentation)}
    for name in ("decision", "labels", "features"):
        stored |= flatten({name: getattr(config, name).model_dump(mode="json")})
        requested |= flatten({name: getattr(params, name).model_dump(mode="json")})
    differing = differences(stored, requested)
    if differing:
        raise InputError(
            f"the matrix was made with {name_some(differing)}",
            f"matrix {matrix.path}",
            "Compute it again with these parameters (`predrain features`), or use its parameters.",
        )
    return with_step(params, matrix.config.step, f"matrix {matrix.path}")
