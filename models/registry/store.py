"""MLflow store: runs and model versions. MLflow is imported here and in ``models/registry/pyfunc.py`` only.

The store is a database (``sqlite:///``) or a tracking server; MLflow 3 rejects its old file store. MLflow's own usage
telemetry is disabled before the import. Other modules access MLflow through :func:`opened_store`.
"""

import hashlib
import json
import logging
import math
import os
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from filelock import FileLock, Timeout

from foundation.errors import InputError, TooEarlyError
from foundation.files import disk_errors

CHALLENGER = "challenger"
"""Alias of the latest registered version."""

CHAMPION = "champion"
"""Alias of the champion's model version."""

DIGEST_TAG = "bundle_digest"
"""Tag of a version: digest of its bundle."""

ARTIFACTS = "mlartifacts"
"""Folder next to the database with the files of its runs and models."""

_CREATION_TIMEOUT_S = 120

_SQLITE = "sqlite:///"
_SQLITE_ADVICE = {
    "is full": "Free some space, then run again. Earlier content is unchanged.",
    "disk I/O error": "Check whether the disk is full or failing, then run again. Earlier content is unchanged.",
    "is locked": "Another process is writing to it. Run again.",
    "readonly": "Run as a user who may write to it.",
}
_LOGGERS = {
    "mlflow": logging.ERROR,
    "alembic": logging.ERROR,
    "sqlalchemy": logging.ERROR,
    "mlflow.store.db.utils": logging.CRITICAL,  # it logs the traceback of each error that it raises
    "mlflow.models.model": logging.ERROR,
    "mlflow.utils.environment": logging.ERROR,
}


def register_bundle(tracking_uri: str, model: str, bundle: Path, *, run_id: str) -> int:
    """Register a bundle as a new model version with the challenger alias.

    The version is a pyfunc logged from code (``models/registry/pyfunc.py``) whose only artifact is the bundle's folder:
    nothing is pickled, and ``mlflow models serve`` returns risks. A bundle that is already a version with files is not
    registered again: the alias moves to that version.

    ``model``: name of the registered model; created if missing.
    Raises ``InputError`` if the bundle is damaged, or the store cannot be used.
    """
    from models.bundle.store import load_bundle  # recording a run needs no learner libraries

    loaded = load_bundle(bundle)
    with opened_store(tracking_uri) as mlflow:
        client = mlflow.MlflowClient()
        refuse_moved(client, tracking_uri)
        with already_made(mlflow):
            client.create_registered_model(model)
        registered = [
            int(model_version.version)
            for model_version in client.search_model_versions(f"name = '{model}'")
            if model_version.tags.get(DIGEST_TAG) == loaded.digest and _has_files(mlflow, model_version)
        ]
        if registered:
            version = max(registered)
        else:
            info = _log_model(mlflow, loaded, bundle, run_id)
            created = client.create_model_version(
                model, info.model_uri, run_id=run_id, model_id=info.model_id, tags={DIGEST_TAG: loaded.digest}
            )
            version = int(created.version)
        client.set_registered_model_alias(model, CHALLENGER, str(version))
    return version


def experiment_id(client: Any, tracking_uri: str, name: str) -> str:
    """Return the ID of an experiment, creating it with its artifacts next to the database if missing."""
    import mlflow

    refuse_moved(client, tracking_uri)
    location = None
    database = database_of(tracking_uri)
    if database is not None:
        # by default, artifacts would go to the working directory
        location = (database.parent / ARTIFACTS / name).resolve().as_uri()
    if client.get_experiment_by_name(name) is None:
        with already_made(mlflow):
            client.create_experiment(name, artifact_location=location)
    return str(client.get_experiment_by_name(name).experiment_id)


def refuse_moved(client: Any, tracking_uri: str) -> None:
    """Reject a store that was moved or copied: MLflow records file locations as absolute paths.

    A moved store would find none of its files and write new ones at the old path; a copy would write into the original.

    Raises ``InputError`` if the artifacts folder next to the database is not the recorded one.
    """
    database = database_of(tracking_uri)
    if database is None:
        return
    for experiment in client.search_experiments():
        recorded = local_file_uri_to_path(experiment.artifact_location)
        new_folder = database.resolve().parent / ARTIFACTS / experiment.name
        if recorded is not None and new_folder.is_dir() and recorded.resolve() != new_folder.resolve():
            old, new = recorded.parent.parent, database.resolve().parent
            raise InputError(
                f"the store was moved or copied: its files are recorded at {old}",
                tracking_uri,
                f"Move it back, or, if the old path is empty, link it to the new one: ln -s {new} {old}",
            )


def local_file_uri_to_path(uri: str) -> Path | None:
    """Return the path of a ``file:`` URI or a plain path; None for any other URI."""
    parts = urlsplit(uri)
    return Path(url2pathname(parts.path)) if parts.scheme in ("", "file") else None


@contextmanager
def already_made(mlflow: Any) -> Iterator[None]:
    """Ignore that it already exists: a concurrent first training may have created it."""
    try:
        yield
    except mlflow.exceptions.MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def database_of(tracking_uri: str) -> Path | None:
    """Return the file of a SQLite store; None for a server."""
    return Path(tracking_uri.removeprefix(_SQLITE)) if tracking_uri.startswith(_SQLITE) else None


def refuse_absent(tracking_uri: str) -> None:
    """Reject a missing store, which MLflow would create.

    Raises ``TooEarlyError`` if the store is a database file that does not exist.
    """
    database = database_of(tracking_uri)
    if database is not None and not database.is_file():
        raise TooEarlyError(
            "the MLflow store does not exist",
            tracking_uri,
            "Give the store that `predrain train --registry` registered a model in.",
        )


@contextmanager
def opened_store(tracking_uri: str) -> Iterator[Any]:
    """Import MLflow quietly, point it at a store within the context, and translate its errors.

    ``tracking_uri``: ``sqlite:///PATH`` or the address of a tracking server.
    Yields: ``mlflow``.
    Raises ``InputError`` if the store cannot be used or rejects a request.
    """
    if not tracking_uri.startswith((_SQLITE, "http://", "https://")):
        raise InputError(
            f"'{tracking_uri}' is not an MLflow 3 store",
            "tracking store",
            "Give sqlite:///PATH or the address of a tracking server.",
        )
    database = database_of(tracking_uri)
    if database is not None:
        try:
            database.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot create the folder of the store: {error.strerror}", tracking_uri, "Choose another path."
            ) from None
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # the default of seven means minutes without output
    with warnings.catch_warnings():
        # hide MLflow's own deprecation warnings and hints; tests turn warnings into errors
        warnings.simplefilter("ignore")
        levels = {name: logging.getLogger(name).level for name in _LOGGERS}
        import mlflow  # takes two seconds to import
        import mlflow.models
        import mlflow.pyfunc
        from sqlalchemy.exc import SQLAlchemyError

        for name, level in _LOGGERS.items():
            logging.getLogger(name).setLevel(level)
        previous = mlflow.get_tracking_uri(), mlflow.get_registry_uri()
        try:
            if database is not None and not database.exists():
                _make_database(mlflow, database)
            mlflow.set_tracking_uri(tracking_uri)
            mlflow.set_registry_uri(tracking_uri)
            with disk_errors(database or Path(tracking_uri)):
                yield mlflow
        except (mlflow.exceptions.MlflowException, SQLAlchemyError) as error:  # the latter if the database is damaged
            raise InputError(f"MLflow rejected the request: {_cause(error)}", tracking_uri, _advice(error)) from None
        finally:
            mlflow.set_tracking_uri(previous[0])
            mlflow.set_registry_uri(previous[1])
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def _make_database(mlflow: Any, database: Path) -> None:
    """Create the tables in a temporary file first, so that no kill, full disk or second writer leaves half a store.

    Raises ``InputError`` if another process is creating the store and does not finish.
    """
    lock = FileLock(database.with_name(f"{database.name}.creation-lock"), mode=0o666, fallback_to_soft=False)
    # a new name per attempt: MLflow keeps connections to a file open until the process ends
    scratch = database.with_name(f".{database.name}.{uuid.uuid4().hex}.new")
    with disk_errors(database):
        try:
            lock.acquire(timeout=_CREATION_TIMEOUT_S)
        except Timeout:
            advice = "Wait for its end, then run again."
            raise InputError("another process is creating this store", str(database), advice) from None
        try:
            if database.exists():
                return
            uri = f"{_SQLITE}{scratch}"
            mlflow.MlflowClient(uri, uri).search_experiments(max_results=1)
            scratch.replace(database)
        finally:
            for leftover in database.parent.glob(f".{database.name}.*.new*"):  # also those of killed processes
                leftover.unlink(missing_ok=True)
            lock.release()


def _cause(error: BaseException) -> str:
    """Return the database's own message, else the first line of MLflow's."""
    chain: BaseException | None = error
    while chain is not None:
        original = getattr(chain, "orig", None)
        if original is not None:
            return str(original)
        chain = chain.__cause__ or chain.__context__
    return str(error).splitlines()[0]


def _advice(error: BaseException) -> str:
    cause = _cause(error)
    for part, advice in _SQLITE_ADVICE.items():
        if part in cause:
            return advice
    return "Check that the store exists and is intact, its path, and the names."


def _has_files(mlflow: Any, model_version: Any) -> bool:
    uri = f"models:/{model_version.name}/{model_version.version}"
    try:
        return bool(mlflow.artifacts.list_artifacts(artifact_uri=uri))
    except (OSError, mlflow.exceptions.MlflowException):
        return False


def _log_model(mlflow: Any, loaded: Any, bundle: Path, run_id: str) -> Any:
    import pandas as pd

    schema = mlflow.types
    # as text: MLflow's datetime type rejects time zones, which predrain writes
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
            # without predrain itself, which users install from a source they trust: serve with --env-manager local;
            # `xgboost-cpu` avoids half a gigabyte of GPU libraries in the plain package
            pip_requirements=[
                f"{name.replace('xgboost', 'xgboost-cpu')}=={version}" for name, version in sorted(versions.items())
            ],
        )


FINGERPRINT = "predrain.fingerprint"
"""Tag with the digest of everything that a run records."""

_FINISHED = "FINISHED"
_PARAMS_PER_CALL = 100  # MLflow's limit per batch
_METRICS_PER_CALL = 1000  # likewise
_PARAM_LENGTH = 6000  # likewise, of one value
_DIGEST_LENGTH = 36  # likewise, of an input's digest
_INPUTS = ("dataset", "matrix")

Metrics = Mapping[str, float | None]
"""Flat metrics; None and NaN are skipped, because MLflow has no null."""


def log_run(
    tracking_uri: str,
    experiment: str,
    *,
    name: str,
    params: Mapping[str, Any],
    metrics: Metrics,
    tags: Mapping[str, str],
    steps: Sequence[Metrics] = (),
    artifacts: Sequence[Path] = (),
    only_once: bool = False,
) -> str:
    """Record a run and return its ID.

    ``experiment``: created if missing, with its artifacts next to the database.
    ``steps``: metrics of each step, for example a refit; recorded with the step's number.
    ``tags``: ``dataset_digest`` and ``matrix_digest`` are also recorded as the run's inputs.
    ``only_once``: return a finished run with the same content, and complete one that a killed job left unfinished.
    Raises ``InputError`` if the store cannot be used.
    """
    flat = {key: str(value)[:_PARAM_LENGTH] for key, value in sorted(params.items())}
    numbers = _defined(metrics, 0)
    for step, named in enumerate(steps):
        numbers += _defined(named, step)
    content = json.dumps([name, flat, numbers, dict(tags)], sort_keys=True).encode()
    digest = hashlib.sha256(content).hexdigest()
    with opened_store(tracking_uri) as mlflow:
        client, entities = mlflow.MlflowClient(), mlflow.entities
        home = experiment_id(client, tracking_uri, experiment)
        query = f"tags.`{FINGERPRINT}` = '{digest}'"
        runs = client.search_runs([home], filter_string=query, max_results=10) if only_once else []
        finished = [run for run in runs if run.info.status == _FINISHED]
        if finished:
            return str(finished[0].info.run_id)
        run = runs[0] if runs else client.create_run(home, run_name=name, tags={**tags, FINGERPRINT: digest})
        run_id = str(run.info.run_id)
        texts = [entities.Param(key, value) for key, value in flat.items()]
        # timestamp metrics with the run's start: completing a run after a kill then adds no duplicates
        values = [entities.Metric(key, value, run.info.start_time, step) for key, value, step in numbers]
        for start in range(0, len(texts), _PARAMS_PER_CALL):
            client.log_batch(run_id, params=texts[start : start + _PARAMS_PER_CALL])
        for start in range(0, len(values), _METRICS_PER_CALL):
            client.log_batch(run_id, metrics=values[start : start + _METRICS_PER_CALL])
        inputs = [_input(entities, name, str(tags[f"{name}_digest"])) for name in _INPUTS if f"{name}_digest" in tags]
        client.log_inputs(run_id, datasets=inputs)
        for path in artifacts:
            client.log_artifact(run_id, str(path))
        client.set_terminated(run_id, _FINISHED)
    return run_id


def _input(entities: Any, name: str, digest: str) -> Any:
    dataset = entities.Dataset(name, digest[:_DIGEST_LENGTH], "local", json.dumps({"sha256": digest}))
    return entities.DatasetInput(dataset, [entities.InputTag("mlflow.data.context", "training")])


def _defined(metrics: Metrics, step: int) -> list[tuple[str, float, int]]:
    named = ((key, math.nan if value is None else float(value)) for key, value in sorted(metrics.items()))
    return [(key, value, step) for key, value in named if math.isfinite(value)]


def tag_run(tracking_uri: str, run_id: str, tags: Mapping[str, str]) -> None:
    """Tag a run; existing tags with the same keys are replaced.

    Raises ``InputError`` if there is no such run.
    """
    with opened_store(tracking_uri) as mlflow:
        for key, value in tags.items():
            mlflow.MlflowClient().set_tag(run_id, key, value)
