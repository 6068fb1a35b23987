"""MLflow: every run recorded, every bundle a model version; imported here and in ``models/registry/pyfunc.py`` only.

The store is a database (``sqlite:///``); MLflow 3 refuses its old folder of files. Nothing leaves the machine:
telemetry is switched off before the import. Other modules reach MLflow through :func:`opened_store`.
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
"""Alias of the version registered last."""

CHAMPION = "champion"
"""Alias of the version that is served."""

DIGEST_TAG = "bundle_digest"
"""Tag of a version: the digest of its bundle."""

ARTIFACTS = "mlartifacts"
"""Folder next to the database that holds the files of its runs and models."""

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
    """Register a bundle as a version of a model and make that the challenger.

    The version is a pyfunc logged from code (``models/registry/pyfunc.py``) whose only artifact is the bundle's folder:
    nothing is pickled, and ``mlflow models serve`` answers with risks. A bundle that is a version already is not
    registered again unless that version's files are gone: the alias moves to that version.

    ``model``: name of the registered model; made where it does not exist.
    Raises ``InputError`` if the bundle is not whole, or the store cannot be used.
    """
    from models.bundle.store import load_bundle  # recording a run needs no learner libraries

    loaded = load_bundle(bundle)
    with opened_store(tracking_uri) as mlflow:
        client = mlflow.MlflowClient()
        refuse_moved(client, tracking_uri)
        with already_made(mlflow):
            client.create_registered_model(model)
        same = [
            int(model_version.version)
            for model_version in client.search_model_versions(f"name = '{model}'")
            if model_version.tags.get(DIGEST_TAG) == loaded.digest and _has_files(mlflow, model_version)
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
    import mlflow

    refuse_moved(client, tracking_uri)
    location = None
    database = database_of(tracking_uri)
    if database is not None:
        # by default artifacts would go to the folder that the command happens to run in
        location = (database.parent / ARTIFACTS / name).resolve().as_uri()
    if client.get_experiment_by_name(name) is None:
        with already_made(mlflow):
            client.create_experiment(name, artifact_location=location)
    return str(client.get_experiment_by_name(name).experiment_id)


def refuse_moved(client: Any, tracking_uri: str) -> None:
    """Refuse a store of one folder that was moved or copied: MLflow records where its files are as absolute paths.

    A moved store would find none of its files and write new ones where it was; a copy would write among the original's.

    Raises ``InputError`` if the folder of artifacts next to the database is not the one that the store has recorded.
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
    """Return the path that a ``file:`` URI or a plain path names; None for any other URI."""
    parts = urlsplit(uri)
    return Path(url2pathname(parts.path)) if parts.scheme in ("", "file") else None


@contextmanager
def already_made(mlflow: Any) -> Iterator[None]:
    """Ignore that it exists already: another first training may have created it meanwhile."""
    try:
        yield
    except mlflow.exceptions.MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


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
            "the MLflow store does not exist",
            tracking_uri,
            "Give the store that `predrain train --registry` registered a model in.",
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
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # seven, its default, are minutes without a word
    with warnings.catch_warnings():
        # its own deprecations and hints are none of the user's business, and we run with warnings as errors
        warnings.simplefilter("ignore")
        levels = {name: logging.getLogger(name).level for name in _LOGGERS}
        import mlflow  # takes two seconds to import
        import mlflow.models
        import mlflow.pyfunc
        from sqlalchemy.exc import SQLAlchemyError

        for name, level in _LOGGERS.items():
            logging.getLogger(name).setLevel(level)
        before = mlflow.get_tracking_uri(), mlflow.get_registry_uri()
        try:
            if database is not None and not database.exists():
                _make_database(mlflow, database)
            mlflow.set_tracking_uri(tracking_uri)
            mlflow.set_registry_uri(tracking_uri)
            with disk_errors(database or Path(tracking_uri)):
                yield mlflow
        except (mlflow.exceptions.MlflowException, SQLAlchemyError) as error:  # the latter from a damaged database
            raise InputError(f"MLflow rejected the request: {_cause(error)}", tracking_uri, _advice(error)) from None
        finally:
            mlflow.set_tracking_uri(before[0])
            mlflow.set_registry_uri(before[1])
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def _make_database(mlflow: Any, database: Path) -> None:
    """Make the tables in a file of another name first, so that no kill, full disk or second writer leaves half a store.

    Raises ``InputError`` if another process makes the store and does not end.
    """
    lock = FileLock(database.with_name(f"{database.name}.creation-lock"), mode=0o666, fallback_to_soft=False)
    # a new name for each try: MLflow keeps its connections to a file for as long as the process lives
    scratch = database.with_name(f".{database.name}.{uuid.uuid4().hex}.new")
    with disk_errors(database):
        try:
            lock.acquire(timeout=_CREATION_TIMEOUT_S)
        except Timeout:
            do = "Wait for its end, then run again."
            raise InputError("another process is creating this store", str(database), do) from None
        try:
            if database.exists():
                return
            uri = f"{_SQLITE}{scratch}"
            mlflow.MlflowClient(uri, uri).search_experiments(max_results=1)
            scratch.replace(database)
        finally:
            for left in database.parent.glob(f".{database.name}.*.new*"):  # also those of a process that was killed
                left.unlink(missing_ok=True)
            lock.release()


def _cause(error: BaseException) -> str:
    """Return what the database itself reports, else the first line of what MLflow makes of it."""
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
            # and with `xgboost-cpu`: the plain package brings half a gigabyte of GPU libraries for the same import
            pip_requirements=[
                f"{name.replace('xgboost', 'xgboost-cpu')}=={version}" for name, version in sorted(versions.items())
            ],
        )


FINGERPRINT = "predrain.fingerprint"
"""Tag that holds the digest of all that a run records."""

_FINISHED = "FINISHED"
_PARAMS_PER_CALL = 100  # MLflow's own limit of one batch
_METRICS_PER_CALL = 1000  # likewise
_PARAM_LENGTH = 6000  # likewise, of one value
_DIGEST_LENGTH = 36  # likewise, of an input's digest
_INPUTS = ("dataset", "matrix")

Metrics = Mapping[str, float | None]
"""Flat metrics; None and NaN are left out, because MLflow has no null."""


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
    once: bool = False,
) -> str:
    """Record a run and give its id.

    ``experiment``: made where it does not exist, its artifacts next to the database.
    ``steps``: metrics of each step, such as a refit; recorded with the step's number.
    ``tags``: with ``dataset_digest`` and ``matrix_digest``, which are recorded as the run's inputs, too.
    ``once``: a finished run with the same content is left alone, and one that a killed job left unfinished is filled.
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
        runs = client.search_runs([home], filter_string=query, max_results=10) if once else []
        finished = [run for run in runs if run.info.status == _FINISHED]
        if finished:
            return str(finished[0].info.run_id)
        run = runs[0] if runs else client.create_run(home, run_name=name, tags={**tags, FINGERPRINT: digest})
        run_id = str(run.info.run_id)
        texts = [entities.Param(key, value) for key, value in flat.items()]
        # the run's own start as the time: filled again after a kill, a metric is the same entry and not a second one
        values = [entities.Metric(key, value, run.info.start_time, step) for key, value, step in numbers]
        for start in range(0, len(texts), _PARAMS_PER_CALL):
            client.log_batch(run_id, params=texts[start : start + _PARAMS_PER_CALL])
        for start in range(0, len(values), _METRICS_PER_CALL):
            client.log_batch(run_id, metrics=values[start : start + _METRICS_PER_CALL])
        inputs = [_input(entities, name, str(tags[f"{name}_digest"])) for name in _INPUTS if f"{name}_digest" in tags]
        client.log_inputs(run_id, datasets=inputs)
        for path in artifacts:
            if path.is_dir():
                client.log_artifacts(run_id, str(path), path.name)
            else:
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
    """Tag a run; older tags of the same keys are replaced.

    Raises ``InputError`` if there is no such run.
    """
    with opened_store(tracking_uri) as mlflow:
        for key, value in tags.items():
            mlflow.MlflowClient().set_tag(run_id, key, value)
