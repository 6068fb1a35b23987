"""What a search of settings chose, in facts and in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd


def search_facts(table: pd.DataFrame | None) -> dict[str, dict[str, Any]]:
    """Sum up what a search found for each learner.

    ``table``: as :func:`models.search.search_table` gives it; None: nothing was searched.
    Returns: by learner: ``settings`` and ``given``, the overrides chosen and those given; ``mean`` and ``given_mean``,
    their mean average precision over the folds (NaN where nothing could be compared); ``tried``, how many settings were
    compared, the given ones among them; ``folds``, on how many; ``why``, in words.
    """
    if table is None:
        return {}
    found = {}
    for learner, trials in table.groupby("learner", sort=False):
        chosen, given = trials[trials["chosen"]].iloc[0], trials[trials["trial"] == 0].iloc[0]
        folds = [name for name in table if str(name).startswith("fold_")]
        found[str(learner)] = {
            "settings": json.loads(chosen["settings"]),
            "given": json.loads(given["settings"]),
            "mean": float(chosen["mean"]),
            "given_mean": float(given["mean"]),
            "tried": int(trials["mean"].notna().sum()),
            "folds": int(chosen[folds].notna().sum()),
            "why": str(chosen["why"]),
        }
    return found


def settings_in_words(settings: Mapping[str, Any]) -> str:
    """Write overrides of a learner's settings for a reader.

    Examples
    --------
    >>> settings_in_words({"epochs": 20, "hidden_layer_sizes": [32, 16], "max_features": "sqrt"})
    'epochs 20, hidden_layer_sizes (32, 16), max_features sqrt'
    >>> settings_in_words({})
    'the defaults'
    """
    parts = [
        f"{key} ({', '.join(map(str, value))})" if isinstance(value, list | tuple) else f"{key} {value}"
        for key, value in sorted(settings.items())
    ]
    return ", ".join(parts) or "the defaults"
