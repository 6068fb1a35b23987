"""How an online state begins: from its snapshot where that is sound, and from a dataset where there is one."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from features.errors import InputError
from features.matrix_meta import MatrixConfig
from features.pieces import epoch_ms
from features.service import instant_ms
from serving.freshness import sample_columns
from serving.live_config import ReadBundle, live_config
from serving.online.journal import Journal
from serving.online.replaying import replay
from serving.online.snapshot import META, read_snapshot
from serving.online.state import OnlineState
from telemetry.channel import Channel
from telemetry.dataset import Dataset

_LOG = logging.getLogger(__name__)
Clock = Callable[[], datetime]


@dataclass(frozen=True, slots=True)
class SampledAs:
    """How a state's samples are laid out, in the words of a dataset's description."""

    unit: Literal["gpu", "node"]
    step: timedelta
    span: tuple[datetime, datetime]
    channels: dict[str, Channel]
    digest: str

    @classmethod
    def of(cls, config: MatrixConfig) -> SampledAs:
        """Take it from the settings of rows."""
        return cls(config.unit, config.step, config.span, dict(config.channels), config.dataset_digest)


@dataclass(frozen=True, slots=True)
class Beginning:
    """A state that has begun.

    ``restored``: whether it goes on from a snapshot.
    ``refused``: why the snapshot that was there is not used; it has been set aside.
    ``replayed``: samples that were read from the dataset.
    ``arrived``: pushes that were read from the journal.
    ``dataset_to``: end of the dataset; None: there is none.
    """

    state: OnlineState
    restored: bool
    refused: str | None
    replayed: int
    arrived: int
    dataset_to: datetime | None


def begin(
    folder: Path,
    dataset: Path | None,
    bundle: ReadBundle,
    clock: Clock,
    journal: Journal | None = None,
    end: int | None = None,
) -> Beginning:
    """Begin an online state.

    ``folder``: of the snapshot; need not exist.
    ``dataset``: gives inventory, events, and the samples that the snapshot does not have.
    ``end``: number of the first of its files that is not to be read; default: all are.
    Returns: a snapshot that cannot be trusted, or was made for another kind of bundle, has been renamed to a sibling
    that ends in ``.refused`` (an older one there is removed).
    Raises ``InputError`` if there is neither a usable snapshot nor a dataset, or the dataset does not fit the bundle.
    """
    held = None if dataset is None else Dataset.open(dataset)
    state, first, refused = _restored(folder, held, bundle, clock)
    restored = state is not None
    if state is None:
        if held is None:
            raise InputError(
                "there is no snapshot to go on from, and nothing says which GPUs there are",
                "--state without --dataset",
                "Give --dataset FOLDER: its inventory and events are needed.",
            )
        config = live_config(bundle, held.meta)
        earliest = None if journal is None else next(journal.arrivals(first, end), None)
        since = None if earliest is None else earliest.at
        state = OnlineState.of(config, held.inventory(), held.events(), clock, since)
    elif held is not None:
        take_fleet(state, held)
    gap = _gap(state) if restored else None
    arrived = 0 if journal is None else replay(state, journal, first, end)
    replayed = 0 if held is None else fill(state, held, since=gap, fleet=False)
    return Beginning(state, restored, refused, replayed, arrived, None if held is None else held.meta.span[1])


def take_fleet(state: OnlineState, dataset: Dataset) -> None:
    """Take up a dataset's inventory and events."""
    state.push_inventory(dataset.inventory())
    state.push_events(dataset.events())


def fill(state: OnlineState, dataset: Dataset, *, since: datetime | None = None, fleet: bool = True) -> int:
    """Take up what a dataset has and a state has not.

    ``since``: only samples after this time; default: all that are looked back on.
    Returns: samples read again, whether the state had them or not.
    """
    if fleet:
        take_fleet(state, dataset)
    state.advance()  # what waits in a snapshot comes before what is read again
    oldest = state.now() - state.look_back
    first = oldest if since is None else max(since, oldest)
    if not dataset.meta.channels or dataset.meta.span[1] <= first:
        return 0
    columns = [*sample_columns(state.config, dataset.meta.channels), *(["sample_count"] * dataset.meta.sample_count)]
    taken = 0
    for bucket in dataset.buckets():
        table = dataset.read_bucket(bucket, columns, since=first)
        table = table.filter(pa.array(np.asarray(epoch_ms(table.column("timestamp")) > instant_ms(first))))
        if table.num_rows:
            state.push(table, replayed=True)
            state.tidy()
            taken += table.num_rows
    return taken


def _restored(
    folder: Path, dataset: Dataset | None, bundle: ReadBundle, clock: Clock
) -> tuple[OnlineState | None, int, str | None]:
    try:
        there = (folder / META).exists() or any(folder.iterdir())
    except OSError:
        there = False
    if not there:
        return None, 0, None
    try:
        snapshot = read_snapshot(folder)
        state = OnlineState.resume(snapshot, clock)
        meta = SampledAs.of(state.config) if dataset is None else dataset.meta
        state.serve(live_config(bundle, meta))
    except InputError as error:
        if dataset is None:  # setting it aside would leave nothing to begin with
            raise
        aside = folder.with_name(f"{folder.name}.refused")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        _LOG.warning("the snapshot of the online state is set aside as %s: %s", aside, error)
        return None, 0, f"{error}; it is set aside as {aside}"
    return state, snapshot.journal, None


def _gap(state: OnlineState) -> datetime:
    """Give the time since when a restored state may lack samples: its last closed step, and late ones before it."""
    return state.closed_to - state.config.decision.every
