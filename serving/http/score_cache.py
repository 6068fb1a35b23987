"""In-memory cache of the newest scores, refreshed by a polling thread."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.files import stamp_of
from foundation.running import Poller
from foundation.server.problems import RequestRefused
from serving.scores.reading import (
    FACTS,
    LATEST,
    FleetFacts,
    ScoredFleet,
    read_facts,
    read_json,
    read_pointer,
    read_scores,
)

_LOG = logging.getLogger(__name__)
_RETRY_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Served:
    """Snapshot that requests are served from; replaced as a whole.

    ``fleet``: None: no scores have been read yet.
    ``error``: why newer scores are not served; None: the newest are.
    ``status``: ``status.json`` of batch scoring; empty if unreadable.
    """

    fleet: ScoredFleet | None = None
    error: str | None = "the scores have not been read yet"
    status: Mapping[str, Any] = field(default_factory=dict)
    facts: FleetFacts = field(default_factory=FleetFacts)


class ScoreCache:
    """Reads the scores of a folder whenever they change.

    ``folder``: output of ``predrain score --out``; may not exist yet.
    ``served``: immutable; read it once per request.
    """

    def __init__(self, folder: Path, poll_s: float = 1.0) -> None:
        self.served = Served()
        self.loads = 0
        self.failures = 0
        self.poller = Poller("scores", self.refresh, poll_s)
        self._folder = folder
        self._last_stamp: object = None
        self._seen_facts: object = None
        self._wait = 0

    def fleet(self, retry_after_s: int) -> ScoredFleet:
        """Return the current scores; raises ``RequestRefused`` (503) if there are none."""
        served = self.served
        if served.fleet is None:
            detail = f"no scores can be served: {served.error}"
            raise RequestRefused(503, detail, "scores", retry_after_s=retry_after_s)
        return served.fleet

    def refresh(self) -> bool:
        """Read the scores if they have changed since the last poll.

        Returns: whether other scores are served now. Unreadable scores only set ``served.error``, and are retried
        when they change or after ten polls.
        """
        self._refresh_status()
        stamp = self._stamp()
        self._wait -= 1
        if stamp == self._last_stamp and (self.served.error is None or self._wait > 0):
            return False
        self._last_stamp, self._wait = stamp, _RETRY_ROUNDS
        try:
            scores = read_scores(self._folder)
        except InputError as error:
            if str(error) != self.served.error:
                fleet = self.served.fleet
                suffix = "" if fleet is None else f"; decision {fleet.scores.decision} stays in use"
                _LOG.warning("newer scores cannot be served: %s%s", error, suffix)
            self.failures += 1
            self.served = replace(self.served, error=str(error))
            return False
        self.served = replace(self.served, fleet=ScoredFleet(scores), error=None)
        self.loads += 1
        _LOG.info("serving decision %s: %d units on %d nodes", scores.decision, len(scores.units), len(scores.nodes))
        return True

    def _refresh_status(self) -> None:
        """Reload ``status.json`` and ``fleet.json`` if they have changed."""
        status = read_json(self._folder / "status.json") or {}
        if status != self.served.status:
            self.served = replace(self.served, status=status)
        stamp = stamp_of(self._folder / FACTS)
        if stamp != self._seen_facts:
            self._seen_facts = stamp
            self.served = replace(self.served, facts=read_facts(self._folder))

    def _stamp(self) -> object:
        """Return a value that changes with the scores: stamps of the pointer and the file it points to."""
        try:
            records = self._folder / "decisions" / read_pointer(self._folder) / "risks.jsonl"
        except InputError as error:
            return stamp_of(self._folder / LATEST), str(error)
        return stamp_of(self._folder / LATEST), records, stamp_of(records)
