"""A sequence learner as a file: weights as safetensors, and in its header all else as JSON. Nothing in it can run."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from models.sequence.classifier import SequenceClassifier
from models.sequence.extra import require_torch
from models.sequence.layout import SequenceLayout
from models.sequence.scaling import SequenceScaler

_KEY = "predrain"
_SCALER = ("center", "scale", "static_center", "static_scale")


def dump_sequence(learner: SequenceClassifier) -> bytes:
    """Write a fitted sequence learner; the same learner gives the same bytes."""
    require_torch(learner.network)
    from safetensors.numpy import save  # noqa: PLC0415 - part of the extra

    scaler = learner.scaler_
    header = {
        "format": 1,
        "network": learner.network,
        "hidden": learner.hidden,
        "filters": learner.filters,
        "layout": scaler.layout.to_json(),
        "features": int(learner.n_features_in_),
        "epochs": int(learner.epochs_),
        "early_stopped": bool(learner.early_stopped_),
    }
    tensors = {f"weights.{name}": np.ascontiguousarray(value) for name, value in sorted(learner.weights_.items())}
    tensors |= {f"scaler.{name}": np.ascontiguousarray(getattr(scaler, name)) for name in _SCALER}
    return bytes(save(tensors, metadata={_KEY: json.dumps(header, sort_keys=True)}))


def load_sequence(name: str, content: bytes) -> SequenceClassifier:
    """Read what :func:`dump_sequence` wrote; probabilities are bit-identical on the same number of threads.

    Raises ``InputError`` if PyTorch is not installed.
    Raises ``ValueError`` if it is not a file of that learner.
    """
    require_torch(name)
    from safetensors import SafetensorError  # noqa: PLC0415 - part of the extra
    from safetensors.numpy import load  # noqa: PLC0415

    try:
        tensors = load(content)
        said = _header(content)
        if said["format"] != 1 or said["network"] != name:
            raise ValueError(f"it holds format {said['format']} of {said['network']}")
        layout = SequenceLayout.from_json(said["layout"])
        learner = SequenceClassifier(name, layout, hidden=int(said["hidden"]), filters=int(said["filters"]))
        learner.scaler_ = SequenceScaler(layout, *(tensors[f"scaler.{each}"] for each in _SCALER))
        learner.weights_ = {
            key.removeprefix("weights."): value for key, value in tensors.items() if key.startswith("weights.")
        }
        learner.classes_ = np.array([0, 1])
        learner.n_features_in_ = int(said["features"])
        learner.epochs_, learner.early_stopped_ = int(said["epochs"]), bool(said["early_stopped"])
        learner.check_weights()
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(str(error)) from None
    return learner


def _header(content: bytes) -> Any:
    # Eight bytes of length, then JSON: the format's own header, whose ``__metadata__`` the NumPy reader does not give.
    length = int.from_bytes(content[:8], "little")
    return json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_KEY])
