"""The raw windows of a fleet at one decision time, for learners that read sequences, out of tables of whole nodes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from features.fleet import NodeRows
from features.matrix.meta import MatrixConfig
from features.sequences import SequencePlan, layout_of, live_windows
from features.windows.blocks import key_columns


class RawWindows:
    """Takes the windows of all units in service.

    ``everyone``: units in service, one row each, with ``node`` and ``unit``.
    """

    def __init__(
        self, plan: SequencePlan, config: MatrixConfig, everyone: pd.DataFrame, inventory: pd.DataFrame, t: datetime
    ) -> None:
        self._plan, self._config = plan, config
        self._everyone, self._inventory, self._t = everyone, inventory, t
        self._rows = NodeRows(everyone["node"].tolist())
        self._at = {unit: at for at, unit in enumerate(everyone["unit"].tolist())}
        self._values = np.full((len(everyone), plan.steps * len(plan.channels)), np.nan, dtype=np.float32)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Channels that the windows are made of."""
        return tuple(layout_of(self._plan, self._config.channels).numbers)

    def take(self, table: pa.Table) -> None:
        """Take the windows of a table's nodes, of which it holds all samples."""
        wanted = {*key_columns(self._config.unit), *self.numbers}
        mine = self._rows.of(pc.unique(table.column("node")).to_pylist())
        found = live_windows(
            table.select([name for name in table.column_names if name in wanted]),
            self._everyone.iloc[mine],
            self._inventory,
            self._t,
            plan=self._plan,
            channels=self._config.channels,
            origin=self._config.decision.origin,
            unit=self._config.unit,
        )
        self._values[mine] = found.reshape(len(mine), -1)

    def of(self, units: Sequence[str]) -> NDArray[np.float32]:
        """Give the windows of units, shape (len(units), steps * channels); NaN: unknown."""
        return self._values[[self._at[unit] for unit in units]]
