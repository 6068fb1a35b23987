"""Runs in MLflow; an unchanged job that is run again finds its run instead of writing it twice."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.registry.store import experiment_id, opened_store

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

    ``tracking_uri``: ``sqlite:///PATH`` or a tracking server's address.
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
    mark = hashlib.sha256(content).hexdigest()
    with opened_store(tracking_uri) as mlflow:
        client, entities = mlflow.MlflowClient(), mlflow.entities
        home = experiment_id(client, tracking_uri, experiment)
        query = f"tags.`{FINGERPRINT}` = '{mark}'"
        runs = client.search_runs([home], filter_string=query, max_results=10) if once else []
        finished = [run for run in runs if run.info.status == _FINISHED]
        if finished:
            return str(finished[0].info.run_id)
        run = runs[0] if runs else client.create_run(home, run_name=name, tags={**tags, FINGERPRINT: mark})
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
