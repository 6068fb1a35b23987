"""A unit's last days as the online state holds them, for the pages: what was pushed since the dataset ended, too."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np

from features.service import duration_ms, instant_ms
from serving.online.state import OnlineState
from serving.page.channels import DAYS, told_of


def unit_series(state: OnlineState, node: str, unit: str) -> dict[str, Any] | None:
    """Read a unit's channels.

    ``node``, ``unit``: a GPU on a node, or a node twice where the unit is the node.
    Returns: as :func:`serving.page.channels.channels_of` gives them, up to the newest sample; None: it holds none.
    """
    end_ms = instant_ms(state.now())
    since_ms = end_ms - duration_ms(min(DAYS, state.look_back))
    block = state.samples_of(node, unit, since_ms)
    if block is None or not len(block):
        return None
    values = {
        name: np.where(series.valid, series.values.astype(np.float64), np.nan) for name, series in block.series.items()
    }
    start = datetime.fromtimestamp((end_ms - duration_ms(DAYS)) / 1000, UTC)
    return told_of(state.config.channels, block.ms, values, start)
