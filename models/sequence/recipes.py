"""How the sequence learners are made from their settings."""

from __future__ import annotations

from typing import Any

from models.recipe import Recipe
from models.sequence.classifier import SequenceClassifier
from models.sequence.extra import require_torch

_DEFAULTS: dict[str, Any] = {
    "hidden": 64,
    "learning_rate": 1e-3,
    "weight_decay": 0.0,
    "batch_size": 128,
    # At most; the tail ends it.
    "epochs": 20,
    "patience": 3,
    "fixed_epochs": 5,
    "tail_share": 0.2,
}


def recipe(name: str) -> Recipe:
    """Give the recipe of ``lstm`` or ``cnn1d``.

    Raises ``InputError`` if PyTorch is not installed.
    """
    require_torch(name)
    defaults = {**_DEFAULTS, "filters": 32} if name == "cnn1d" else _DEFAULTS

    def build(seed: int, settings: dict[str, Any]) -> SequenceClassifier:
        return SequenceClassifier(name, **settings, random_state=seed)

    return Recipe(defaults, build)
