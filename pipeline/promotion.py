"""Promotion of a challenger and rollback: compare, apply the gate, move the alias, record."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evaluation.backtest.promotion_gate import GateVerdict, evaluate_gate
from features.matrix.matrix import FeatureMatrix
from foundation.errors import InputError
from models.bundle.model_card import promotion_section
from models.bundle.store import Bundle, load_bundle
from models.registry.champion import (
    ChampionHistory,
    Version,
    champion_history,
    fetch_bundle,
    no_previous_champion,
    promotion_lock,
    restore_previous,
    set_champion,
    tag_version,
    version_at,
)
from models.registry.store import CHALLENGER, log_run, tag_run
from pipeline.held_out import contend, untouched
from pipeline.params import Params
from pipeline.tracking import code_revision

EXPERIMENT = "predrain-promotions"
"""Name of the MLflow experiment that decisions are logged to."""

BASELINES = ("history_count", "vendor_rules")
"""Baselines that the first champion is compared with."""

_APPLIED = "applied"  # tag of a run: whether the alias was moved afterwards

MatrixSource = Callable[[], FeatureMatrix]
"""Returns the recent data; called only if a comparison is needed."""


@dataclass(frozen=True, slots=True)
class PromotionResult:
    """Result of a promotion, rollback or retraining.

    ``action``: ``promoted``, ``refused``, ``forced``, ``rolled back``, or ``kept`` by a retraining without newer data.
    ``version``: the version concerned: the challenger, or the champion that was rolled back.
    ``reason``: the user's reason to force or roll back; for a retraining, the reason of the decision.
    """

    action: str
    model: str
    version: int
    champion_before: int | None
    champion: int | None
    dry_run: bool
    verdict: GateVerdict | None = None
    reason: str = ""
    run_id: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """Whether the request was (or, in a dry run, would have been) granted."""
        return self.action != "refused"

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        verdict = None if self.verdict is None else self.verdict.to_json()
        return asdict(self) | {"done": self.done, "notes": list(self.notes), "verdict": verdict}


def promote(
    source: MatrixSource | None,
    params: Params,
    *,
    registry: str,
    model: str,
    to: int | None = None,
    dry_run: bool = False,
    force_reason: str | None = None,
) -> PromotionResult:
    """Compare a version with the champion on decisions that neither was trained on; promote it if it passes the gate.

    ``source``: returns the recent data; None is only valid with ``force_reason``: nothing is compared.
    ``params``: uses ``promotion``, ``seed`` and ``backtest.k``.
    ``to``: the version to promote; default: the challenger.
    Raises ``InputError`` if there is nothing to promote, the bundles or the data are unusable, or another promotion is
    in progress.
    """
    champion_history(registry, model)  # rejects a missing store before a lock file is created next to it
    with promotion_lock(registry), tempfile.TemporaryDirectory(prefix="predrain-promote-") as folder:
        history = champion_history(registry, model)
        if to is None or force_reason is None:
            history.refuse_unseated(model)
        number = to if to is not None else history.aliases.get(CHALLENGER)
        if number is None:
            raise InputError(
                "there is no challenger",
                f"model {model}",
                "Register one with `predrain train --registry`, or name a version with --to.",
            )
        if number == history.champion:
            raise InputError(
                f"version {number} is already the champion",
                f"model {model}",
                "Train a new challenger with `predrain train --registry`, or name another version with --to.",
            )
        bundle, version = load_version(registry, model, number, Path(folder))
        verdict, notes = None, []
        if source is not None:
            try:
                sides = [(f"version {number}", bundle)]
                if history.champion is not None:
                    champion, _ = load_version(registry, model, history.champion, Path(folder))
                    sides.append((f"version {history.champion}", champion))
                verdict = compared(source(), params, sides)
            except InputError as error:
                if force_reason is None:
                    raise
                notes.append(f"no comparison was possible: {error}")
        passed = verdict is not None and verdict.passed
        action = "promoted" if passed else "forced" if force_reason is not None else "refused"
        decision = PromotionResult(
            action=action,
            model=model,
            version=number,
            champion_before=history.champion,
            champion=history.champion if action == "refused" else number,
            dry_run=dry_run,
            verdict=verdict,
            reason=force_reason or "",
            notes=tuple(notes),
        )
        return decision if dry_run else carry_out(registry, decision, history, version, bundle, params, Path(folder))


def roll_back(*, registry: str, model: str, dry_run: bool = False, reason: str = "") -> PromotionResult:
    """Restore the previous champion; repeated calls go back step by step.

    Raises ``InputError`` if there was no champion before, its bundle is damaged, or another promotion is in progress.
    """
    champion_history(registry, model)
    with promotion_lock(registry), tempfile.TemporaryDirectory(prefix="predrain-promote-") as folder:
        history = champion_history(registry, model)
        history.refuse_unseated(model)
        champion, previous = history.champion, history.previous
        if champion is None or previous is None:
            raise no_previous_champion(model, champion)
        try:  # services must get a bundle that loads
            _, version = load_version(registry, model, previous, Path(folder))
        except InputError as error:
            raise InputError(
                error.problem,
                error.location,
                f"Bring the files of version {previous} back, or give the alias to a version whose files exist: "
                "`predrain promote --to NUMBER --force --reason WHY`.",
            ) from None
        decision = PromotionResult("rolled back", model, champion, champion, previous, dry_run, reason=reason)
        if dry_run:
            return decision
        tags = {"rolled_back_at": _now(), "rolled_back_reason": reason or "none given"}
        run_id = _record(registry, decision, {}, (), version)
        restore_previous(registry, model, expected=champion, tags=tags | {"rollback_run": run_id})
        tag_run(registry, run_id, {_APPLIED: "yes"})
        return replace(decision, run_id=run_id)


def load_version(registry: str, model: str, number: int, folder: Path) -> tuple[Bundle, Version]:
    """Fetch a registered bundle into a folder, and load it."""
    version = version_at(registry, model, number)
    target = folder / f"version-{number}"
    target.mkdir(parents=True)
    return load_bundle(fetch_bundle(registry, model, version, target)), version


def compared(matrix: FeatureMatrix, params: Params, sides: Sequence[tuple[str, Bundle]]) -> GateVerdict:
    """Evaluate a bundle against another one, or a single bundle against the baselines, on held-out decisions."""
    rows = untouched(matrix, sides, params.promotion.period)
    # the budget is what operations can handle: the champion's, unless the parameters set another
    k = params.backtest.k if isinstance(params.backtest.k, int) else sides[-1][1].fitted.k
    contenders = contend(matrix, rows, sides, BASELINES if len(sides) == 1 else (), k=k, seed=params.seed)
    return evaluate_gate(contenders[0], contenders[1:], params.promotion, seed=params.seed, champion=len(sides) > 1)


def carry_out(
    registry: str,
    decision: PromotionResult,
    history: ChampionHistory,
    version: Version,
    bundle: Bundle,
    params: Params,
    folder: Path,
) -> PromotionResult:
    """Record a decision, then move the alias, or tag the refused version."""
    record = folder / "record"
    record.mkdir()
    (record / "verdict.json").write_text(json.dumps(decision.to_json(), indent=1, sort_keys=True) + "\n")
    card = (bundle.path / "MODEL_CARD.md").read_text(encoding="utf-8")
    (record / "MODEL_CARD.md").write_text(card + promotion_section(decision.to_json()), encoding="utf-8")
    flat = {f"promotion.{key}": value for key, value in params.promotion.model_dump(mode="json").items()}
    run_id = _record(registry, decision, flat, (record / "verdict.json", record / "MODEL_CARD.md"), version)
    tags = {"promotion": decision.action, "promotion_run": run_id}
    if decision.action == "refused":
        tag_version(registry, decision.model, decision.version, tags)
    else:
        tags |= {"promoted_at": _now(), "promotion_reason": decision.reason or "passed the gate"}
        set_champion(registry, decision.model, decision.version, expected=history.champion, tags=tags)
        tag_run(registry, run_id, {_APPLIED: "yes"})
    return replace(decision, run_id=run_id)


def _record(
    registry: str, decision: PromotionResult, params: dict[str, Any], artifacts: tuple[Path, ...], version: Version
) -> str:
    """Record a decision before it is applied, so that a killed process leaves a run tagged as not applied."""
    metrics: dict[str, float | None] = {}
    if decision.verdict is not None:
        for criterion in decision.verdict.criteria:
            name = f"{criterion.name} vs {criterion.against}" if criterion.against else criterion.name
            name = "".join(char for char in name if char.isalnum() or char in "_-. /")
            metrics |= {f"{name}/challenger": criterion.challenger, f"{name}/other": criterion.champion}
        metrics |= {"incidents": decision.verdict.incidents, "rows": decision.verdict.rows}
    return log_run(
        registry,
        EXPERIMENT,
        params=params | {"model": decision.model, "version": decision.version},
        metrics=metrics,
        tags={
            "decision": decision.action,
            _APPLIED: "nothing to apply" if decision.action == "refused" else "no",
            "version": str(decision.version),
            "previous_champion": str(decision.champion_before or "none"),
            "champion": str(decision.champion or "none"),
            "reason": decision.reason or "none given",
            "by": os.environ.get("USER", "unknown"),
            "code_revision": code_revision(),
            "bundle_digest": version.digest,
        },
        artifacts=artifacts,
        name=f"{decision.action} {decision.model} {decision.version}",
    )


def _now() -> str:
    return datetime.now(tz=UTC).isoformat(timespec="seconds")
