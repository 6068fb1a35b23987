"""What channels were worth to a model, read from the files that a backtest or a training run left."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from telemetry.dataset.channel import ROLLUP_SUFFIXES
from telemetry.errors import InputError

ATTRIBUTIONS: Final = "attributions.parquet"
"""File in a backtest's ``evaluation/``: what each feature moved the models' scores by, fold by fold.

Columns: ``fold`` (int), ``model`` (string), ``feature`` (string, the column's name), ``group`` (string), ``channel``
(string, null where the feature has none), ``share`` (float: mean absolute attribution of the feature as a share of the
sum over all features, so that the shares of one fold and model add up to 1), ``rows`` (int: rows explained).
"""

XIDS: Final = "XIDs"
"""Key of :attr:`Worth.shares` for features made of the history of XIDs."""

EVENTS: Final = "other events"
"""Key of :attr:`Worth.shares` for features made of other events: incidents, repairs, diagnostics, driver changes."""

BESIDES: Final = "besides"
"""Key of :attr:`Worth.shares` for features of no source of telemetry: the inventory, gaps, counts of samples."""

_NO_CHANNELS: Final = frozenset({XIDS, EVENTS, BESIDES})
_SUFFIXES: Final = tuple(suffix for suffixes in ROLLUP_SUFFIXES.values() for suffix in suffixes)
_COLUMNS: Final = ("fold", "model", "feature", "group", "channel", "share", "rows")


@dataclass(frozen=True, slots=True)
class Worth:
    """What a model made of the channels.

    ``shares``: share of each channel, of :data:`XIDS`, :data:`EVENTS` and :data:`BESIDES`, adding up to 1; empty if
    unknown.
    """

    measure: str
    where: str
    model: str
    used: frozenset[str]
    shares: Mapping[str, float] = field(default_factory=dict)

    def of(self, channels: Iterable[str]) -> float | None:
        """Return the channels' shares together; None where none of them is among the model's, or none is known."""
        mine = [name for name in channels if name in self.used]
        if not self.shares or not mine:
            return None
        return math.fsum(self.shares.get(name, 0.0) for name in mine)


def channel_of(name: str, channels: Iterable[str]) -> str | None:
    """Return the channel that a feature's channel is derived from.

    ``name``: a channel, one of its roll-ups (``power_w_max``), or one bit of its flags
    (``clocks_event_reasons_power_brake``).
    Returns: none if it is derived from none of them.
    """
    known = set(channels)
    if name in known:
        return name
    for suffix in _SUFFIXES:
        if name.endswith(suffix) and name.removesuffix(suffix) in known:
            return name.removesuffix(suffix)
    flags = [each for each in known if name.startswith(f"{each}_")]
    return max(flags, key=len) if flags else None


def read_worth(backtest: Path | None, bundle: Path | None, channels: Iterable[str]) -> tuple[Worth | None, str]:
    """Read what the channels were worth: from a backtest if it says so, else from a trained bundle.

    ``backtest``: folder that ``predrain backtest`` wrote.
    ``bundle``: folder that ``predrain train`` wrote.
    Returns ``worth``: none if neither says anything.
    Returns ``said``: where it comes from, or what is missing and how to make it: one sentence.
    Raises ``InputError`` if a file is there and damaged.
    """
    known = list(channels)
    tried = []
    if backtest is not None:
        file = backtest / "evaluation" / ATTRIBUTIONS
        if file.is_file():
            worth = _from_attributions(file, _profile(backtest), known)
            return worth, f"Worth: {worth.measure} ({file})."
        tried.append(f"{file} is not there")
    if bundle is not None and (bundle / "manifest.json").is_file():
        worth = _from_bundle(bundle, known)
        return worth, f"Worth: {worth.measure} ({bundle})."
    if bundle is not None:
        tried.append(f"{bundle} holds no bundle")
    reason = "; ".join(tried) or "no backtest and no bundle were given"
    return None, (
        f"What a channel is worth is not known: {reason}. Run `predrain train` or `predrain backtest` on your dataset; "
        "until then channels are judged by whether failures are known to announce themselves there."
    )


def _profile(backtest: Path) -> str | None:
    try:
        profile = json.loads((backtest / "metrics.json").read_text(encoding="utf-8")).get("profile")
    except (OSError, ValueError, AttributeError):
        return None
    return profile if isinstance(profile, str) else None


def _from_attributions(file: Path, profile: str | None, known: list[str]) -> Worth:
    try:
        table = pq.read_table(file)
        missing = [name for name in _COLUMNS if name not in table.column_names]
        if missing:
            raise _damaged(file, f"it lacks the columns {missing}")
        rows: list[dict[str, Any]] = table.select(list(_COLUMNS)).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise _damaged(file, str(error)) from error
    models = sorted({str(row["model"]) for row in rows})
    if not models:
        raise _damaged(file, "it has no rows")
    model = profile if profile in models else models[0]
    mine = [row for row in rows if row["model"] == model and row["share"] is not None and row["rows"]]
    weight = {row["fold"]: float(row["rows"]) for row in mine}
    shares: dict[str, float] = defaultdict(float)
    used: set[str] = set()
    for row in mine:
        key = _key(str(row["group"]), row["channel"], known)
        shares[key] += float(row["share"]) * weight[row["fold"]]
        if key not in _NO_CHANNELS:
            used.add(key)
    measure = (
        f"share of the attributions of {model} over {len(weight)} folds of the last backtest: what moved its scores, "
        "which is not what its precision would lose"
    )
    return Worth(measure, str(file), model, frozenset(used), _normalised(shares))


def _from_bundle(bundle: Path, known: list[str]) -> Worth:
    file = bundle / "manifest.json"
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        features = [(str(each["group"]), each["channel"]) for each in manifest["features"]]
        profile = str(manifest["profile"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(file, f"it lacks or misstates {error}") from error
    keys = [_key(group, channel, known) for group, channel in features]
    used = frozenset(keys) - _NO_CHANNELS
    trees = bundle / "learners" / "lightgbm.txt"
    gains = _gains(trees, len(features)) if trees.is_file() else {}
    if not gains:
        return Worth("the bundle names its features, not what they are worth", str(bundle), profile, used)
    shares: dict[str, float] = defaultdict(float)
    for feature, gain in gains.items():
        shares[keys[feature]] += gain
    measure = (
        "share of the split gain of the bundle's LightGBM: where it found its splits, which is not what its precision "
        "would lose"
    )
    return Worth(measure, str(bundle), profile, used, _normalised(shares))


def _gains(file: Path, features: int) -> dict[int, float]:
    """Sum the gain of the splits by feature, from LightGBM's text form of its trees."""
    gains: dict[int, float] = defaultdict(float)
    split: list[int] = []
    try:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                name, _, values = line.rstrip("\n").partition("=")
                if name == "split_feature":
                    split = [int(each) for each in values.split()]
                elif name == "split_gain":
                    for feature, gain in zip(split, map(float, values.split()), strict=True):
                        if feature >= features:
                            raise ValueError(f"a split on feature {feature} of {features}")
                        gains[feature] += max(gain, 0.0)
    except ValueError as error:
        raise _damaged(file, str(error)) from error
    return gains


def _key(group: str, channel: str | None, known: list[str]) -> str:
    if group == "history":
        return XIDS if (channel or "").startswith("xid") else EVENTS
    if group in ("static", "gaps") or channel is None:
        return BESIDES
    return channel_of(channel, known) or BESIDES


def _normalised(shares: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(shares.values())
    return {name: share / total for name, share in sorted(shares.items())} if total > 0 else {}


def _damaged(file: Path, why: str) -> InputError:
    return InputError(f"the file cannot be used: {why}", str(file), "Run the backtest or the training again.")
