"""Channels that a trained bundle uses."""

import json
from collections.abc import Iterable
from pathlib import Path

from foundation.errors import InputError
from telemetry.dataset.channels import ROLLUP_SUFFIXES

_SUFFIXES = tuple(suffix for suffixes in ROLLUP_SUFFIXES.values() for suffix in suffixes)
_WITHOUT_TELEMETRY = ("history", "static", "gaps")
# Groups of features from events, the inventory and sample counts.


def read_used_channels(bundle: Path | None, channels: Iterable[str]) -> tuple[frozenset[str] | None, str]:
    """Return the channels that a bundle uses (None without one), and a sentence on their source."""
    if bundle is None or not (bundle / "manifest.json").is_file():
        missing = "no bundle was given" if bundle is None else f"{bundle} is not a bundle"
        return None, (
            f"The channels of the model are unknown: {missing}. Run `predrain train`. Until then, channels known to "
            "precede failures count as used."
        )
    file, known = bundle / "manifest.json", set(channels)
    try:
        features = json.loads(file.read_text(encoding="utf-8"))["features"]
        named = [feature["channel"] for feature in features if feature["group"] not in _WITHOUT_TELEMETRY]
        used = {_channel_of(name, known) for name in named if name is not None}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the manifest is unusable: {error!r}", str(file), "Train the model again.") from error
    return frozenset(name for name in used if name is not None), f"A star marks the channels of the model {bundle}."


def _channel_of(name: str, known: set[str]) -> str | None:
    """Return the channel with this name, roll-up (``power_w_max``) or flag."""
    for suffix in ("", *_SUFFIXES):
        if name.endswith(suffix) and name.removesuffix(suffix) in known:
            return name.removesuffix(suffix)
    return max((channel for channel in known if name.startswith(f"{channel}_")), key=len, default=None)
