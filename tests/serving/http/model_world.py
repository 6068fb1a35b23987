"""The service with a small model, and Arrow bodies for it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from models.bundle.store import save_bundle
from serving.http.limits import ServiceSettings
from tests.models.small_models import COLUMNS, fitted_models
from tests.serving.http.world import Running, running, small_fleet
from tests.serving.score_folder import write_scores
from tests.waiting import wait

ARROW = "application/vnd.apache.arrow.stream"
NAMES = [column.name for column in COLUMNS]


@contextlib.contextmanager
def scoring(folder: Path, *, tokens: Path | None = None, **limits: int) -> Iterator[Running]:
    """Serve a small fleet and a small bundle until the block ends."""
    write_scores(folder / "scores", small_fleet())
    save_bundle(folder / "bundle", fitted_models(), {"profile": "cascade", "params": {"labels": {"horizon": "24h"}}})
    settings = ServiceSettings(**limits)
    with running(folder / "scores", model=folder / "bundle", tokens=tokens, settings=settings) as started:
        wait(lambda: started.service.holder.model is not None, 60)
        yield started


def stream_of(table: pa.Table, rows_a_batch: int | None = None) -> bytes:
    """A table as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_a_batch)
    return bytes(sink.getvalue())
