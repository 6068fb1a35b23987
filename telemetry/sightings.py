"""Stays from sightings: an inventory for fleets that only write down, day by day, what is there."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import pandas as pd

SEEN_AT: Final = "seen_at"
"""Column that makes the rows of an inventory source sightings instead of stays."""

_FIRST, _PLACE = "_first", ("gpu", "node")


def condense_sightings(frame: pd.DataFrame) -> pd.DataFrame:
    """Condense sightings to one row a unit and node: when it was seen first and last, and what it was like last.

    ``frame``: sightings (``seen_at`` and the inventory's columns), or rows that this function made, or both.
    Returns: as given, ``seen_at`` being the last sighting, with ``_first``; sightings without a time are left out.
    """
    seen = frame[frame[SEEN_AT].notna()]
    if _FIRST not in seen:
        seen = seen.assign(**{_FIRST: seen[SEEN_AT]})
    seen = seen.sort_values(SEEN_AT, kind="stable")
    first = seen.groupby(list(_PLACE), sort=False, dropna=False)[_FIRST].transform("min")
    return seen.assign(**{_FIRST: first}).drop_duplicates(list(_PLACE), keep="last", ignore_index=True)


def stays_of(parts: Sequence[pd.DataFrame], absent: timedelta) -> pd.DataFrame:
    """Make stays of condensed sightings.

    ``parts``: from :func:`condense_sightings`.
    ``absent``: a unit that was last seen this long before the newest sighting of any is taken to be removed.
    Returns: one row a unit and node: ``installed_at`` is the first sighting unless the source gives it, ``removed_at``
    the last one where the unit was not seen again, else missing. A unit that reappears has been there all along.
    """
    whole = condense_sightings(pd.concat(parts, ignore_index=True))
    last = whole[SEEN_AT]
    gone = last.where(last <= last.max() - absent)
    return whole.assign(
        installed_at=whole["installed_at"].where(whole["installed_at"].notna(), whole[_FIRST]),
        # A unit seen once, and gone: a stay has some length.
        removed_at=whole["removed_at"].where(
            whole["removed_at"].notna(), gone.where(gone > whole[_FIRST], gone + timedelta(milliseconds=1))
        ),
    ).drop(columns=[SEEN_AT, _FIRST])
