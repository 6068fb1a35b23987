"""Scores of the whole fleet, or of a few GPUs with samples of their own, made from the online state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from features.errors import InputError
from features.fleet_reference import FleetReference
from features.live import live_plan
from features.matrix_meta import MatrixConfig
from features.sequences import SequencePlan
from policy.risk_record import ModelName, RiskRecord
from policy.tiers import TierThresholds, choose_thresholds
from serving.config import ScoringSettings
from serving.fleet_rows import FleetRows
from serving.http.scores import Scores
from serving.live_config import ReadBundle, window_plan
from serving.online.intake import Absorbed
from serving.online.state import OnlineState
from serving.profile_scores import ProfileScorer, score_rows
from serving.records import risk_records


@dataclass(frozen=True, slots=True)
class OnlineModel:
    """A model whose rows the online state makes.

    ``thresholds``: of the tiers: the operator's own, the rest from the bundle.
    """

    bundle: ReadBundle
    scorer: ProfileScorer
    name: ModelName
    thresholds: TierThresholds

    @classmethod
    def of(cls, bundle: ReadBundle, scorer: ProfileScorer, name: ModelName, tiers: TierThresholds) -> OnlineModel:
        """Join what was loaded with the operator's thresholds."""
        said = bundle.manifest.get("decisions") or {}
        chosen = choose_thresholds(tiers, said.get("thresholds"), why_none=str(said.get("why") or ""))
        return cls(bundle, scorer, name, chosen.thresholds)

    @property
    def fitted_at(self) -> str | None:
        """End of what it knew, as its manifest writes it."""
        said = self.bundle.manifest.get("fitted")
        return str(said["refit_at"]) if isinstance(said, dict) and "refit_at" in said else None


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    """What some samples say, without being held.

    ``records``: one for each GPU that was named and is in service, in the order of the samples.
    ``absent``: GPUs that were named, are known, and are not in service at the decision time.
    ``absorbed``: what became of the rows.
    ``later``: rows that are too new for the decision time: nothing younger than ``features.delay`` before it counts.
    """

    records: list[RiskRecord]
    absent: list[str]
    absorbed: Absorbed
    later: int


class OnlineDecision:
    """The fleet at one decision time. Nothing of it changes.

    ``scores``: as those that ``predrain score`` writes.
    ``known``: units whose risk is known.
    """

    def __init__(
        self,
        t: datetime,
        model: OnlineModel,
        config: MatrixConfig,
        rows: FleetRows,
        records: list[RiskRecord],
        settings: ScoringSettings,
        took_s: float,
    ) -> None:
        self.t, self.model, self.config, self.rows, self.took_s = t, model, config, rows, took_s
        self.known = sum(record.status == "ok" for record in records)
        self.scores = _scores(records, model, rows)
        self._settings = settings
        self._lock = threading.Lock()
        self._reference: FleetReference | None = None

    def with_samples(self, state: OnlineState, samples: pa.Table) -> SampleAnswer:
        """Tell what the decision would have said of some GPUs had these samples been pushed too.

        ``state``: what is held; it is not changed.
        ``samples``: as :meth:`serving.online.state.OnlineState.push` takes them.
        Returns: ranks and alerts are those among the fleet of the decision; all of the GPUs are explained.
        Raises ``InputError`` if no row names a GPU that the inventory has on that node, or the decision is out of the
        state's reach.
        """
        by_node = self.config.unit == "node"
        nodes = samples.column("node").to_pylist()
        units = nodes if by_node else samples.column("gpu").to_pylist()
        named = [(node, unit) for node, unit in dict.fromkeys(zip(nodes, units, strict=True)) if unit is not None]
        known = [(node, unit) for node, unit in named if state.knows(node, unit)]
        if not known:
            if not named:
                raise InputError("no row names a GPU", "samples", "Fill the column gpu.")
            raise InputError(
                f"the inventory knows none of the {len(named)} units named, such as {named[0][1]} on {named[0][0]}",
                "samples",
                "Name GPUs and nodes as the inventory does.",
            )
        border = pa.scalar(self.t - self.config.features.delay, pa.timestamp("ms", "UTC"))
        later = int(pc.sum(pc.greater(samples.column("timestamp"), border)).as_py() or 0)
        fork = state.fork()
        absorbed = fork.push(samples)
        own = fork.rows(
            self.t,
            self._settings,
            windows=_windows(self.model, self.config),
            nodes=frozenset(node for node, _ in known),
            reference=self._fleet_reference(state),
        )
        asked = [unit for _, unit in known]
        joined = _joined(self.rows, own)
        settings = replace(self._settings, explained=len(asked))
        scored, _ = score_rows(
            self.model.scorer, joined, self.model.thresholds, settings, self.t, explain=frozenset(asked)
        )
        issued = fork.now().replace(microsecond=0)
        found = {record.unit: record for record in _records(joined, scored, self.model, self.config, self.t, issued)}
        return SampleAnswer(
            [found[unit] for unit in dict.fromkeys(asked) if unit in found],
            [unit for unit in dict.fromkeys(asked) if unit not in found],
            absorbed,
            later,
        )

    def _fleet_reference(self, state: OnlineState) -> FleetReference | None:
        plan = live_plan(self.config)
        if plan.peers is None and plan.onset is None:
            return None
        with self._lock:  # one pass over everything held, for the first who asks
            if self._reference is None:
                self._reference = state.reference(self.t)
            return self._reference


def decide(
    state: OnlineState, model: OnlineModel, settings: ScoringSettings, t: datetime, seconds: Callable[[], float]
) -> OnlineDecision:
    """Score the fleet at a time, as ``predrain score`` does from a dataset.

    ``state``: serving the model (:meth:`serving.online.state.OnlineState.serve`).
    ``t``: Aware, whole seconds, not after now and within a decision interval.
    ``seconds``: a clock that only rises, for how long it took.
    Raises ``InputError`` if no unit is in service, or ``t`` is out of reach.
    """
    began = seconds()
    config = state.config
    issued = state.now().replace(microsecond=0)
    rows = state.rows(t, settings, windows=_windows(model, config))
    scored, _ = score_rows(model.scorer, rows, model.thresholds, settings, t)
    records = _records(rows, scored, model, config, t, issued)
    return OnlineDecision(t, model, config, rows, records, settings, seconds() - began)


def floor_to(t: datetime, interval: timedelta, origin: datetime) -> datetime:
    """Give the last time of a grid that is not after ``t``."""
    return origin + (t - origin) // interval * interval


def _windows(model: OnlineModel, config: MatrixConfig) -> SequencePlan | None:
    return window_plan(model.bundle, config)


def _records(
    rows: FleetRows, scored: Any, model: OnlineModel, config: MatrixConfig, t: datetime, issued: datetime
) -> list[RiskRecord]:
    return risk_records(
        rows, scored, thresholds=model.thresholds, config=config, t=t, issued_at=issued, model=model.name
    )


def _scores(records: Sequence[RiskRecord], model: OnlineModel, rows: FleetRows) -> Scores:
    return Scores.of(
        records,
        {
            "source": "online",
            "units": len(records),
            "newest_sample_ms": rows.newest_ms,
            "model": {"fitted_at": model.fitted_at},
        },
    )


def _joined(fleet: FleetRows, own: FleetRows) -> FleetRows:
    """Put some units' rows in the place of those that the fleet has."""
    mine = set(own.keys["unit"]) | set(own.idle["unit"])
    kept = np.flatnonzero(~fleet.keys["unit"].isin(mine).to_numpy())
    keys = pd.concat([fleet.keys.iloc[kept], own.keys], ignore_index=True)
    order = np.argsort(keys["unit"].to_numpy(dtype=object), kind="stable")

    def both(first: Any, second: Any) -> Any:
        return np.concatenate([first[kept], second])[order]

    why = [fleet.why[at] for at in kept.tolist()] + own.why
    idle = pd.concat([fleet.idle[~fleet.idle["unit"].isin(mine)], own.idle], ignore_index=True)
    fresh = replace(
        own.fresh,
        sample_age_s=both(fleet.fresh.sample_age_s, own.fresh.sample_age_s),
        completeness=both(fleet.fresh.completeness, own.fresh.completeness),
    )
    return FleetRows(
        keys=keys.iloc[order].reset_index(drop=True),
        values=both(fleet.values, own.values),
        fresh=fresh,
        why=[why[at] for at in order.tolist()],
        idle=idle,
        slots=fleet.slots | own.slots,
        newest_ms=own.newest_ms if fleet.newest_ms is None else max(fleet.newest_ms, own.newest_ms or 0),
    )
