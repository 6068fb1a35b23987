"""From the incidents of units to the node incidents and common causes that they are part of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from models.rows.ranking import Ints


@dataclass(frozen=True, slots=True)
class IncidentGroups:
    """Node incident and common cause by incident, for incidents numbered as of one time; shape (n_incidents,).

    An entry that is no incident is -1 everywhere.
    """

    node_incident: Ints
    common_cause: Ints

    @classmethod
    def of(cls, incidents: pd.DataFrame) -> IncidentGroups:
        """Read what :meth:`Matrix.incidents` gives for the same time as the labels."""
        number = incidents["incident"].to_numpy(dtype=np.int64)

        def table(values: np.ndarray) -> Ints:
            out = np.full(int(number.max(initial=-1)) + 2, -1, dtype=np.int64)  # incident -1 reads the last entry
            out[number] = values
            return out

        return cls(table(incidents["node_incident"].to_numpy()), table(incidents["common_cause"].to_numpy()))
