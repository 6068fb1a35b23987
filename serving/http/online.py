"""The online state as a service sees it: begun in a thread, so that nothing waits for it; absent where unwanted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.config import ScoringSettings
from serving.http.fleet import Fleet
from serving.http.keeper import ScoreKeeper, Served
from serving.http.model import LoadedModel, ModelHolder
from serving.page.reader import Channels, channels_from
from telemetry.exposition.writer import family

if TYPE_CHECKING:
    from serving.online.deciding import OnlineModel
    from serving.online.upkeep import OnlineUpkeep

_LOG = logging.getLogger(__name__)
_AS_MANY = 0.9


@dataclass(frozen=True, slots=True)
class OnlinePlace:
    """Where an online state lives, and what it is told.

    ``scoring``: when a unit is unknown, how much is explained, the operator's thresholds.
    ``poll_s``, ``tidy_s``, ``snapshot_s``, ``follow_s``, ``again_s``: how often to look, to join small frames, to write
    the snapshot, to look at the dataset; and how soon a decision may be made again because samples came that it should
    have known.
    """

    folder: Path
    dataset: Path | None = None
    scoring: ScoringSettings = field(default_factory=ScoringSettings)
    poll_s: float = 1.0
    tidy_s: float = 60.0
    snapshot_s: float = 600.0
    follow_s: float = 30.0
    again_s: float = 5.0


class OnlineHolder:
    """Begins the online state once pandas has been imported, which takes a second that no request should wait for.

    ``place``: None: there is no online state.
    ``upkeep``: None: not there, or not yet.
    """

    def __init__(self, place: OnlinePlace | None, holder: ModelHolder, clock: Callable[[], datetime]) -> None:
        self.wanted = place is not None
        self.upkeep: OnlineUpkeep | None = None
        self._place, self._holder, self._clock = place, holder, clock
        self._fault: str | None = None
        self._told: tuple[LoadedModel, OnlineModel] | None = None
        self._stopped = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._begin, name="online-begin", daemon=True)

    @property
    def fleet(self) -> Fleet | None:
        """The newest decision of the online state; None while there is none."""
        return None if self.upkeep is None else self.upkeep.served.fleet

    @property
    def trouble(self) -> str | None:
        """Why samples cannot be taken; None: they can, or there is no online state."""
        if not self.wanted:
            return None
        if self.upkeep is None:
            return self._fault or "the online state is being opened"
        return self.upkeep.trouble

    @property
    def warnings(self) -> list[str]:
        """What an operator should know though answers are given."""
        return [] if self.upkeep is None else self.upkeep.warnings

    def start(self) -> None:
        """Begin."""
        if self.wanted:
            self._thread.start()

    def stop(self) -> None:
        """End, and write the state."""
        if self._thread.is_alive():
            self._thread.join(20)
        with self._lock:
            self._stopped = True
        if self.upkeep is not None:
            self.upkeep.stop()

    def freshness(self) -> dict[str, Any] | None:
        """Say how fresh the telemetry is; None where there is no decision yet."""
        if self.upkeep is None or self.upkeep.served.decision is None:
            return None
        decision, now = self.upkeep.served.decision, self._clock()
        newest = decision.rows.newest_ms
        return {
            "decision": decision.scores.decision,
            "decision_age_s": round((now - decision.t).total_seconds()),
            "newest_sample_age_s": None if newest is None else round(now.timestamp() - newest / 1000),
            "units": len(decision.scores.units),
            "known": decision.known,
        }

    def channels(self, node: str, unit: str) -> Channels | None:
        """Give a unit's last days as they were pushed and read; None where there is no state, or no sample of it."""
        state = None if self.upkeep is None else self.upkeep.state
        if state is None:
            return None
        from serving.online.unit_series import unit_series  # noqa: PLC0415 - pandas, which the state has imported

        content = unit_series(state, node, unit)
        return None if content is None else channels_from(content)

    def exposition(self) -> str:
        """Return the lines of its numbers."""
        if not self.wanted:
            return ""
        page = family("online_ready", "gauge", "Whether samples are taken.", {"": self.trouble is None})
        upkeep = self.upkeep
        if upkeep is None:
            return page
        counts = upkeep.counts
        for name, text, value in (
            ("online_decisions_total", "Decisions made from the online state.", counts.decisions),
            ("online_decision_failures_total", "Decisions that failed.", counts.decision_failures),
            ("online_snapshots_total", "Snapshots written.", counts.snapshots),
            ("online_snapshot_failures_total", "Snapshots that could not be written.", counts.snapshot_failures),
            ("online_not_kept_total", "Pushes refused because the disk did not take them.", counts.not_kept),
        ):
            page += family(name, "counter", text, {"": value})
        events = {'{fate="added"}': counts.events, '{fate="unknown"}': counts.events_unknown}
        page += family("online_events_total", "counter", "Events pushed, by what became of them.", events)
        size_of = {"": upkeep.journal.bytes}
        page += family("online_journal_bytes", "gauge", "Bytes of what was pushed since the last snapshot.", size_of)
        if upkeep.snapshot_at is not None:
            when = {"": upkeep.snapshot_at.timestamp()}
            page += family("online_snapshot_timestamp_seconds", "gauge", "When the last snapshot was written.", when)
        if upkeep.state is not None:
            size, totals = upkeep.state.size, upkeep.state.totals
            fates = ("stored", "late", "closed", "too_old", "ahead", "unknown")
            rows = {f'{{fate="{fate}"}}': getattr(totals, fate) for fate in fates}
            page += family("online_samples_total", "counter", "Samples pushed, by what became of them.", rows)
            nulled = {"": totals.values_nulled}
            page += family("online_values_nulled_total", "counter", "Values that cannot be true.", nulled)
            page += family("online_held_samples", "gauge", "Samples held.", {"": size.rows + size.waiting})
            page += family("online_held_bytes", "gauge", "Bytes of the samples held.", {"": size.bytes})
        if upkeep.served.decision is not None:
            decision, now = upkeep.served.decision, self._clock()
            when = {"": decision.t.timestamp()}
            page += family("online_decision_timestamp_seconds", "gauge", "Time of the newest online decision.", when)
            page += family("online_decision_seconds", "gauge", "How long it took to make.", {"": decision.took_s})
            page += family("online_known_units", "gauge", "Units whose risk it knows.", {"": decision.known})
            if decision.rows.newest_ms is not None:
                age = {"": now.timestamp() - decision.rows.newest_ms / 1000}
                page += family("online_sample_age_seconds", "gauge", "Age of the newest sample in it.", age)
        return page

    def _begin(self) -> None:
        try:
            from serving.online.upkeep import OnlineUpkeep, UpkeepSettings  # noqa: PLC0415 - pandas and the kernels

            place = self._place
            assert place is not None
            settings = UpkeepSettings(
                place.poll_s, place.tidy_s, place.snapshot_s, place.follow_s, place.again_s, place.scoring
            )
            upkeep = OnlineUpkeep(place.folder, place.dataset, self._model, settings, self._clock)
            with self._lock:
                if not self._stopped:
                    self.upkeep = upkeep
                    upkeep.start()
        except Exception as error:  # told by /readyz; a thread's end would be silent
            self._fault = f"the online state cannot be opened: {type(error).__name__}"
            _LOG.exception("the online state cannot be opened")

    def _model(self) -> OnlineModel | None:
        """Give the model in use, the same object as long as it is."""
        from policy.risk_record import ModelName  # noqa: PLC0415 - as its room, only with an online state
        from serving.online.deciding import OnlineModel  # noqa: PLC0415

        loaded, place = self._holder.model, self._place
        if loaded is None or place is None:
            return None
        if self._told is None or self._told[0] is not loaded:
            version = int(loaded.version) if loaded.version is not None and loaded.version.isdecimal() else None
            name = ModelName(loaded.digest, loaded.profile, version)
            self._told = loaded, OnlineModel.of(loaded.bundle, loaded.scorer, name, place.scoring.tiers)
        return self._told[1]


class NewestScores:
    """The scores to answer from: those of the folder, or those of the online state where they are newer."""

    def __init__(self, keeper: ScoreKeeper, online: OnlineHolder, clock: Callable[[], datetime]) -> None:
        self._keeper, self._online, self._clock = keeper, online, clock

    @property
    def served(self) -> Served:
        """What to answer from; take it once a request.

        An online decision that knows fewer units than the scores in the folder (nine in ten count as as many) does not
        take their place as long as those hold: telemetry that has not come yet must not hide what is known. One that
        knows none never takes the place of scores that know some: those stay, and are said to have expired.
        """
        stored, fleet = self._keeper.served, self._online.fleet
        if fleet is None or (stored.fleet is not None and not self._replaces(fleet, stored.fleet)):
            return stored
        return Served(fleet, None, stored.status)

    @property
    def held_back(self) -> bool:
        """Whether a newer online decision is not answered from, because it knows too few units."""
        stored, fleet = self._keeper.served.fleet, self._online.fleet
        if stored is None or fleet is None or fleet.scores.decided <= stored.scores.decided:
            return False
        return not self._replaces(fleet, stored)

    def _replaces(self, fleet: Fleet, stored: Fleet) -> bool:
        now = self._clock()
        holding = fleet.holds(now), stored.holds(now)
        if all(holding):
            return fleet.scores.decided > stored.scores.decided and fleet.known >= _AS_MANY * stored.known
        if any(holding):
            return holding[0]
        # Neither says anything of now: the newer of those that ever knew something tells since when.
        return (fleet.known > 0, fleet.scores.decided) > (stored.known > 0, stored.scores.decided)
