"""The newest row of each GPU: a GPU's rows leave this process in the order of time, and never two at one time."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

_MAX_KEPT = 500_000


class NewestRows:
    """Remembers the newest time of each (gpu, mig_instance).

    Attributes
    ----------
    dropped : int
        Rows left out because they were not newer.
    """

    def __init__(self) -> None:
        self._newest_ms: dict[tuple[str | None, str | None, str | None], int] = {}
        self.dropped = 0

    def keep(self, samples: pa.Table) -> pa.Table:
        """Return the rows that are newer than all before of their GPU; count the others.

        Parameters
        ----------
        samples : pyarrow.Table
            Landed samples, sorted by (gpu, timestamp).

        Notes
        -----
        Half a million GPUs are remembered; past that the half that was silent for longest is forgotten, so that pages
        with ever new GPUs cannot fill the memory.
        """
        times = samples.column("timestamp").cast(pa.int64()).to_pylist()
        gpus = samples.column("gpu").to_pylist()
        instances = samples.column("mig_instance").to_pylist() if "mig_instance" in samples.column_names else None
        nodes = samples.column("node").to_pylist()
        newest = self._newest_ms
        old: list[int] = []
        for number, (ms, gpu) in enumerate(zip(times, gpus, strict=True)):
            # A node without GPUs is known by its name.
            key = (gpu, None if instances is None else instances[number], nodes[number] if gpu is None else None)
            if ms > newest.get(key, -1):
                newest[key] = ms
            else:
                old.append(number)
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
