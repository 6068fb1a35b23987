"""The newest row of each GPU: a GPU's rows leave this process in the order of time, and never two at one time."""

from __future__ import annotations

import logging

import numpy as np
import pyarrow as pa

_log = logging.getLogger(__name__)

_MAX_KEPT = 500_000
_FAR_AHEAD_MS = 3_600_000
# No exporter's clock is an hour off for long: who was that far ahead and is no more has been set right.


class NewestRows:
    """Remembers the newest time of each (gpu, mig_instance).

    ``dropped``: rows left out because they were not newer.
    ``forgotten``: GPUs whose newest time was forgotten because it lay in the future.
    """

    def __init__(self) -> None:
        self._newest_ms: dict[tuple[str | None, str | None, str | None], int] = {}
        self.dropped = 0
        self.forgotten = 0
        self._has_told = False

    def forget_after(self, latest_ms: int) -> int:
        """Forget the newest times after ``latest_ms`` (milliseconds since 1970 UTC); return of how many GPUs."""
        kept = {key: ms for key, ms in self._newest_ms.items() if ms <= latest_ms}
        forgotten = len(self._newest_ms) - len(kept)
        self._newest_ms = kept
        self.forgotten += forgotten
        return forgotten

    def keep(self, samples: pa.Table, now_ms: int | None = None) -> pa.Table:
        """Return the rows that are newer than all before of their GPU; count the others.

        ``samples``: landed samples, sorted by (gpu, timestamp).
        ``now_ms``: the wall clock, milliseconds since 1970 UTC. A newest time more than an hour after it does not hold
        against a row that is not as far ahead: the clock that stamped it (an exporter may stamp its own lines) was
        wrong.

        Half a million GPUs are remembered; past that the half that was silent for longest is forgotten, so that pages
        with ever new GPUs cannot fill the memory.
        """
        times = samples.column("timestamp").cast(pa.int64()).to_pylist()
        gpus = samples.column("gpu").to_pylist()
        instances = samples.column("mig_instance").to_pylist() if "mig_instance" in samples.column_names else None
        nodes = samples.column("node").to_pylist()
        newest = self._newest_ms
        old: list[int] = []
        latest_ms = None if now_ms is None else now_ms + _FAR_AHEAD_MS
        forgotten = 0
        for number, (ms, gpu) in enumerate(zip(times, gpus, strict=True)):
            # A node without GPUs is known by its name.
            key = (gpu, None if instances is None else instances[number], nodes[number] if gpu is None else None)
            held = newest.get(key, -1)
            if ms > held:
                newest[key] = ms
            elif latest_ms is not None and ms <= latest_ms < held:
                newest[key] = ms
                forgotten += 1
            else:
                old.append(number)
        if forgotten:
            if not self._has_told:
                self._has_told = True
                _log.warning(
                    "rows of %s were stamped over an hour in the future; rows of now are taken again",
                    nodes[0],
                )
            self.forgotten += forgotten
        if len(newest) > _MAX_KEPT:
            self._sweep()
        if not old:
            return samples
        self.dropped += len(old)
        mask = np.ones(len(times), np.bool_)
        mask[old] = False
        return samples.filter(pa.array(mask))

    def _sweep(self) -> None:
        kept = sorted(self._newest_ms.items(), key=lambda item: item[1])[_MAX_KEPT // 2 :]
        self._newest_ms = dict(kept)
