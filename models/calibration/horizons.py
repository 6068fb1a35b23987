"""Consistent risks at several horizons: non-decreasing with the horizon, and equal to ``risk`` at the main one.

Each horizon's risk derives from the next one towards the main horizon, so that risks are consistent by construction:

- a shorter horizon has a share of the next longer one's risk: of the incidents within that, how many start within this;
- a longer one adds the units that survive the next shorter one and fail within this.

Both are logistic in the log-odds of the calibrated main risk, with non-negative slopes, so that the order of units is
the same at every horizon.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, logit

from foundation.times import instants
from models.calibration.fitting import EDGE
from models.rows.ranking import Floats, Ints
from models.rows.training_set import Labels, Matrix, TrainingRows, count_incidents


@dataclass(frozen=True, slots=True)
class Link:
    """Conditional share between a horizon and its neighbour towards the main one.

    ``level``: log-odds of the share where the main risk equals the base rate.
    ``slope``: change per unit of the main risk's log-odds; non-negative.
    """

    hours: float
    level: float
    slope: float


@dataclass(frozen=True, slots=True)
class HorizonMap:
    """Maps the risk at the main horizon to risks at all horizons.

    ``base``: log-odds of the base rate at the main horizon, where levels are measured.
    ``shorter``, ``longer``: outwards from the main horizon: shorter ones descending, longer ones ascending.
    """

    main_hours: float
    base: float
    shorter: tuple[Link, ...] = ()
    longer: tuple[Link, ...] = ()

    @property
    def hours(self) -> tuple[float, ...]:
        """All horizons, ascending, including the main one."""
        return (
            *(link.hours for link in reversed(self.shorter)),
            self.main_hours,
            *(link.hours for link in self.longer),
        )

    def risks(self, risk: Floats) -> Floats:
        """Return the risks at all horizons, columns as :attr:`hours`.

        Returns: non-decreasing along a row, between 0 and 1, the main one unchanged; shape (n, horizons).
        """
        main = np.asarray(risk, dtype=np.float64)
        log_odds = logit(np.clip(main, EDGE, 1 - EDGE)) - self.base
        lower, upper = [main], [main]
        for link in self.shorter:
            lower.append(lower[-1] * expit(link.level + link.slope * log_odds))
        for link in self.longer:
            upper.append(upper[-1] + (1 - upper[-1]) * expit(link.level + link.slope * log_odds))
        return np.column_stack([*reversed(lower[1:]), main, *upper[1:]])


def horizon_column(hours: float) -> str:
    """Return the column name of a horizon's risk: ``risk_6h``, ``risk_30m``."""
    minutes = round(hours * 60)
    return f"risk_{minutes // 60}h" if minutes % 60 == 0 else f"risk_{minutes}m"


def add_risks(risk: Floats, fold: np.ndarray, maps: Sequence[HorizonMap]) -> dict[str, np.ndarray]:
    """Return the risk columns of all horizons, ascending, for rows of several folds.

    ``risk``: risks at the main horizon; shape (n,).
    ``fold``: position in ``maps``, which all have the same horizons, of each row's map; shape (n,).
    """
    hours = maps[0].hours
    out = np.empty((len(risk), len(hours)), dtype=np.float64)
    for number in np.unique(fold):
        of_fold = fold == number
        out[of_fold] = maps[int(number)].risks(risk[of_fold])
    return {horizon_column(horizon): out[:, i].astype(np.float32) for i, horizon in enumerate(hours)}


_LEVEL_DEVIATION = 1.0
"""Standard deviation of the prior on a link's level (log-odds); covers bursts and lulls of failures."""
_SLOPE_DEVIATION = 0.5
_LONGER_SLOPE = 0.5
"""Prior slope of longer horizons: units that were at risk and survived keep half of that risk (in log-odds)."""
_MAX_SLOPE = 3.0


@dataclass(frozen=True, slots=True)
class HorizonLabels:
    """Labels of the same rows at one horizon.

    ``label``: 1, 0, or -1 for none; shape (n,).
    """

    label: np.ndarray
    incidents: int


def fit_horizons(
    risk: Floats,
    main: HorizonLabels,
    by_horizon: Mapping[timedelta, HorizonLabels],
    *,
    horizon: timedelta,
    base_rate: float,
) -> HorizonMap:
    """Fit the links on rows that the model was not fitted on.

    ``by_horizon``: labels of the same rows at the further horizons; may include the main one.

    Rows of one incident are not independent, so the likelihood is weighted by incidents over positive rows. The prior
    on the level is normal around a constant hazard, that on the slope around 0 (shorter) or 0.5 (longer), truncated at
    0.
    """
    risk = np.asarray(risk, dtype=np.float64)
    base = float(logit(np.clip(base_rate, EDGE, 0.5)))
    log_odds = logit(np.clip(risk, EDGE, 1 - EDGE)) - base
    shorter: list[Link] = []
    narrower, hours = main, _hours(horizon)
    for further in sorted((span for span in by_horizon if span < horizon), reverse=True):
        chosen, share = by_horizon[further], _hours(further) / hours
        rows = (narrower.label == 1) & (chosen.label >= 0)
        # Several rows share an incident.
        weight = narrower.incidents / max(int(rows.sum()), 1)
        shorter.append(_link(log_odds, rows, chosen, weight, _hours(further), float(logit(share)), 0.0))
        narrower, hours = chosen, _hours(further)
    longer: list[Link] = []
    narrower, hours = main, _hours(horizon)
    for further in sorted(span for span in by_horizon if span > horizon):
        chosen = by_horizon[further]
        rows = (narrower.label == 0) & (chosen.label >= 0)
        hazard = np.clip(base_rate, EDGE, 0.5) * (_hours(further) - hours) / _hours(horizon)
        weight = chosen.incidents / max(int((chosen.label == 1).sum()), 1)
        longer.append(
            _link(log_odds, rows, chosen, weight, _hours(further), float(logit(min(hazard, 0.5))), _LONGER_SLOPE)
        )
        narrower, hours = chosen, _hours(further)
    return HorizonMap(_hours(horizon), base, tuple(shorter), tuple(longer))


def slice_horizons(
    matrix: Matrix, rows: TrainingRows, labels: Labels, chosen: Ints, horizons: Sequence[timedelta], *, refit_ms: int
) -> tuple[timedelta, dict[timedelta, HorizonLabels]]:
    """Label rows at further horizons, as known at a refit; -1: not complete by then.

    Returns: the horizon of the matrix's own labels, and the labels at each of ``horizons``.
    """
    as_of = instants(np.array([refit_ms], dtype=np.int64))[0].to_pydatetime()
    by_horizon: dict[timedelta, HorizonLabels] = {}
    main = timedelta(0)
    queried = np.append(chosen, 0)  # at least one row, to derive the main horizon
    for horizon in horizons:
        further = Labels.of(matrix.labels(as_of, horizon=horizon, rows=queried))
        main = horizon - timedelta(milliseconds=int(further.complete[-1] - labels.complete[0]))
        label = np.where(further.complete <= refit_ms, further.label, -1)[:-1]
        hit = label == 1
        by_horizon[horizon] = HorizonLabels(label, count_incidents(rows.tie[chosen[hit]], further.incident[:-1][hit]))
    return main, by_horizon


def _link(
    log_odds: Floats, rows: np.ndarray, labels: HorizonLabels, weight: float, hours: float, level: float, slope: float
) -> Link:
    log_odds, y, weight = log_odds[rows], (labels.label[rows] == 1).astype(np.float64), min(1.0, weight)

    def loss(point: Floats) -> tuple[float, Floats]:
        z = point[0] + point[1] * log_odds
        residual = weight * (expit(z) - y)
        value = weight * float(np.sum(np.logaddexp(0, z) - y * z))
        value += 0.5 * ((point[0] - level) / _LEVEL_DEVIATION) ** 2 + 0.5 * ((point[1] - slope) / _SLOPE_DEVIATION) ** 2
        gradient = [
            residual.sum() + (point[0] - level) / _LEVEL_DEVIATION**2,
            (residual * log_odds).sum() + (point[1] - slope) / _SLOPE_DEVIATION**2,
        ]
        return value, np.array(gradient)

    optimum = minimize(
        loss, np.array([level, slope]), jac=True, method="L-BFGS-B", bounds=[(-25, 25), (0.0, _MAX_SLOPE)]
    )
    return Link(hours, float(optimum.x[0]), float(optimum.x[1]))


def _hours(span: timedelta) -> float:
    return span / timedelta(hours=1)
