"""Runs in MLflow that a second, unchanged run of the same job finds again instead of writing them twice."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.registry.store import experiment_id, opened_store

FINGERPRINT = "predrain.fingerprint"
"""Tag that holds the digest of all that a run records."""

_PARENT = "mlflow.parentRunId"
_FINISHED = "FINISHED"
_PARAMS_PER_CALL = 100  # MLflow's own limit of one batch
_METRICS_PER_CALL = 1000  # likewise
_PARAM_LENGTH = 6000  # likewise, of one value
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What one run records.

    ``params``: flat parameters by dotted name.
    ``metrics``: flat metrics; None and NaN are left out.
    ``artifacts``: files and folders to keep with it; they do not count towards :attr:`fingerprint`.
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    artifacts: tuple[Path, ...] = ()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of name, parameters, metrics and tags."""
        content = [
            self.name,
            {key: str(value) for key, value in self.params.items()},
            {key: repr(float(value)) for key, value in self.metrics.items() if value is not None},
            dict(self.tags),
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Logged:
    """What :func:`log_series` did.

    ``added``: runs that were written, the parent among them.
    ``kept``: runs that stood there already.
    """

    run_id: str
    added: int
    kept: int


def log_series(tracking_uri: str, experiment: str, parent: RunRecord, children: Sequence[RunRecord] = ()) -> Logged:
    """Record a run with runs nested in it, once.

    Runs are known by their fingerprint: those that are finished are left alone, those that a killed job left
    unfinished are filled again, so that a job that is repeated adds nothing and one that was killed goes on. A job
    whose results differ in anything has a parent of its own.

    ``tracking_uri``: ``sqlite:///PATH`` or a tracking server's address.
    Raises ``InputError`` if the store cannot be used.
    """
    whole = hashlib.sha256("".join([parent.fingerprint, *(each.fingerprint for each in children)]).encode())
    with opened_store(tracking_uri) as mlflow:
        client = mlflow.MlflowClient()
        home = experiment_id(client, tracking_uri, experiment)
        top, done = _find_or_make(client, home, parent, whole.hexdigest(), None)
        if done:
            return Logged(str(top.info.run_id), 0, 1 + len(children))
        known = _children(client, home, str(top.info.run_id))
        added = 1
        for each in children:
            found = known.get(each.fingerprint)
            if found is not None and found.info.status == _FINISHED:
                continue
            run = found or _make(client, home, each, each.fingerprint, str(top.info.run_id))
            fill_run(mlflow, client, run, params=each.params, metrics=each.metrics, artifacts=each.artifacts)
            added += 1
        fill_run(mlflow, client, top, params=parent.params, metrics=parent.metrics, artifacts=parent.artifacts)
    return Logged(str(top.info.run_id), added, 1 + len(children) - added)


def tag_run(tracking_uri: str, run_id: str, tags: Mapping[str, str]) -> None:
    """Tag a run; older tags of the same keys are replaced.

    Raises ``InputError`` if there is no such run.
    """
    with opened_store(tracking_uri) as mlflow:
        for key, value in tags.items():
            mlflow.MlflowClient().set_tag(run_id, key, value)


def fill_run(
    mlflow: Any,
    client: Any,
    run: Any,
    *,
    params: Mapping[str, Any],
    metrics: Mapping[str, float | None],
    artifacts: Sequence[Path] = (),
) -> None:
    """Write a run's content in few calls and mark it finished; the same content again changes nothing.

    ``mlflow``, ``client``, ``run``: the module, the client, and the run as the client made or found it.
    ``metrics``: flat metrics; None and NaN are left out.
    """
    entities, run_id = mlflow.entities, str(run.info.run_id)
    flat = [entities.Param(key, str(value)[:_PARAM_LENGTH]) for key, value in sorted(params.items())]
    defined = sorted((key, float(value)) for key, value in metrics.items() if value is not None)
    # the run's own start as the time: written again after a kill, a metric is the same entry and not a second one
    numbers = [entities.Metric(key, value, run.info.start_time, 0) for key, value in defined if math.isfinite(value)]
    for start in range(0, len(flat), _PARAMS_PER_CALL):
        client.log_batch(run_id, params=flat[start : start + _PARAMS_PER_CALL])
    for start in range(0, len(numbers), _METRICS_PER_CALL):
        client.log_batch(run_id, metrics=numbers[start : start + _METRICS_PER_CALL])
    for path in artifacts:
        if path.is_dir():
            client.log_artifacts(run_id, str(path), path.name)
        else:
            client.log_artifact(run_id, str(path))
    client.set_terminated(run_id, _FINISHED)


def _find_or_make(client: Any, home: str, record: RunRecord, fingerprint: str, parent: str | None) -> tuple[Any, bool]:
    found = client.search_runs([home], filter_string=f"tags.`{FINGERPRINT}` = '{fingerprint}'", max_results=10)
    finished = [run for run in found if run.info.status == _FINISHED]
    if finished:
        return finished[0], True
    return (found[0] if found else _make(client, home, record, fingerprint, parent)), False


def _make(client: Any, home: str, record: RunRecord, fingerprint: str, parent: str | None) -> Any:
    tags = {**record.tags, FINGERPRINT: fingerprint} | ({_PARENT: parent} if parent is not None else {})
    return client.create_run(home, run_name=record.name, tags=tags)


def _children(client: Any, home: str, parent: str) -> dict[str, Any]:
    known: dict[str, Any] = {}
    token = None
    while True:
        page = client.search_runs(
            [home], filter_string=f"tags.`{_PARENT}` = '{parent}'", max_results=_PAGE, page_token=token
        )
        for run in page:
            mark = run.data.tags.get(FINGERPRINT, "")
            if mark not in known or run.info.status == _FINISHED:
                known[mark] = run
        token = page.token
        if not token:
            return known


def log_run(
    tracking_uri: str,
    experiment: str,
    *,
    params: Mapping[str, Any],
    metrics: Mapping[str, float | None],
    tags: Mapping[str, str],
    artifacts: Sequence[Path] = (),
    name: str | None = None,
) -> str:
    """Record a run.

    ``tracking_uri``: ``sqlite:///PATH`` or a tracking server's address.
    ``experiment``: name of the experiment; made where it does not exist, its artifacts beside the database.
    ``metrics``: flat metrics; undefined ones (None, NaN) are left out, because MLflow has no null.
    ``tags``: such as ``dataset_digest`` and ``code_revision``.
    ``name``: name of the run; by default MLflow makes one up.
    Raises ``InputError`` if the store cannot be used.
    """
    with opened_store(tracking_uri) as mlflow:
        client = mlflow.MlflowClient()
        run = client.create_run(experiment_id(client, tracking_uri, experiment), run_name=name, tags=dict(tags))
        fill_run(mlflow, client, run, params=params, metrics=metrics, artifacts=artifacts)
    return str(run.info.run_id)
