"""Losses of GPUs that samples tell of: nvidia-smi writes ``[GPU is lost]`` in place of values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from telemetry.importing.instants import times_of
from telemetry.importing.inventory import Installations

SOURCE: Final = "sample_words"
"""``source`` of the events made here."""

_CODE: Final = "fallen_off_the_bus"


@dataclass(slots=True)
class GpuLosses:
    """Finds the rows at which a unit's samples begin to say that it is lost, from batches in the order of time."""

    _lost: dict[int, bool] = field(default_factory=dict)
    _onsets: list[tuple[int, int, int]] = field(default_factory=list)

    def add(
        self,
        unit: npt.NDArray[np.int32],
        node: npt.NDArray[np.int32],
        ms: npt.NDArray[np.int64],
        is_lost: npt.NDArray[np.bool_],
    ) -> None:
        """Take the rows of a batch; codes of the import's units and nodes, shape (n,)."""
        if not is_lost.any() and not self._lost:
            return
        order = np.lexsort((ms, unit))
        unit, node, ms, is_lost = unit[order], node[order], ms[order], is_lost[order]
        for place in np.flatnonzero(is_lost).tolist():
            code = int(unit[place])
            is_first = place == 0 or unit[place - 1] != code
            if not (self._lost.get(code, False) if is_first else is_lost[place - 1]):
                self._onsets.append((code, int(node[place]), int(ms[place])))
        last = np.append(unit[1:] != unit[:-1], True) if len(unit) else np.empty(0, np.bool_)
        self._lost |= dict(zip(unit[last].tolist(), is_lost[last].tolist(), strict=True))

    def events(self, stays: Installations, delay: timedelta, renamed: Mapping[tuple[int, int], int]) -> pd.DataFrame:
        """Return a failure at each onset; ``delay`` is until it is known, ``renamed`` that of the spill."""
        onsets = [(renamed.get((unit, node), unit), node, ms) for unit, node, ms in self._onsets]
        units, nodes, times = zip(*onsets, strict=True) if onsets else ((), (), ())
        when = times_of(np.array(times, np.int64))
        events = pd.DataFrame(
            {
                "timestamp": when,
                "node": [stays.node_names[code] for code in nodes],
                "gpu": [stays.units[code] if stays.unit == "gpu" else None for code in units],
                "type": "failure",
                "code": _CODE,
                "detail": "samples say: GPU is lost",
                "source": SOURCE,
                "known_at": (when + delay).as_unit("ms"),
            }
        )
        return events.astype(dict.fromkeys(("node", "gpu", "type", "code", "detail", "source"), object))
