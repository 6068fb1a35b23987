"""Feature settings of a bundle, so that live rows have the same columns as in training."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from evaluation.drift.movement import shortest_windows
from features.config import DecisionSection, FeatureSection, LabelSection
from features.matrix.live_rows import live_plan
from features.matrix.meta import MatrixConfig
from features.matrix.sequences import SequencePlan
from foundation.durations import format_duration, parse_duration
from foundation.errors import InputError
from models.bundle.store import Bundle
from models.config import PrecisionTargetsSection
from models.sequence.layout import window_of
from models.training.reference import Reference
from telemetry.config import ChannelDeclaration
from telemetry.dataset.channels import Channel, resolve_channels, with_rollups
from telemetry.dataset.meta import DatasetMeta

Values = NDArray[np.floating]

SILENT_FROM = 0.5
"""Increase over training in the share of units without a value at which a channel counts as missing."""

_TRAIN = "Train it with `predrain train`."


def live_config(bundle: Bundle, meta: DatasetMeta) -> MatrixConfig:
    """Return a bundle's feature settings for scoring a dataset.

    ``bundle``: its decision grid, labels and features apply, regardless of the current parameters.
    Returns: settings with the bundle's channels, and its columns without the raw window (:func:`window_plan`). Channels
    missing from the dataset are unknown everywhere (:func:`missing_channels`); those unknown to the bundle are ignored.
    Raises ``InputError`` if the bundle has no training parameters, predicts another unit, was trained with another
    step, has parameters that are invalid in this version, or the dataset has none of its channels.
    """
    location = f"bundle {bundle.path}"
    params = bundle.manifest.get("params")
    if not isinstance(params, Mapping):
        raise InputError("the bundle has no training parameters", location, _TRAIN)
    step, unit = _trained_on(bundle, params, location)
    window = window_of(bundle.columns)
    if meta.step != step:
        raise InputError(
            f"the dataset's step is {format_duration(meta.step)}, but the bundle's is {format_duration(step)}",
            location,
            "Score a dataset of the same step, or train again.",
        )
    if unit is not None and unit != meta.unit:
        raise InputError(
            f"the bundle was trained on {unit}s, but the dataset's unit is the {meta.unit}", location, "Train again."
        )
    try:
        config = MatrixConfig(
            decision=DecisionSection.model_validate(params.get("decision", {})),
            labels=LabelSection.model_validate(params.get("labels", {})),
            features=FeatureSection.model_validate(params.get("features", {})),
            augmentation=0,
            negative_ratio=0,
            seed=0,
            unit=meta.unit,
            step=step,
            span=meta.span,
            channels=_channels(bundle, meta, params, location),
            columns=bundle.columns if window is None else bundle.columns[: window.tabular],
            dataset_digest=meta.digest,
        )
    except ValidationError as error:
        raise InputError(
            f"the bundle's parameters are not valid in this version: {error.errors()[0]['msg']}",
            location,
            "Train it again.",
        ) from None
    if live_plan(config).reads_samples and not set(config.channels) & set(meta.channels):
        raise InputError(
            f"the bundle reads telemetry ({len(config.channels)} channels), and the dataset has none of it",
            location,
            "Collect or import samples, or train a bundle on events alone.",
        )
    return config


def drain_horizon(bundle: Bundle, config: MatrixConfig) -> timedelta:
    """Return the time after the gap within which an incident makes a drain right, by the bundle's precision targets."""
    targets = (bundle.manifest["params"].get("models") or {}).get("precision_targets") or {}
    horizon = PrecisionTargetsSection.model_validate({"horizon": targets.get("horizon")}).horizon
    return max(horizon or config.labels.horizon, config.labels.horizon)


def window_plan(bundle: Bundle, config: MatrixConfig) -> SequencePlan | None:
    """Plan the raw windows that follow a row's columns for a bundle's sequence models; None: it has none.

    Raises ``InputError`` if this version computes other windows.
    """
    if window_of(bundle.columns) is None:
        return None
    plan = SequencePlan.of(config)
    if plan.columns != bundle.columns[len(config.columns) :]:
        raise InputError(
            "this version of predrain computes raw windows differently", f"bundle {bundle.path}", "Train again."
        )
    return plan


def missing_channels(
    config: MatrixConfig, meta: DatasetMeta, reference: Reference | None, values: Values
) -> tuple[str, ...]:
    """List the channels that a bundle was trained on and that no longer arrive, sorted.

    The dataset lacks them, or the share of units without a value is :data:`SILENT_FROM` higher than in training: an
    exporter was upgraded, or a field was removed from its configuration.

    ``reference``: the bundle's; None: only check the dataset's channels.
    ``values``: features of the scored units; shape (n_rows, n_features).
    """
    lost = set(config.channels) - set(meta.channels)
    if reference is not None and len(values):
        for index, column in shortest_windows(reference.columns).values():
            missing_now = float(np.isnan(values[:, index]).mean())
            if missing_now - reference.features[index].missing_share >= SILENT_FROM:
                lost.add(str(column.channel))
    return tuple(sorted(lost))


def _trained_on(bundle: Bundle, params: Mapping[str, Any], location: str) -> tuple[timedelta, str | None]:
    try:
        step = parse_duration(params["telemetry"]["step"])
    except (KeyError, TypeError, ValueError):
        raise InputError("the bundle has no training step", location, _TRAIN) from None
    data = bundle.manifest.get("data")
    unit = data.get("unit") if isinstance(data, Mapping) else None
    return step, None if unit is None else str(unit)


def _channels(bundle: Bundle, meta: DatasetMeta, params: Mapping[str, Any], location: str) -> dict[str, Channel]:
    """Resolve the bundle's channels, in its order, from the dataset, the bundle's declarations or the catalogue."""
    declared = (params.get("channels") or {}).items()
    declarations = {name: ChannelDeclaration.model_validate(settings) for name, settings in declared}
    known = with_rollups(resolve_channels(declarations)) | dict(meta.channels)
    names = [str(name) for name in bundle.manifest.get("channels", [])]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(
            f"the kind of the bundle's channel '{unknown[0]}' is unknown",
            location,
            "Score a dataset that has the channel, or train again on one without.",
        )
    return {name: known[name] for name in names}
