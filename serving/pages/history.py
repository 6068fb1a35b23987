"""Earlier scores of a unit, from the decisions that the scores' folder still holds."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from serving.scores.reading import decision_folders

_LOG = logging.getLogger(__name__)
MOST_DECISIONS: Final = 120
"""Newest decisions that a page shows: a month of one every six hours."""


@dataclass(frozen=True, slots=True)
class PastScore:
    """A unit at one decision time.

    ``risk``: None: not known then.
    """

    decided: datetime
    risk: float | None
    tier: str


def past_scores(folder: Path, units: Collection[str]) -> dict[str, list[PastScore]]:
    """Return the earlier scores of some units, oldest first; a decision that cannot be read is left out and logged.

    ``folder``: what ``predrain score --out`` writes.
    """
    import pyarrow as pa  # noqa: PLC0415 - for these pages only
    import pyarrow.compute as pc  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    scores: dict[str, list[PastScore]] = {unit: [] for unit in units}
    wanted = pa.array(scores, pa.string())
    for decided, decision in decision_folders(folder)[-MOST_DECISIONS:]:
        path = decision / "risks.parquet"
        try:
            with pq.ParquetFile(path) as file:  # `read_table` would import pandas
                table = file.read(columns=["unit", "risk", "tier"])
        except FileNotFoundError:  # being replaced or pruned
            continue
        except (OSError, ValueError) as error:
            _LOG.warning("an earlier decision is left out of the pages: %s: %s", path, error)
            continue
        for row in table.filter(pc.is_in(table["unit"], value_set=wanted)).to_pylist():
            scores[row["unit"]].append(PastScore(decided, row["risk"], row["tier"]))
    return scores
