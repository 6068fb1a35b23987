"""What ``predrain score`` tells of the fleet beside its scores: where units stand and what came of earlier alerts.

``fleet.json`` in the folder of the scores; read by the service, which never loads pandas.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

_LOG = logging.getLogger(__name__)
FACTS: Final = "fleet.json"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a unit stands, by the inventory; empty text: not said."""

    cluster: str = ""
    group: str = ""
    rack: str = ""
    model: str = ""


NOWHERE: Final = Place()


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the fleet; replaced as a whole.

    ``places``: by unit.
    ``outcomes``: as :func:`serving.scores.alert_outcomes.outcomes_of` gives them; None: not judged yet.
    """

    places: Mapping[str, Place] = field(default_factory=dict)
    outcomes: Mapping[str, Any] | None = None
    data_end: datetime | None = None


def read_facts(scores: Path) -> Facts:
    """Read the facts of a folder of scores; without any where there are none, or they are damaged (logged)."""
    try:
        content = json.loads((scores / FACTS).read_bytes())
        seen: dict[tuple[str, ...], Place] = {}  # ten thousand units stand in some hundred places
        places = {
            str(unit): seen.setdefault(key, Place(*key))
            for unit, key in ((unit, tuple(map(str, place))) for unit, place in content["places"].items())
        }
        return Facts(places, dict(content["outcomes"]), datetime.fromisoformat(content["data_end"]))
    except FileNotFoundError:
        return Facts()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _LOG.warning("the facts of the fleet cannot be read: %s: %s", scores / FACTS, error)
        return Facts()
