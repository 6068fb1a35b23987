"""Metrics of a null-check run, compared with chance and the sampling error."""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from evaluation.backtest.run import run_backtest
from evaluation.metrics.evaluation import evaluate
from pipeline.params import Params

MEASURES = ("precision_at_k", "average_precision", "roc_auc")
"""Metrics of every model."""

CHANCE = {"roc_auc": 0.5}
"""Level of chance; for the other metrics it is the base rate."""

LEVEL = 0.05
"""Probability of a false alarm on a clean pipeline, over all models and metrics of a run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One metric of one model.

    ``value``, ``low``, ``high``: estimate and 95 % interval.
    """

    model: str
    variant: str
    measure: str
    value: float
    low: float
    high: float
    chance: float
    z: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run.

    ``findings``: every model, variant and metric, including the baseline ``random``.
    ``incidents``: number of incidents in the test period.
    """

    name: str
    findings: tuple[Finding, ...]
    incidents: int

    @property
    def limit(self) -> float:
        """Limit in standard errors above chance, corrected for the number of metrics (Bonferroni)."""
        return NormalDist().inv_cdf(1 - LEVEL / max(len(self.findings), 1))

    @property
    def above(self) -> tuple[Finding, ...]:
        """Findings above the limit."""
        return tuple(finding for finding in self.findings if finding.z > self.limit)

    def of(self, model: str, measure: str) -> Finding:
        """Return a metric of a model with sliding training."""
        return next(
            finding
            for finding in self.findings
            if (finding.model, finding.variant, finding.measure) == (model, "sliding", measure)
        )


def measure(name: str, matrix: Any, params: Params) -> Outcome:
    """Run the backtest on a matrix and compare every metric with chance."""
    # Every learner sees all columns: a signal or a leak may be in any.
    models = params.models.model_copy(update={"groups": {}})
    result = run_backtest(matrix, training=params.training, models=models, backtest=params.backtest, seed=params.seed)
    evaluation = evaluate(result.predictions, k=result.k, bootstrap=params.backtest.bootstrap, seed=params.seed)
    findings = []
    for _, row in evaluation.table.iterrows():
        for statistic in MEASURES:
            chance = CHANCE.get(statistic, float(row["base_rate"]))
            value, low, high = (float(row[key]) for key in (statistic, f"{statistic}_low", f"{statistic}_high"))
            error = (high - low) / (2 * NormalDist().inv_cdf(0.975))
            z = (value - chance) / error if error > 0 else 0.0
            findings.append(Finding(str(row["model"]), str(row["variant"]), statistic, value, low, high, chance, z))
    return Outcome(name, tuple(findings), int(evaluation.table["incidents"].max()))


def show(outcomes: dict[str, Outcome], profile: str) -> str:
    """Format the table: the profile's metrics, and the largest z of any model."""
    lines = [
        f"{'run':<15}{'measure':<20}{'profile':>9}{'95 % interval':>20}{'chance':>9}{'largest z':>11}{'limit':>7}  of"
    ]
    for name, outcome in outcomes.items():
        for statistic in MEASURES:
            own = outcome.of(profile, statistic)
            most = max((one for one in outcome.findings if one.measure == statistic), key=lambda one: one.z)
            interval = f"[{own.low:.4f}, {own.high:.4f}]"
            lines.append(
                f"{name:<15}{statistic:<20}{own.value:>9.4f}{interval:>20}{own.chance:>9.4f}{most.z:>11.2f}"
                f"{outcome.limit:>7.2f}  {most.model}, {most.variant}"
            )
    return "\n".join(lines)
