"""Channels that a model uses and their importance, from the files of a backtest or a training run."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pandas as pd
import pyarrow as pa

from foundation.errors import InputError
from telemetry.dataset.channels import ROLLUP_SUFFIXES

ATTRIBUTIONS: Final = "attributions.parquet"
"""File in a backtest's ``evaluation/`` with the attributions of each feature, by fold.

Columns: ``fold`` (int), ``model`` (string), ``feature`` (string, column name), ``group`` (string), ``channel`` (string,
null if the feature has none), ``share`` (float, mean absolute attribution of the feature as a share of the sum over all
features; adds up to 1 per fold and model), ``rows`` (int, number of explained rows).
"""

# Keys of :attr:`Importance.shares` for features without a channel: from the history of XIDs; from incidents, repairs,
# diagnostics and driver changes; from sources other than telemetry (the inventory, gaps, sample counts).
XIDS: Final = "XIDs"
EVENTS: Final = "other events"
NO_TELEMETRY: Final = "no telemetry"

_NO_CHANNELS: Final = frozenset({XIDS, EVENTS, NO_TELEMETRY})
_SUFFIXES: Final = tuple(suffix for suffixes in ROLLUP_SUFFIXES.values() for suffix in suffixes)
_COLUMNS: Final = ["fold", "model", "group", "channel", "share", "rows"]


@dataclass(frozen=True, slots=True)
class Importance:
    """Importance of the channels in a model.

    ``shares``: share of each channel and of :data:`XIDS`, :data:`EVENTS` and :data:`NO_TELEMETRY`, adding up to 1;
    empty if unknown.
    """

    model: str
    where: str
    used: frozenset[str]
    shares: Mapping[str, float] = field(default_factory=dict)

    def of(self, channels: Iterable[str]) -> float | None:
        """Return the total share of channels; None if the model uses none of them, or shares are unknown."""
        used = [name for name in channels if name in self.used]
        return math.fsum(self.shares.get(name, 0.0) for name in used) if self.shares and used else None


def channel_of(name: str, channels: Iterable[str]) -> str | None:
    """Return the channel with this name, roll-up (``power_w_max``) or flag; None if there is none."""
    known = set(channels)
    for suffix in ("", *_SUFFIXES):
        if name.endswith(suffix) and name.removesuffix(suffix) in known:
            return name.removesuffix(suffix)
    flags = [channel for channel in known if name.startswith(f"{channel}_")]
    return max(flags, key=len) if flags else None


def read_importance(
    backtest: Path | None, bundle: Path | None, channels: Iterable[str]
) -> tuple[Importance | None, str]:
    """Read the channels' importance from a backtest, or else the channels that a bundle uses.

    Returns it, or None, with a sentence that names its source or the command to run.
    Raises ``InputError`` if a file is corrupt.
    """
    known = list(channels)
    missing_sources = []
    if backtest is not None:
        file = backtest / "evaluation" / ATTRIBUTIONS
        if file.is_file():
            importance, folds = _from_attributions(file, known)
            return importance, (
                f"Importance: share of the attributions of {importance.model} over {folds} folds of the last backtest: "
                f"it measures the effect on scores, not on precision ({file})."
            )
        missing_sources.append(f"{file} is not there")
    if bundle is not None:
        if (bundle / "manifest.json").is_file():
            importance = _from_bundle(bundle, known)
            return importance, f"The bundle names the channels it uses, not their importance ({bundle})."
        missing_sources.append(f"{bundle} holds no bundle")
    reason = "; ".join(missing_sources) or "no backtest and no bundle were given"
    return None, (
        f"The importance of channels is unknown: {reason}. Run `predrain train` or `predrain backtest` on your "
        "dataset. Until then, channels with known precursors of failures count as used."
    )


def _from_attributions(file: Path, known: list[str]) -> tuple[Importance, int]:
    metrics = file.parents[1] / "metrics.json"
    try:
        profile = json.loads(metrics.read_text(encoding="utf-8"))["profile"] if metrics.exists() else None
        table = pd.read_parquet(file, columns=_COLUMNS)
        models = sorted(table["model"].unique())
        model = str(profile if profile in models else models[0])
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError, IndexError) as error:
        raise _damaged(file, str(error) or "it has no rows") from error
    rows = table[(table["model"] == model) & table["share"].notna() & (table["rows"] > 0)]
    channels = [channel if isinstance(channel, str) else None for channel in rows["channel"]]
    keys = [_key(str(group), channel, known) for group, channel in zip(rows["group"], channels, strict=True)]
    sums = (rows["share"] * rows["rows"]).groupby(keys).sum()
    shares = (sums / sums.sum()).to_dict() if sums.sum() > 0 else {}
    return Importance(model, str(file), frozenset(sums.index) - _NO_CHANNELS, shares), rows["fold"].nunique()


def _from_bundle(bundle: Path, known: list[str]) -> Importance:
    file = bundle / "manifest.json"
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        keys = {_key(str(feature["group"]), feature["channel"], known) for feature in manifest["features"]}
        return Importance(str(manifest["profile"]), str(bundle), frozenset(keys) - _NO_CHANNELS)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(file, f"a key is missing or invalid: {error}") from error


def _key(group: str, channel: str | None, known: list[str]) -> str:
    if group == "history":
        return XIDS if (channel or "").startswith("xid") else EVENTS
    if group in ("static", "gaps") or channel is None:
        return NO_TELEMETRY
    return channel_of(channel, known) or NO_TELEMETRY


def _damaged(file: Path, reason: str) -> InputError:
    return InputError(f"cannot use the file: {reason}", str(file), "Run the backtest or the training again.")
