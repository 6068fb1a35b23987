"""Risks at several horizons from the one at the main horizon: see :mod:`models.horizons` for how the map is fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from scipy.special import expit, logit

from models.ranking import Floats

EDGE = 1e-6
"""Risks keep this far from 0 and 1 before their log-odds are taken."""


@dataclass(frozen=True, slots=True)
class Link:
    """From the risk at one horizon to that at the next away from the main one.

    ``hours``: the horizon that this link leads to.
    ``level``: Log-odds of the conditional share where the main risk is the base rate.
    ``slope``: by how much they rise with the log-odds of the main risk; not negative.
    """

    hours: float
    level: float
    slope: float


@dataclass(frozen=True, slots=True)
class HorizonMap:
    """Risks at all horizons from the risk at the main one.

    ``main_hours``: the horizon of the labels that models are trained on.
    ``base``: Log-odds of the base rate at the main horizon: where levels are measured.
    ``shorter``, ``longer``: away from the main horizon: shorter ones descending, longer ones ascending.
    """

    main_hours: float
    base: float
    shorter: tuple[Link, ...] = ()
    longer: tuple[Link, ...] = ()

    @property
    def hours(self) -> tuple[float, ...]:
        """All horizons, ascending, the main one among them."""
        return (
            *(link.hours for link in reversed(self.shorter)),
            self.main_hours,
            *(link.hours for link in self.longer),
        )

    def risks(self, risk: Floats) -> Floats:
        """Give the risks at all horizons.

        ``risk``: calibrated risks at the main horizon; shape (n,).
        Returns: columns as :attr:`hours`: never falling along a row, all between 0 and 1, the main one as given; shape
        (n, horizons).
        """
        main = np.asarray(risk, dtype=np.float64)
        at = logit(np.clip(main, EDGE, 1 - EDGE)) - self.base
        below, above = [main], [main]
        for link in self.shorter:
            below.append(below[-1] * expit(link.level + link.slope * at))
        for link in self.longer:
            above.append(above[-1] + (1 - above[-1]) * expit(link.level + link.slope * at))
        return np.column_stack([*reversed(below[1:]), main, *above[1:]])

    def to_json(self) -> dict[str, Any]:
        """Give the map as a JSON object."""
        return dict(TypeAdapter(HorizonMap).dump_python(self, mode="json"))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> HorizonMap:
        """Read what :meth:`to_json` wrote."""
        return TypeAdapter(cls).validate_python(content)


def horizon_column(hours: float) -> str:
    """Name the column of a horizon's risk: ``risk_6h``, ``risk_30m``."""
    minutes = round(hours * 60)
    return f"risk_{minutes // 60}h" if minutes % 60 == 0 else f"risk_{minutes}m"


def horizon_maps(told: Sequence[Mapping[str, Any] | None]) -> tuple[HorizonMap, ...]:
    """Read the maps of all folds; empty where any fold has none."""
    found = tuple(HorizonMap.from_json(each) for each in told if each is not None)
    return found if len(found) == len(told) else ()


def add_risks(risk: Floats, fold: np.ndarray, maps: Sequence[HorizonMap]) -> dict[str, np.ndarray]:
    """Give the columns of the further horizons for rows of several folds.

    ``risk``: risks at the main horizon; shape (n,).
    ``fold``: whose map a row takes, as a position in ``maps``; shape (n,).
    ``maps``: one for each fold, all of the same horizons.
    Returns: one column for each horizon, ascending, the main one included.
    """
    hours = maps[0].hours
    out = np.empty((len(risk), len(hours)), dtype=np.float64)
    for number in np.unique(fold):
        mine = fold == number
        out[mine] = maps[int(number)].risks(risk[mine])
    return {horizon_column(each): out[:, at].astype(np.float32) for at, each in enumerate(hours)}
