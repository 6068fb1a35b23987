"""Precision targets, further horizons and failures without precursor of a backtest, for reports and bundles."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from evaluation.backtest.frames import BacktestResult
from evaluation.backtest.promises import decisions_frame, walk_promises
from evaluation.metrics.lead_time import unforeseen_incidents
from models.calibration.horizons import add_risks, horizon_column
from models.config import ModelsSection
from models.rows.training_set import Matrix
from pipeline.artefacts import load_evaluation
from pipeline.params import differences, name_some

_NO_MATTER = ("models.learners", "models.horizons", "training.memory")
"""Parameters that may differ between a backtest and a bundle, because they do not affect the profile's risks."""


def decision_extras(
    result: BacktestResult, matrix: Matrix, models: ModelsSection, oracle: pd.DataFrame | None
) -> dict[str, pd.DataFrame]:
    """Compute the data of the report's section on decisions, which bundles use too.

    Returns: ``promises`` (made at each refit, pooled), ``decisions`` (the promises that all outcomes up to the end of
    the data allow) and ``unforeseen`` (incidents without precursor).
    """
    promises = walk_promises(result.predictions, result.folds, matrix, models.precision_targets, k=result.k)
    return {
        "promises": promises.pooled,
        "decisions": decisions_frame(promises),
        "unforeseen": unforeseen_incidents(result.predictions, oracle),
    }


def with_horizons(predictions: pd.DataFrame, result: BacktestResult) -> pd.DataFrame:
    """Append the risks at further horizons to the profile's predictions.

    ``result``: its ``horizons`` map the risks of each fold; if empty, nothing is added.
    Returns: with columns ``risk_1h`` etc., ascending; the main horizon's risk is ``risk`` and not repeated.
    """
    if not result.horizons:
        return predictions
    main = horizon_column(result.horizons[0].main_hours)
    columns = add_risks(predictions["risk"].to_numpy(), predictions["fold"].to_numpy(), result.horizons)
    return predictions.assign(**{name: values for name, values in columns.items() if name != main})


def bundle_decisions(
    backtest: Path | None, profile: str, dataset_digest: str, params: Mapping[str, str]
) -> dict[str, Any]:
    """Return the thresholds to store in a bundle, or why there are none.

    ``params``: the bundle's, by dotted name (:attr:`pipeline.report.context.ReportContext.params`).
    Returns: ``thresholds`` (a list of :class:`ThresholdChoice`; null: none), ``until`` (time of the last outcome that
    they are based on), ``why`` and ``differs`` (parameters that differ between backtest and bundle).
    Thresholds are risks: they hold for later refits as long as those are calibrated.
    Raises ``InputError`` if ``backtest`` is not the output of a backtest.
    """

    def none(reason: str, differs: Sequence[str] = ()) -> dict[str, Any]:
        return {"thresholds": None, "until": None, "why": reason, "differs": list(differs)}

    if backtest is None:
        return none("no backtest was given, and without outcomes of earlier refits no precision target can be set")
    _, context = load_evaluation(backtest)
    if context.dataset_digest != dataset_digest:
        return none("the backtest ran on another dataset")
    # thresholds are risks, so only parameters that affect risks must be equal
    saved, current = (
        {
            name: value
            for name, value in parameters.items()
            if name not in _NO_MATTER and not name.startswith("backtest.")
        }
        for parameters in (context.params, params)
    )
    differs = differences(saved, current)
    if differs:
        return none(f"the backtest ran with other parameters: {name_some(differs)}", differs)
    frame = context.extras["decisions"]
    own_rows = frame[(frame["model"] == profile).to_numpy()]
    if own_rows.empty:
        return none(f"the backtest did not score the profile {profile}")
    return {
        "thresholds": [_decision(record) for record in own_rows.to_dict("records")],
        "until": own_rows["until"].iloc[0].isoformat(),
        "why": "",
        "differs": [],
    }


def _decision(record: Mapping[Any, Any]) -> dict[str, Any]:
    facts = {key: value for key, value in record.items() if key not in ("model", "until")}
    bound = {key.removeprefix("bound_"): value for key, value in facts.items() if key.startswith("bound_")}
    return {key: value for key, value in facts.items() if not key.startswith("bound_")} | {"bound": bound}
