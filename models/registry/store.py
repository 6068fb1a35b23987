"""MLflow: every run recorded, every bundle a model version; imported here and in ``models/registry/pyfunc.py`` only.

The store is a database (``sqlite:///``); MLflow 3 refuses its old folder of files. Nothing leaves the machine:
telemetry is switched off before the import. Other modules reach MLflow through :func:`opened_store`.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foundation.errors import InputError, TooEarlyError

CHALLENGER = "challenger"
"""Alias of the version registered last."""

CHAMPION = "champion"
"""Alias of the version that is served."""

DIGEST_TAG = "bundle_digest"
"""Tag of a version: the digest of its bundle."""

_SQLITE = "sqlite:///"
_LOGGERS = (
    "mlflow",
    "alembic",
    "sqlalchemy",
    "mlflow.store.db.utils",
    "mlflow.models.model",
    "mlflow.utils.environment",
)


def register_bundle(tracking_uri: str, model: str, bundle: Path, *, run_id: str) -> int:
    """Register a bundle as a version of a model and make that the challenger.

    The version is a pyfunc logged from code (``models/registry/pyfunc.py``) whose only artifact is the bundle's folder:
    nothing is pickled, and ``mlflow models serve`` answers with risks. A bundle that is a version already is not
    registered again: the alias moves to that version.

    ``model``: name of the registered model; made where it does not exist.
    Raises ``InputError`` if the bundle is not whole, or the store cannot be used.
    """
    from models.bundle.store import load_bundle  # noqa: PLC0415 - who only records runs needs no learner libraries

    loaded = load_bundle(bundle)
    with opened_store(tracking_uri) as mlflow:
        client = mlflow.MlflowClient()
        if not any(registered.name == model for registered in client.search_registered_models(f"name = '{model}'")):
            client.create_registered_model(model)
        same = [
            int(model_version.version)
            for model_version in client.search_model_versions(f"name = '{model}'")
            if model_version.tags.get(DIGEST_TAG) == loaded.digest
        ]
        if same:
            version = max(same)
        else:
            info = _log_model(mlflow, loaded, bundle, run_id)
            made = client.create_model_version(
                model, info.model_uri, run_id=run_id, model_id=info.model_id, tags={DIGEST_TAG: loaded.digest}
            )
            version = int(made.version)
        client.set_registered_model_alias(model, CHALLENGER, str(version))
    return version


def experiment_id(client: Any, tracking_uri: str, name: str) -> str:
    """Find or make an experiment, its artifacts next to the database."""
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return str(experiment.experiment_id)
    location = None
    database = database_of(tracking_uri)
    if database is not None:
        # by default artifacts would go to the folder that the command happens to run in
        location = (database.parent / "mlartifacts" / name).resolve().as_uri()
    return str(client.create_experiment(name, artifact_location=location))


def database_of(tracking_uri: str) -> Path | None:
    """Give the file of a store that is one, None for a server."""
    return Path(tracking_uri.removeprefix(_SQLITE)) if tracking_uri.startswith(_SQLITE) else None


def refuse_absent(tracking_uri: str) -> None:
    """Refuse a store that is not there, which MLflow would make.

    Raises ``TooEarlyError`` if the store is a database file that does not exist.
    """
    database = database_of(tracking_uri)
    if database is not None and not database.is_file():
        raise TooEarlyError(
            "no store here", tracking_uri, "Give the store that `predrain train --registry` registered a model in."
        )


@contextmanager
def opened_store(tracking_uri: str) -> Iterator[Any]:
    """Import MLflow quietly, point it at a store for the length of a block, and translate its errors.

    ``tracking_uri``: ``sqlite:///PATH`` or a tracking server's address.
    Yields: ``mlflow``.
    Raises ``InputError`` if the store cannot be used, or refuses what the block asks of it.
    """
    if not tracking_uri.startswith((_SQLITE, "http://", "https://")):
        raise InputError(
            f"'{tracking_uri}' is no store that MLflow 3 writes",
            "tracking store",
            "Give sqlite:///PATH or the address of a tracking server.",
        )
    database = database_of(tracking_uri)
    if database is not None:
        try:
            database.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot make the folder of the store: {error.strerror}", tracking_uri, "Choose another path."
            ) from None
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # seven, its default, are minutes without a word
    with warnings.catch_warnings():
        # its own deprecations and hints are none of the user's business, and we run with warnings as errors
        warnings.simplefilter("ignore")
        levels = {name: logging.getLogger(name).level for name in _LOGGERS}
        import mlflow  # noqa: PLC0415 - takes two seconds, which only a run that records should spend
        import mlflow.models  # noqa: PLC0415 - likewise
        import mlflow.pyfunc  # noqa: PLC0415 - likewise
        from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415 - MLflow's, which imports it

        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        before = mlflow.get_tracking_uri(), mlflow.get_registry_uri()
        mlflow.set_tracking_uri(tracking_uri)
        mlflow.set_registry_uri(tracking_uri)
        try:
            yield mlflow
        except (mlflow.exceptions.MlflowException, SQLAlchemyError) as error:  # the latter from a damaged database
            raise InputError(
                f"MLflow refused: {str(error).splitlines()[0]}",
                tracking_uri,
                "Check that the store is there and whole, its path, and the names.",
            ) from None
        finally:
            mlflow.set_tracking_uri(before[0])
            mlflow.set_registry_uri(before[1])
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def _log_model(mlflow: Any, loaded: Any, bundle: Path, run_id: str) -> Any:
    import pandas as pd  # noqa: PLC0415 - who only looks a version up needs none

    schema = mlflow.types
    # as text: MLflow's own type for times refuses those with a zone, which is how predrain writes them
    inputs = [schema.ColSpec("string", "unit"), schema.ColSpec("string", "decision_time", required=False)]
    inputs += [schema.ColSpec("double", column.name) for column in loaded.fitted.columns]
    outputs = [
        schema.ColSpec("string", "unit"),
        schema.ColSpec("double", "risk"),
        schema.ColSpec("double", "score"),
        schema.ColSpec("long", "rank"),
        schema.ColSpec("boolean", "alert"),
    ]
    signature = mlflow.models.ModelSignature(inputs=schema.Schema(inputs), outputs=schema.Schema(outputs))
    versions = loaded.manifest["libraries"]
    rows: dict[str, Any] = {"unit": ["GPU-0", "GPU-1"], "decision_time": ["2026-01-31T06:00:00Z"] * 2}
    example = pd.DataFrame(rows | {column.name: [0.0, math.nan] for column in loaded.fitted.columns})
    with mlflow.start_run(run_id=run_id):
        return mlflow.pyfunc.log_model(
            name="bundle",
            python_model=str(Path(__file__).with_name("pyfunc.py")),
            artifacts={"bundle": str(bundle.resolve())},
            signature=signature,
            input_example=example,
            # without predrain itself, which must come from where its user trusts it: serve with --env-manager local
            pip_requirements=[f"{_package(name)}=={versions[name]}" for name in sorted(versions)],
        )


def _package(library: str) -> str:
    # the plain package brings half a gigabyte of GPU libraries along for the same import
    return "xgboost-cpu" if library == "xgboost" else library
