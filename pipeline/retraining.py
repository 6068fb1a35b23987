"""Retraining: the gate evaluates a recipe on held-out decisions; if it passes, its newest fit is promoted.

A fit to the end of the data leaves no decisions to evaluate it on, so it is represented by a fit of the same parameters
that ends earlier. The newest fit itself only gets sanity checks, because labels may have broken since.
"""

import tempfile
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from evaluation.backtest.promotion_gate import GateVerdict
from features.matrix.matrix import FeatureMatrix
from foundation.errors import InputError, TooEarlyError
from foundation.running import Progress
from models.bundle.store import Bundle, load_bundle
from models.registry.champion import champion_history, promotion_lock
from models.registry.store import CHALLENGER
from pipeline.held_out import SUGGESTED, mean_risks
from pipeline.params import Params
from pipeline.promotion import PromotionResult, carry_out, compared, load_version
from pipeline.stages import train_bundle
from pipeline.tracking import check_store, share_of_fleet

RECIPE: Final = ("channels", "events", "decision", "labels", "features", "training", "models")
"""Parameter sections that define a recipe: if they are equal, fits differ only in their data."""

MEAN_RISK: Final = "mean risk over that of the previous fit"
QUIET: Final = "incidents of the newest 28 d"
FLOOD: Final = "incidents of the newest 7 d"
"""Sanity checks of the newest fit."""

_NEWEST: Final = timedelta(days=7)
_RECENT: Final = timedelta(days=28)
_SAME_FLEET: Final = 0.5
_CHANCE: Final = 0.001
"""Significance level for unusual numbers of incidents. Incidents come in clusters, so :data:`QUIET` also requires at
most a tenth of the usual number."""
_FLOOD_FACTOR: Final = 4
"""Multiple of the usual weekly number of incidents from which a fit is refused."""


def retrain(
    matrix: FeatureMatrix, params: Params, *, registry: str, model: str, progress: Progress | None = None
) -> PromotionResult:
    """Fit to the end of the data, and promote the fit unless the gate or a sanity check refuses it.

    The champion's recipe with newer data is promoted unless a criterion of the gate fails; inconclusive criteria do not
    block it. Another recipe must pass the gate. Without a champion, the first fit is promoted.

    Whatever the recipe, a fit is refused if its mean risk is far from that of the previous fit, or if there are
    unusually few or many recent incidents.

    Returns: the result; ``kept`` if the newest fit is already the champion.
    Raises ``InputError`` if nothing can be fitted, the data does not continue the champion's, the champion's alias was
    removed, or another promotion or retraining is in progress.
    """
    check_store(registry)
    with tempfile.TemporaryDirectory(prefix="predrain-retrain-") as name, promotion_lock(registry):
        folder = Path(name)
        _refuse_silence(matrix)
        previous, champion = _continued(matrix, registry, model, folder)
        train_bundle(matrix, params, folder / "newest", registry=registry, progress=progress)
        history = champion_history(registry, model)
        number = history.aliases[CHALLENGER]
        now = history.champion
        if number == now:  # identical bytes are not a new version
            return PromotionResult("kept", model, number, now, now, dry_run=False)
        bundle, version = load_version(registry, model, number, folder / "registered")
        if now != previous:  # promoted by another client of a tracking server, which has no lock
            raise InputError(
                f"the champion changed from {previous or 'none'} to {now or 'none'} during the fit",
                f"model {model}, {registry}",
                "Run the retraining again: it compares with the new champion.",
            )
        verdict, passed, reason, known = _evaluated(matrix, params, champion, folder)
        if champion is not None and known is not None and passed:
            objection = _unusual(matrix) or _far_off(matrix, params, bundle, known)
            if objection:
                passed, reason = False, f"{reason}; but {objection}"
        decision = PromotionResult(
            "promoted" if passed else "refused", model, number, now, number if passed else now, dry_run=False,
            verdict=verdict, reason=reason, notes=(reason,) if passed else (),
        )  # fmt: skip
        return carry_out(registry, decision, history, version, bundle, params, folder)


def _continued(matrix: FeatureMatrix, registry: str, model: str, folder: Path) -> tuple[int | None, Bundle | None]:
    """Return version and bundle of the champion, whose data the matrix must continue; (None, None) if there is none.

    With older data or another fleet's, the champion's recipe would be promoted without a comparison.

    Raises ``InputError`` for such data, or if the champion's alias was removed.
    """
    try:
        history = champion_history(registry, model)
    except TooEarlyError:
        return None, None
    history.refuse_unseated(model)
    if history.champion is None:
        return None, None
    champion = load_version(registry, model, history.champion, folder / "serving")[0]
    location = f"dataset of {matrix.path}, registry {registry}"
    refit_at, end = champion.fitted.refit_at, matrix.span[1]
    if end < refit_at:
        raise InputError(
            f"the data ends at {end:%Y-%m-%d %H:%M}, before version {history.champion}, the champion, was fitted "
            f"({refit_at:%Y-%m-%d %H:%M} UTC)",
            location,
            "Give the dataset that continues the champion's. If the champion was trained on wrong dates, roll back: "
            "`predrain promote --rollback`.",
        )
    sketch = (champion.manifest.get("data") or {}).get("fleet") or []
    share = share_of_fleet(sketch, matrix.rows["unit"].cat.categories) if sketch else 1.0
    if share < _SAME_FLEET:
        raise InputError(
            f"the data belongs to another fleet: it has {share:.0%} of the {matrix.unit}s of the training data of "
            f"version {history.champion}, the champion",
            location,
            "Give each fleet a registry of its own, or promote a version by hand with `predrain promote --force`.",
        )
    return history.champion, champion


def _refuse_silence(matrix: FeatureMatrix) -> None:
    """Raise ``InputError`` if there is telemetry, but none in the newest week.

    A collector is down, or a wrong date moved the end of the data.
    """
    telemetry = [column.name for column in matrix.columns if column.group == "telemetry"]
    times = matrix.rows["decision_time"]
    recent = np.flatnonzero((times > matrix.span[1] - _NEWEST).to_numpy())
    if not telemetry or _has_values(matrix, recent, telemetry):
        return
    earlier = [time for time in np.sort(times.unique())[::-1] if time <= times.max() - _NEWEST]
    last = next((time for time in earlier if _has_values(matrix, np.flatnonzero(times == time), telemetry)), None)
    if last is None:
        return  # a fleet without telemetry: the model learns from events alone
    raise InputError(
        f"there is no telemetry after {last:%Y-%m-%d}, and the data ends on {matrix.span[1]:%Y-%m-%d}",
        f"dataset of {matrix.path}",
        "Run `predrain doctor`: telemetry stopped, or an event or sample with a wrong date moved the end.",
    )


def _has_values(matrix: FeatureMatrix, rows: npt.NDArray[np.int64], columns: list[str]) -> bool:
    return bool(rows.size) and not bool(np.isnan(matrix.values(rows, columns)).all())


def page_of(started: datetime, decision: PromotionResult | None) -> str:
    """Format the outcome of a round in Prometheus' text format 0.0.4; ``decision``: None: it failed."""
    is_promoted = decision is not None and decision.done
    lines = [
        "# HELP predrain_retrain_last_attempt_timestamp_seconds Start of the last round.",
        "# TYPE predrain_retrain_last_attempt_timestamp_seconds gauge",
        f"predrain_retrain_last_attempt_timestamp_seconds {started.timestamp():.10g}",
        "# HELP predrain_retrain_success 1 if the champion was the newest fit after the last round.",
        "# TYPE predrain_retrain_success gauge",
        f"predrain_retrain_success {int(is_promoted)}",
    ]
    if decision is not None and not is_promoted:
        missed = [name for name in (MEAN_RISK, QUIET, FLOOD) if name in decision.reason]
        if not missed and decision.verdict is not None:
            missed = [criterion.name for criterion in decision.verdict.criteria if criterion.outcome != "passed"]
        lines += [
            "# HELP predrain_retrain_refused 1 if the gate refused the newest fit; reason: the unmet criteria.",
            "# TYPE predrain_retrain_refused gauge",
            f'predrain_retrain_refused{{reason="{", ".join(dict.fromkeys(missed))}"}} 1',
        ]
    return "\n".join(lines) + "\n"


def _evaluated(
    matrix: FeatureMatrix, params: Params, champion: Bundle | None, folder: Path
) -> tuple[GateVerdict | None, bool, str, Bundle | None]:
    """Return the recipe's verdict, whether to promote its newest fit, the reason, and the evaluated fit.

    Without a comparison, the champion takes the place of the evaluated fit.
    """
    labels = matrix.config.labels
    until = matrix.span[1] - labels.gap - labels.horizon - SUGGESTED
    is_champions_recipe = champion is not None and _recipe(champion.manifest.get("params") or {}) == _recipe(
        params.model_dump(mode="json")
    )
    if is_champions_recipe and champion is not None and champion.fitted.refit_at > until:
        reason = "the recipe of the champion with newer data; no decisions are left for a comparison"
        return None, True, reason, champion
    try:
        recipe = _fitted(matrix, params, until, folder / "recipe")
        sides = [("the recipe", recipe)]
        if champion is not None:
            sides.append(("the champion", _stand_in(matrix, champion, until, folder)))
        verdict = compared(matrix, params, sides)
    except TooEarlyError as error:
        if champion is not None and not is_champions_recipe:
            raise
        return None, True, f"no comparison was possible yet: {error}", champion
    failed = [criterion.name for criterion in verdict.criteria if criterion.outcome == "failed"]
    if champion is None:
        return verdict, True, "the first champion need not pass the gate", recipe
    if is_champions_recipe:
        result = f"worse in {', '.join(failed)}" if failed else "not significantly worse"
        return verdict, not failed, f"the recipe of the champion with newer data, {result}", recipe
    result = "passed the gate" if verdict.passed else f"did not pass the gate: {'; '.join(verdict.reasons)}"
    return verdict, verdict.passed, f"another recipe, which {result}", recipe


def _far_off(matrix: FeatureMatrix, params: Params, newest: Bundle, known: Bundle) -> str:
    """Compare the mean risk of two fits on the newest decisions; return the problem, or an empty string.

    The gate accepts a mean risk within ``promotion.risk_ratio`` of the observed rate, so the risks of two accepted fits
    differ at most by the ratio of its limits. Fewer incidents than ``promotion.min_incidents`` are inconclusive.
    """
    if known.fitted.stand_in is not None or known.fitted.n_incidents < params.promotion.min_incidents:
        return ""
    risk, previous = mean_risks(matrix, [("the newest fit", newest), ("the fit before", known)], _NEWEST)
    low, high = params.promotion.risk_ratio
    if previous * low / high <= risk <= previous * high / low:
        return ""
    return (
        f"{MEAN_RISK} is {risk / previous:.2g}, limits are {low / high:.2g} and {high / low:.2g}: check the newest "
        "labels and telemetry"
    )


def _unusual(matrix: FeatureMatrix) -> str:
    """Compare the number of recent incidents with that before; return the problem, or an empty string.

    Too few: events stopped arriving. Too many: wrong events arrive. The mean risk does not reveal these, because its
    level follows the newest weeks only as far as this improved earlier forecasts of the fleet.
    """
    first, end = matrix.rows["decision_time"].min(), matrix.span[1]
    incidents = matrix.incidents()
    started = incidents.groupby("node_incident")["start"].min()

    def counts(span: timedelta) -> tuple[int, int, float]:
        return int((started > end - span).sum()), int(started.between(first, end - span).sum()), span / (end - first)

    recent, baseline, share = counts(_RECENT)
    expected = baseline * share / max(1 - share, share)
    if recent <= expected / 10 and binom.cdf(recent, recent + baseline, min(share, 0.5)) <= _CHANCE:
        return (
            f"{QUIET}: {recent} instead of {expected:.0f}. Check that kernel logs and tickets still arrive, or promote "
            "the version manually"
        )
    recent, baseline, share = counts(_NEWEST)
    expected = baseline * share / max(1 - share, share)
    if recent >= _FLOOD_FACTOR * expected and binom.sf(recent - 1, recent + baseline, min(share, 0.5)) <= _CHANCE:
        return f"{FLOOD}: {recent} instead of {expected:.0f}. Check the newest labels, or promote the version manually"
    return ""


def _stand_in(matrix: FeatureMatrix, champion: Bundle, until: datetime, folder: Path) -> Bundle:
    """Return the champion, or a fit of its recipe that ends early enough for the comparison."""
    if champion.fitted.refit_at <= until:
        return champion
    return _fitted(matrix, Params.model_validate(champion.manifest["params"]), until, folder / "champion")


def _fitted(matrix: FeatureMatrix, params: Params, until: datetime, out: Path) -> Bundle:
    train_bundle(matrix, params, out, until=until)
    return load_bundle(out)


def _recipe(params: dict[str, Any]) -> dict[str, Any]:
    return {name: params.get(name) for name in RECIPE}
