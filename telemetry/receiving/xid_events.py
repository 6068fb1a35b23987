"""XID events from the exporter's counts as they arrive by remote write."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from telemetry.atomic import write_bytes
from telemetry.collect.series.counted import Told, watched
from telemetry.collect.series.identity import Series, XidCount
from telemetry.collect.series.xid_counts import XidCounts
from telemetry.errors import InputError
from telemetry.landing.folder import Landing
from telemetry.landing.tables import LANDED_EVENTS
from telemetry.schema import INSTANT

_LOG = logging.getLogger(__name__)
_STATE = "receive-xid-counts.json"
_SAVE_EVERY = timedelta(minutes=1)
# Far less than the time in which a count is remembered: a restart then neither repeats nor misses an XID.


class XidEvents:
    """Follows the counts and lands their rises; used by one thread at a time.

    ``clock``: aware now: an event is known when it is read here.
    """

    def __init__(self, landing: Landing, clock: Callable[[], datetime]) -> None:
        self._landing = landing
        self._clock = clock
        self._counts: XidCounts | None = None
        self._waiting: list[pa.Table] = []
        self._saved = clock()
        self._changed = False

    def land(self, told: Told[Series], counts: Told[XidCount]) -> None:
        """Take the samples of one group of requests.

        Raises ``InputError`` if the disk is full; the events are kept and land with the next group.
        """
        follower = self._follower()
        events = follower.follow(counts.series, counts.index, counts.ms, counts.values, watched=watched(told))
        self._changed = True
        now = self._clock()
        if events.num_rows:
            instant = pa.scalar(now, INSTANT)
            at = events.column("timestamp")
            known = pc.if_else(pc.greater(at, instant), at, instant)
            self._waiting.append(events.set_column(LANDED_EVENTS.get_field_index("known_at"), "known_at", known))
        if self._waiting:
            self._landing.land("events", pa.concat_tables(self._waiting))
            self._waiting = []
            self.save()
        elif now - self._saved > _SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Write down what a restarted receiver must know."""
        self._saved = self._clock()
        if self._counts is not None and self._changed:
            write_bytes(self._landing.state(_STATE), json.dumps(self._counts.as_state()).encode())
            self._changed = False

    def _follower(self) -> XidCounts:
        if self._counts is None:
            state: Any = None
            try:
                state = json.loads(self._landing.state(_STATE).read_text(encoding="utf-8"))
            except FileNotFoundError:
                pass
            except (OSError, ValueError, InputError) as error:
                _LOG.warning("the XID counts of before cannot be read, they begin anew: %s", error)
            self._counts = XidCounts(timedelta(0), state)
        return self._counts
