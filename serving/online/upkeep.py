"""Looks after an online state while a service lives: begins it, decides from it, tidies it, and keeps it on disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from features.blocks import table_of
from features.errors import InputError
from serving.config import ScoringSettings
from serving.http.fleet import Fleet
from serving.live_config import live_config
from serving.online.deciding import OnlineDecision, OnlineModel, decide, floor_to
from serving.online.fleet_facts import placed_events
from serving.online.intake import Absorbed
from serving.online.journal import Journal, NotKeptError
from serving.online.origin import SampledAs, begin, fill
from serving.online.replaying import replay
from serving.online.state import OnlineState
from telemetry.dataset import Dataset

_LOG = logging.getLogger(__name__)
_MOST_JOURNAL = 2**26  # bytes; reading them again takes seconds, however small the pushes
MOST_EVENTS = 1_000_000
"""Events that are held at most: a sender must not be able to make the state grow without an end."""

MOST_EVENT_BYTES = 2**28
"""Bytes of memory that they may take: their details may be long."""


@dataclass(frozen=True, slots=True)
class UpkeepSettings:
    """How often what is done.

    ``tidy_s``, ``snapshot_s``, ``follow_s``: how often small frames are joined, the state is written, and the dataset
    is looked at.
    ``again_s``: how soon a decision may be made again because samples came that it should have known; ten times as long
    as it took at least.
    ``scoring``: when a unit is unknown, how much is explained, the operator's thresholds.
    """

    poll_s: float = 1.0
    tidy_s: float = 60.0
    snapshot_s: float = 600.0
    follow_s: float = 30.0
    again_s: float = 5.0
    scoring: ScoringSettings = field(default_factory=ScoringSettings)


@dataclass(frozen=True, slots=True)
class OnlineServed:
    """What is answered from; replaced as a whole.

    ``fleet``: the same seen by node.
    """

    decision: OnlineDecision | None = None
    fleet: Fleet | None = None


@dataclass(slots=True)
class OnlineCounts:
    """What has been done since the start."""

    decisions: int = 0
    decision_failures: int = 0
    snapshots: int = 0
    snapshot_failures: int = 0
    events: int = 0
    events_unknown: int = 0
    not_kept: int = 0


class OnlineUpkeep:
    """An online state with its thread.

    ``dataset``: Inventory, events and what the snapshot lacks; its newer inventories and events are followed.
    ``model``: gives the model to decide with; None while there is none.
    ``state``: none until it has begun.
    ``served``: take it once a request.
    ``trouble``: why there is no state, or no decision of this model.
    ``warnings``: what an operator should know though answers are given.
    ``snapshot_at``: when the last snapshot was written by this process.
    """

    def __init__(
        self,
        folder: Path,
        dataset: Path | None,
        model: Callable[[], OnlineModel | None],
        settings: UpkeepSettings,
        clock: Callable[[], datetime],
    ) -> None:
        self.state: OnlineState | None = None
        self.served = OnlineServed()
        self.trouble: str | None = "the online state is being opened"
        self.counts = OnlineCounts()
        self.snapshot_at: datetime | None = None
        self._notes: dict[str, str] = {}
        self._folder, self._dataset, self._model = folder, dataset, model
        self._settings, self._clock = settings, clock
        self._serving: OnlineModel | None = None
        self._followed: object = None
        self._followed_to: datetime | None = None
        self._due = {"tidy": 0.0, "snapshot": 0.0, "follow": 0.0, "shorten": 0.0}
        self._rest_until = 0.0
        self._late = False
        self._decided = 0.0
        self._writing = threading.Lock()
        self._absorbing = threading.Lock()
        self.journal = Journal(folder.with_name(f"{folder.name}.journal"))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="online", daemon=True)

    @property
    def warnings(self) -> list[str]:
        """What an operator should know though answers are given."""
        return list(self._notes.values())

    def start(self) -> None:
        """Begin; the state is opened once there is a model."""
        self._thread.start()

    def stop(self, wait_s: float = 30.0) -> None:
        """End the thread, and write the state: nothing that was accepted is lost.

        ``wait_s``: how long to wait for a round under way; it reads only, so the state is written beside it.
        """
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(wait_s)
        if self.state is not None:
            self.save()
        with self._absorbing:
            self.journal.close()

    def push(self, samples: pa.Table | None, events: pd.DataFrame | None) -> tuple[Absorbed, dict[str, int]]:
        """Take samples and events in, once they are on the disk.

        Returns ``events``: ``rows``, ``added`` (those that were not known), ``unknown`` (of no GPU or node of the
        inventory).
        Raises ``InputError`` if a table cannot be used as a whole, or too many events are held.
        Raises ``NotKeptError`` if the disk does not take it: nothing of it was taken.
        Raises ``RuntimeError`` if the state has not begun: see ``trouble``.
        """
        with self._absorbing:
            state = self.state
            if state is None:
                raise RuntimeError(str(self.trouble))
            placed = None if events is None or not len(events) else self._placed(state, events)
            at = _whole_ms(self._clock())
            before = self._keep(samples, placed, at)
            try:
                absorbed = Absorbed() if samples is None else state.push(samples, at=at)
                added = 0 if placed is None else state.push_events(placed)
            except InputError:
                if before is not None:
                    self.journal.take_back(before)
                raise
        told = {"rows": 0, "added": 0, "unknown": 0}
        if events is not None and len(events):
            unknown = len(events) - (0 if placed is None else len(placed))
            told = {"rows": len(events), "added": added, "unknown": unknown}
            self.counts.events += added
            self.counts.events_unknown += unknown
        last = self.served.decision
        if samples is not None and last is not None and absorbed.stored and not self._late:
            self._late = _reaches(samples, last)
        return absorbed, told

    def _placed(self, state: OnlineState, events: pd.DataFrame) -> pd.DataFrame | None:
        """Give the events of units that are known; None where there are none."""
        inventory, held = state.fleet
        placed = placed_events(events, inventory)
        size = sum(int(each.memory_usage(index=False, deep=True).sum()) for each in (held, placed))
        if len(held) + len(placed) > MOST_EVENTS or size > MOST_EVENT_BYTES:
            raise InputError(
                f"the online state holds {len(held)} events, {MOST_EVENTS} and {MOST_EVENT_BYTES >> 20} MiB at most",
                "pushed events",
                "Find out who sends so many.",
            )
        return placed if len(placed) else None

    def _keep(self, samples: pa.Table | None, events: pd.DataFrame | None, at: datetime) -> int | None:
        """Write a push to the journal; return what takes it back."""
        before: int | None = None
        try:
            if samples is not None:
                before = self.journal.append("samples", samples, at)
            if events is not None:
                place = self.journal.append("events", table_of(events), at)
                before = place if before is None else before
        except NotKeptError as error:
            if before is not None:
                self.journal.take_back(before)
            self.counts.not_kept += 1
            self._note("journal", str(error))
            raise
        self._notes.pop("journal", None)
        return before

    def save(self) -> bool:
        """Write the snapshot now; what keeps it from being written is said and counted."""
        assert self.state is not None
        with self._writing:
            try:
                with self._absorbing:
                    first = self.journal.cut()
                    captured = self.state.capture()
                captured.write(self._folder, first)
                with self._absorbing:
                    self.journal.forget_before(first)
            except (InputError, OSError) as error:
                self.counts.snapshot_failures += 1
                self._note("snapshot", f"the online state cannot be written: {error}")
                return False
            self.counts.snapshots += 1
            self.snapshot_at = self._clock()
            self._notes.pop("snapshot", None)
            return True

    def round(self) -> None:
        """Do what is due."""
        model = self._model()
        if model is None:
            return
        if self.state is None or model is not self._serving:
            self._adopt(model)
        if self.state is None:
            return
        if self._is_due("follow", self._settings.follow_s):
            self._follow(self.state)
        if self._is_due("tidy", self._settings.tidy_s):
            self.state.advance()
            self.state.tidy()
        self._decide(self.state)
        if self._is_due("snapshot", self._settings.snapshot_s) or (
            self.journal.bytes > _MOST_JOURNAL and self._is_due("shorten", self._settings.tidy_s)
        ):
            self.save()

    def _adopt(self, model: OnlineModel) -> None:
        """Begin with a model, or let the state make rows for another one."""
        if self.state is not None:
            try:
                meta = SampledAs.of(self.state.config) if self._dataset is None else Dataset.open(self._dataset).meta
                self.state.serve(live_config(model.bundle, meta))
            except InputError as error:
                if self._dataset is None:
                    self._serving = model  # not again each second
                    self._note("model", f"the online state cannot serve the model {model.name.digest[:12]}: {error}")
                    return
                _LOG.warning("the online state begins anew for the model %s: %s", model.name.digest[:12], error)
            else:
                self._serving, self._rest_until = model, 0.0
                self.served = OnlineServed()  # what the model before has said is not what this one says
                self._notes.pop("model", None)
                return
        began, stamp = time.monotonic(), self._stamp()
        with self._absorbing:
            since = self.journal.cut()
        try:
            found = begin(self._folder, self._dataset, model.bundle, self._clock, self.journal, since)
        except InputError as error:
            if str(error) != self.trouble:
                _LOG.error("the online state cannot begin: %s", error)
            self.trouble = str(error)
            self._stopped.wait(5 * self._settings.poll_s)
            return
        if found.refused is not None:
            self._note("refused", f"the snapshot was not used: {found.refused}")
        if self.journal.damaged:
            lost, files = sum(self.journal.damaged.values()), ", ".join(sorted(self.journal.damaged))
            text = f"{lost} bytes of what was pushed were damaged on the disk ({files}): push it again if you can"
            self._note("damaged", f"{text}, and look after the disk")
        self._notes.pop("model", None)
        with self._absorbing:  # what came meanwhile, for a state that this one takes the place of
            arrived = found.arrived + replay(found.state, self.journal, since)
            self.state, self._serving, self.trouble = found.state, model, None
        self.served = OnlineServed()
        self._followed, self._followed_to = stamp, found.dataset_to
        now = time.monotonic()
        self._due |= {"tidy": now, "snapshot": now + self._settings.snapshot_s, "follow": now + self._settings.follow_s}
        _LOG.info(
            "the online state %s with %d samples of %d units, %d read from the dataset, %d pushes read again (%.1f s)",
            "goes on" if found.restored else "begins",
            found.state.size.rows,
            found.state.size.pairs,
            found.replayed,
            arrived,
            now - began,
        )

    def _decide(self, state: OnlineState) -> None:
        model, now = self._serving, self._clock()
        if model is None or "model" in self._notes or time.monotonic() < self._rest_until:
            return
        config = state.config
        t = floor_to(now, config.step, config.decision.origin)
        last = self.served.decision
        took_s = 0.0 if last is None else last.took_s
        again = self._late and time.monotonic() >= self._decided + max(self._settings.again_s, 10 * took_s)
        if last is not None and t <= last.t <= now and not again:  # one from after now: the clock was set back
            return
        self._late, self._decided = False, time.monotonic()
        try:
            found = decide(state, model, self._settings.scoring, t, time.monotonic)
        except InputError as error:
            self.counts.decision_failures += 1
            self._rest_until = time.monotonic() + 30 * self._settings.poll_s
            self._note("decision", f"the online state gives no scores: {error}")
            return
        self._notes.pop("decision", None)
        self.served = OnlineServed(found, Fleet(found.scores))
        self.counts.decisions += 1
        self._rest_until = time.monotonic() + found.took_s  # half of a core at most, however large the fleet
        _LOG.info(
            "online decision %s: %d of %d units known (%.1f s)",
            found.scores.decision,
            found.known,
            len(found.scores.units),
            found.took_s,
        )

    def _follow(self, state: OnlineState) -> None:
        """Take up a dataset's newer inventory, events and samples."""
        if self._dataset is None or (stamp := self._stamp()) == self._followed:
            return
        try:
            held = Dataset.open(self._dataset)
            known = state.now() if self._followed_to is None else min(self._followed_to, state.now())
            taken = fill(state, held, since=known - state.config.decision.every)
        except InputError as error:
            self._note("dataset", f"the dataset cannot be followed: {error}")
            return
        self._followed, self._followed_to = stamp, held.meta.span[1]
        self._late = True  # the newest decision is made again with what has come
        self._notes.pop("dataset", None)
        _LOG.info("the dataset has changed: its inventory, its events and %d samples are taken", taken)

    def _stamp(self) -> object:
        try:
            stat = None if self._dataset is None else (self._dataset / "dataset.json").stat()
        except OSError as error:
            return error.errno
        return None if stat is None else (stat.st_mtime_ns, stat.st_ino)

    def _is_due(self, what: str, every_s: float) -> bool:
        now = time.monotonic()
        if now < self._due[what]:
            return False
        self._due[what] = now + every_s
        return True

    def _note(self, key: str, text: str) -> None:
        if self._notes.get(key) != text:
            _LOG.warning("%s", text)
        self._notes = self._notes | {key: text}

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.round()
                self._notes.pop("fault", None)
            except Exception as error:  # the thread must live: without it nothing would be decided or kept
                if "fault" not in self._notes:
                    _LOG.exception("the online state could not be looked after")
                self._notes = self._notes | {
                    "fault": f"the online state cannot be looked after: {type(error).__name__}"
                }
                self._stopped.wait(10 * self._settings.poll_s)
            self._stopped.wait(self._settings.poll_s)


def _whole_ms(t: datetime) -> datetime:
    """Cut a time to milliseconds, as the journal keeps it."""
    return t.replace(microsecond=t.microsecond // 1000 * 1000)


def _reaches(samples: pa.Table, decision: OnlineDecision) -> bool:
    """Tell whether a decision would have known some of the samples, had they come in time."""
    border = pa.scalar(decision.t - decision.config.features.delay, pa.timestamp("ms", "UTC"))
    return bool(pc.any(pc.less_equal(samples.column("timestamp"), border)).as_py())
