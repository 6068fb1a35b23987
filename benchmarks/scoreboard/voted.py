"""The ensemble ``min_votes`` of a part whose parameters did not ask for it, from the ranks that its members left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.scoreboard.store import Stored
from models.ensembles.combining import combine
from models.rows.ranking import name_hashes

VOTED = "min_votes"


def majority(facts: Mapping[str, Any]) -> int:
    """Give how many of a part's members are more than half of them."""
    return len(facts["members"]) // 2 + 1


def can_vote(part: Stored, variant: str) -> bool:
    """Tell whether a part holds all members in a variant, two or more, and not the ensemble itself."""
    held = set(part.models)
    members = [str(each) for each in part.facts["members"]]
    return len(members) > 1 and (VOTED, variant) not in held and all((each, variant) in held for each in members)


def voted(part: Stored, variant: str) -> dict[str, np.ndarray]:
    """Give ``rank``, ``risk`` (NaN) and ``alert`` of rows in the top K of :func:`majority` members.

    As ``combine`` gives them from the members' scores, of which it takes the order alone.
    """
    rows = part.rows()
    ranks = [part.scores(str(each), variant)["rank"] for each in part.facts["members"]]
    tie = name_hashes(part.units())[rows["unit"]]
    scores = -np.column_stack(ranks).astype(np.float64)
    found = combine(
        scores, rows["time_ms"], tie, k=int(part.facts["k"]), combiner=VOTED, min_votes=majority(part.facts)
    )
    return {"rank": found.rank, "risk": np.full(len(found.rank), np.nan), "alert": found.alert}
