"""The online state: what a service holds to make the fleet's rows at any moment, from samples as they arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from features.errors import InputError
from features.fleet import Fleet
from features.fleet_reference import FleetReference
from features.live import live_plan, look_back
from features.matrix_meta import MatrixConfig
from features.sequences import SequencePlan
from features.service import duration_ms, instant_ms
from serving.config import ScoringSettings
from serving.fleet_rows import FleetRows
from serving.online.blocks import concat, settle
from serving.online.fleet_facts import checked_inventory, joined_events
from serving.online.frame import Frame
from serving.online.intake import Absorbed, PairBook, read_samples
from serving.online.online_rows import View, fleet_reference_of, online_rows
from serving.online.placing import Placing
from serving.online.size import StateSize, bytes_of
from serving.online.snapshot import Captured, Held, Snapshot, read_snapshot, sampled_of
from serving.online.stepper import Stepper
from serving.online.window import SampleWindow, read_frames
from telemetry.block import Block
from telemetry.events import empty_events
from telemetry.landing.waiting import AHEAD

Clock = Callable[[], datetime]
_FOR_EVER = 1 << 62


class OnlineState:
    """Samples, events and inventory of a fleet, as far back as a bundle's features look.

    Make it with :meth:`of` or :meth:`restore`. Safe to use from several threads: samples are taken in under a lock,
    rows are computed and snapshots written outside it, from frames that never change.
    """

    def __init__(
        self,
        config: MatrixConfig,
        held_: Held,
        window: SampleWindow,
        stepper: Stepper,
        clock: Clock,
        newest: NDArray[np.int64] | None = None,
    ) -> None:
        self.config = config
        self._clock = clock
        self._lock = threading.RLock()
        self._tidying = threading.Lock()
        self._inventory = held_.inventory
        self._known = Fleet.of(held_.inventory).index
        self._events = held_.events
        self._book = PairBook()
        for pair in held_.pairs:
            self._book.number(pair)
        self._window = window
        self._stepper = stepper
        self._totals = held_.totals
        self._order = held_.order
        self._placing = Placing(window, stepper, newest)
        self._placing.grow(len(self._book))
        if newest is None:
            self._placing.read_newest()

    @classmethod
    def of(
        cls,
        config: MatrixConfig,
        inventory: pd.DataFrame | pa.Table,
        events: pd.DataFrame | pa.Table,
        clock: Clock,
        since: datetime | None = None,
    ) -> OnlineState:
        """Begin without a sample.

        ``inventory``, ``events``: as a dataset holds them, of the whole fleet and all its past.
        ``since``: when the first of the samples came that are to be pushed as they came then. Default: now.
        Raises ``InputError`` if this version of predrain no longer makes the bundle's columns, or a table cannot be
        used.
        """
        checked = checked_inventory(inventory)
        told = joined_events(empty_events(), events, config.features.delay)
        beginning = Held(
            inventory=checked,
            events=told,
            pairs=[],
            totals=Absorbed(),
            order=0,
            waiting=None,
            units={},
            closed_ms=None if since is None else closed_at(instant_ms(since), config),
        )
        return cls._with(config, beginning, [], clock)

    @classmethod
    def restore(cls, path: Path, *, clock: Clock, config: MatrixConfig | None = None) -> OnlineState:
        """Go on from a snapshot.

        ``path``: from :meth:`snapshot`.
        ``config``: of the bundle that will score the rows. One that looks at other samples than the snapshot's is
        refused.
        Returns: samples from the time between the snapshot and now are not in it: push them again.
        Raises ``InputError`` if there is no snapshot, it is damaged, of another version, or made for another bundle.
        Begin with :meth:`of` then: nothing of a snapshot that cannot be trusted is used.
        """
        return cls.resume(read_snapshot(path, config), clock)

    @classmethod
    def resume(cls, snapshot: Snapshot, clock: Clock) -> OnlineState:
        """Go on from a snapshot that has been read."""
        return cls._with(snapshot.config, snapshot.held, snapshot.frames, clock)

    @classmethod
    def _with(
        cls,
        config: MatrixConfig,
        held_: Held,
        frames: Sequence[Frame],
        clock: Clock,
        newest: NDArray[np.int64] | None = None,
    ) -> OnlineState:
        keep = look_back(config) + config.decision.every
        window = SampleWindow(config.channels, keep, config.step)
        window.restore(frames)
        step_ms = duration_ms(config.step)
        closed = held_.closed_ms
        if closed is None:
            closed = closed_at(instant_ms(clock()), config)
        stepper = Stepper(config.channels, step_ms, closed)
        if held_.waiting is not None:
            stepper.waiting = [held_.waiting]
        if held_.units:
            stepper.units = dict(held_.units)
        return cls(config, held_, window, stepper, clock, newest)

    @property
    def look_back(self) -> timedelta:
        """How far back samples are kept: as the features look, and one decision interval more."""
        return look_back(self.config) + self.config.decision.every

    @property
    def totals(self) -> Absorbed:
        """Counts of all samples since the state began, those before a restart included."""
        with self._lock:
            return self._totals

    @property
    def size(self) -> StateSize:
        """How much is held."""
        with self._lock:
            frames = self._window.frames
            waiting = sum(len(block) for block in self._stepper.waiting)
            extra = sum(bytes_of(block) for block in self._stepper.waiting)
            return StateSize(len(self._book), self._window.rows, len(frames), waiting, self._window.nbytes + extra)

    def push(
        self, samples: pa.Table, *, replayed: bool = False, at: datetime | NDArray[np.int64] | None = None
    ) -> Absorbed:
        """Take samples in.

        ``samples``: ``timestamp`` (aware), ``node``, ``gpu`` (unless the unit is the node), ``mig_instance`` at will,
        and channels, in any order. Of two rows of a unit at one time the later one counts; what it does not report is
        filled in from the earlier one unless they contradict each other.
        ``replayed``: the samples are read again from a dataset or from landed files, to fill a state that begins or a
        gap: they are not counted as late, and are brought to the step as an import of them would. Give whole steps: raw
        rows of one step that come in two tables are not joined.
        ``at``: when they came, not before what was pushed earlier; default: now. The same tables at the same times make
        the same state. An array has the milliseconds of each row, never falling, for several pushes in one table
        (:func:`serving.online.replaying.replay`).
        Returns: when this returns, :meth:`rows` knows them.
        Raises ``InputError`` if the table cannot be used; nothing of it is taken.
        """
        last_ms = int(at[-1]) if isinstance(at, np.ndarray) else instant_ms(self._clock() if at is None else at)
        came = at if isinstance(at, np.ndarray) else np.full(len(samples), last_ms)
        with self._lock:
            block, unknown, nulled = read_samples(
                samples, self.config.channels, self.config.unit, self._known, self._book
            )
            self._placing.grow(len(self._book))
            given = len(block)
            now_ms = came[block.order]
            oldest = self._window.oldest_ms(now_ms)
            ahead = block.ms > now_ms + duration_ms(AHEAD)
            old = block.ms <= oldest
            kept = ~(ahead | old)
            if not kept.all():
                block, now_ms = block.take(np.flatnonzero(kept)), now_ms[kept]
            late = 0 if replayed else int((block.ms < now_ms - duration_ms(self.config.features.delay)).sum())
            block.order = -(self._order + np.arange(len(block), dtype=np.int64))  # the last to come counts
            self._order += len(block)
            self._placing.set_back(closed_at(last_ms, self.config))
            stored = self._placing.take(block, replayed=replayed)  # first: what comes after just the delay is in time
            self._advance(last_ms)
            absorbed = Absorbed(
                rows=given + unknown,
                stored=stored,
                late=late,
                closed=len(block) - stored,
                too_old=int(old.sum()),
                ahead=int(ahead.sum()),
                unknown=unknown,
                values_nulled=nulled,
            )
            self._totals = self._totals + absorbed
            return absorbed

    def push_events(self, events: pd.DataFrame | pa.Table) -> int:
        """Add events.

        ``events``: in the layout of a dataset's; ``known_at`` is the time plus ``features.delay`` where it is missing.
        Returns: events that were not known before.
        Raises ``InputError`` if they cannot be used; none is taken.
        """
        with self._lock:
            before = len(self._events)
            self._events = joined_events(self._events, events, self.config.features.delay)
            return len(self._events) - before

    def push_inventory(self, inventory: pd.DataFrame | pa.Table) -> None:
        """Put a newer inventory in the place of the one held: units that came, left and moved.

        Samples of a unit that is new on its node are refused until the inventory names it there.

        Raises ``InputError`` if it cannot be used; the old one stays.
        """
        checked = checked_inventory(inventory)
        index = Fleet.of(checked).index
        with self._lock:
            self._inventory, self._known = checked, index

    def serve(self, config: MatrixConfig) -> None:
        """Make rows for another bundle from now on, such as a retrained one.

        Raises ``InputError`` if it looks at other samples than are held: it needs a state of its own.
        """
        if sampled_of(config) != sampled_of(self.config):
            raise InputError(
                "the bundle looks at other samples than the online state holds",
                "its channels, step, delay, interval or look-back",
                "Begin a state of its own with it.",
            )
        live_plan(config)
        with self._lock:
            self.config = config

    def rows(
        self,
        t: datetime,
        settings: ScoringSettings | None = None,
        *,
        windows: SequencePlan | None = None,
        nodes: Collection[str] | None = None,
        reference: FleetReference | None = None,
    ) -> FleetRows:
        """Make the rows of one decision time, as :func:`serving.fleet_rows.fleet_rows` does from a dataset.

        ``t``: Aware; not after now, and not more than a decision interval ago.
        ``nodes``: only these nodes' rows; needs ``reference`` where features compare with the fleet.
        ``reference``: from :meth:`reference`.
        Raises ``InputError`` if ``t`` is out of reach, or no unit is in service.
        """
        return online_rows(self._view(t), t, settings or ScoringSettings(), windows, nodes, reference)

    def reference(self, t: datetime) -> FleetReference:
        """Take what rows of single nodes must know of the whole fleet at ``t``: one pass over everything held."""
        return fleet_reference_of(self._view(t), t)

    def tidy(self) -> int:
        """Join small frames into larger ones.

        Meant for a thread of its own, every minute or so: it holds the lock only for moments. Without it, rows are the
        same and made more slowly.
        """
        joins = 0
        with self._tidying:
            while True:
                with self._lock:
                    work = self._window.due(self._stepper.closed_ms)
                if work is None:
                    return joins
                joined = self._window.join(work)
                with self._lock:
                    self._window.replace(work, joined)
                joins += 1

    def snapshot(self, path: Path) -> int:
        """Write everything held to a folder, which is there in full or as it was before.

        Frames that the folder's last snapshot holds already are not written again.

        Raises ``InputError`` if the disk is full or may not be written to, or another process is writing there.
        """
        return self.capture().write(path)

    def capture(self) -> Captured:
        """Take what a snapshot is written from: costs a moment, and never changes."""
        with self._lock:
            return Captured(self.config, self._held(), self._window.frames, self._clock())

    def fork(self) -> OnlineState:
        """Give a state that holds the same from here on and goes its own way: to see what samples would change.

        Returns: shares what never changes with this one, so that it costs a moment and little memory.
        """
        with self._lock:
            frames, content, newest = self._window.frames, self._held(), self._placing.newest.copy()
        return OnlineState._with(self.config, content, frames, self._clock, newest)

    def advance(self) -> None:
        """Close the steps that are over by now, and let go what is out of reach."""
        with self._lock:
            self._advance(instant_ms(self._clock()))

    @property
    def closed_to(self) -> datetime:
        """Time up to which steps have been closed so far (UTC)."""
        return datetime.fromtimestamp(self._stepper.closed_ms / 1000, UTC)

    def closes_at(self, at: datetime) -> bool:
        """Tell whether a push that comes then lets another step be closed."""
        return closed_at(instant_ms(at), self.config) != self._stepper.closed_ms

    def now(self) -> datetime:
        """Give the present by the state's clock (UTC)."""
        return self._clock().astimezone(UTC)

    @property
    def fleet(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The inventory and the events that are held; do not change them."""
        with self._lock:
            return self._inventory, self._events

    def knows(self, node: str, unit: str) -> bool:
        """Tell whether the inventory has a unit on a node, at any time."""
        return (node, unit) in self._known

    def samples_of(self, node: str, unit: str, after_ms: int) -> Block | None:
        """Give a unit's samples after a time, sorted by it; None: it has never sent one."""
        with self._lock:
            number = self._book.get((node, unit))
            if number < 0:
                return None
            waiting = [block.take(np.flatnonzero(block.unit == number)) for block in self._stepper.waiting]
            frames, channels = self._window.frames, self.config.channels
        units = np.array([number], dtype=np.int32)
        return read_frames(
            frames, units, channels, after_ms=after_ms, upto_ms=_FOR_EVER, further=settle(concat(waiting, channels))[0]
        )

    def _held(self) -> Held:
        waiting = self._stepper.all_waiting()
        return Held(
            inventory=self._inventory,
            events=self._events,
            pairs=list(self._book.pairs),
            totals=self._totals,
            order=self._order,
            waiting=waiting.take(np.arange(len(waiting))),  # the blocks themselves go on to be sorted in place
            units={name: array.copy() for name, array in self._stepper.units.items()},
            closed_ms=self._stepper.closed_ms,
        )

    def _view(self, t: datetime) -> View:
        now = self._clock()
        earliest = now - self.config.decision.every
        if not earliest <= t <= now:
            raise InputError(
                f"{t.isoformat()} is out of reach of the online state: it is {now.isoformat()}",
                "the decision time",
                f"Ask for a time from {earliest.isoformat()} on, or score a dataset.",
            )
        with self._lock:
            self._advance(instant_ms(now))
            return View(
                config=self.config,
                inventory=self._inventory,
                events=self._events,
                pairs=tuple(self._book.pairs),
                frames=self._window.frames,
                unclosed=self._stepper.unclosed(),
            )

    def _advance(self, now_ms: int) -> None:
        """Close the steps that are over, and let go what is out of reach."""
        self._placing.advance(closed_at(now_ms, self.config), now_ms)


def closed_at(now_ms: int, config: MatrixConfig) -> int:
    """Give the time up to which steps are closed at a moment, in milliseconds."""
    step = duration_ms(config.step)
    return (now_ms - duration_ms(config.features.delay)) // step * step
