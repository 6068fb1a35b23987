"""One mixture of series, good and bad, by each way in: each counts every sample once, for the same reasons."""

import asyncio
import math
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.http import HttpResponse
from telemetry.accounting import Account, Accounting
from telemetry.collect.exporters import PageWatch, fleet_catalogue
from telemetry.collect.openmetrics import stage_dump
from telemetry.collect.remote_write.group_commit import ReceiverSettings
from telemetry.collect.remote_write.receiver import Receiver, application
from telemetry.collect.scraping.targets import Target
from telemetry.collect.series.batch import NO_NUMBER, SENTINEL
from telemetry.collect.series.identity import SeriesCatalogue
from telemetry.collect.series.mapping import SourceMapping
from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.series_source import observe_body
from telemetry.staging.folder import StagingFolder
from tests.telemetry.collect.remote_write.encoding import block, call, write_request

NOW = datetime(2026, 3, 1, tzinfo=UTC)
T0_S = int(NOW.timestamp())
TEMPERATURE, POWER = "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE"
WITHOUT_USE = {"acme_things": "no channel", "up": "known, and not used"}
BLANK = 9223372036854775794.0

Sample = tuple[str, int | None, float]
"""Metric, number of the GPU (None: no label names one), value."""


def labels_of(gpu: int | None) -> dict[str, str]:
    place = {} if gpu is None else {"UUID": f"GPU-{gpu:08d}", "gpu": str(gpu), "pci_bus_id": f"00000000:{gpu:02x}:00.0"}
    return {"Hostname": "n1", **place}


def expected(samples: list[Sample]) -> tuple[int, Counter[str]]:
    """Samples that are used, and the others by reason, one by one."""
    left_out: Counter[str] = Counter()
    for metric, gpu, value in samples:
        if metric in WITHOUT_USE:
            left_out[f"{metric}: {WITHOUT_USE[metric]}"] += 1
        elif gpu is None:
            left_out[f"{metric}: its labels do not name a GPU and a node"] += 1
        elif math.isnan(value):
            left_out[NO_NUMBER] += 1
        elif value == BLANK:
            left_out[SENTINEL] += 1
    return len(samples) - left_out.total(), left_out


def page(samples: list[Sample], stamp: str = "") -> str:
    lines = []
    for metric, gpu, value in samples:
        labels = ",".join(f'{name}="{text}"' for name, text in labels_of(gpu).items())
        lines.append(f"{metric}{{{labels}}} {value!r}{stamp}")
    return "\n".join(lines) + "\n"


def scraped(samples: list[Sample], _folder: Path) -> Account:
    accounting = Accounting()
    watch = PageWatch(Target("http://n1:9400/metrics", "n1"), fleet_catalogue(CATALOGUE, SourceMapping()), accounting)
    watch.read(HttpResponse(page(samples).encode(), {"content-length": "1"}, 0.1), NOW, 0.0)
    return accounting.tables["sample values"]


def dumped(samples: list[Sample], folder: Path) -> Account:
    accounting = Accounting()
    (folder / "d.om").write_text(page(samples, f" {T0_S}.0") + "# EOF\n")
    stage_dump(
        folder / "d.om", StagingFolder(folder / "live", writer="x"), SeriesCatalogue(CATALOGUE), accounting=accounting
    )
    return accounting.tables["sample values"]


def written(samples: list[Sample], folder: Path) -> Account:
    receiver = Receiver(
        StagingFolder(folder / "live", writer="x"), ReceiverSettings(flush_interval_s=0.0), clock=lambda: NOW
    )
    request = write_request(
        [({"__name__": metric, **labels_of(gpu)}, [(T0_S * 1000, value)]) for metric, gpu, value in samples]
    )

    async def send() -> None:
        answer = await call(application(receiver), "/api/v1/write", block(request))
        assert answer.status_code == 204
        await receiver.close()

    asyncio.run(send())
    return receiver.accounting.tables["sample values"]


def looked_at(samples: list[Sample], _folder: Path) -> Account:
    seen = observe_body(page(samples).encode(), SeriesCatalogue(CATALOGUE, default_node="n1"), "here", NOW)
    return seen.accounting.tables["sample values"]


SAMPLES = st.lists(
    st.tuples(
        st.sampled_from([TEMPERATURE, POWER, *WITHOUT_USE]),
        st.one_of(st.none(), st.integers(1, 9)),
        st.sampled_from([45.0, 46.5, math.nan, BLANK]),
    ),
    max_size=12,
    unique_by=lambda sample: sample[:2],
)


@settings(max_examples=12, deadline=None)
@given(SAMPLES)
def test_each_way_in_counts_every_sample_once_for_the_same_reasons(samples: list[Sample]) -> None:
    samples = [(TEMPERATURE, 0, 40.0), *samples]
    used, left_out = expected(samples)
    for way in (scraped, dumped, written, looked_at):
        with tempfile.TemporaryDirectory() as folder:
            account = way(samples, Path(folder))
        assert (way, account.read, account.used, account.left_out) == (way, len(samples), used, left_out)
