"""Pages as dcgm-exporter writes them, and what the tests put in the place of a network and of clocks."""

import asyncio
import contextlib
import selectors
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.http import HttpResponse as Page
from telemetry.accounting import Accounting
from telemetry.collect.exporters import PageWatch, fleet_catalogue
from telemetry.collect.outbox import RowBuffer
from telemetry.collect.scraping.collector import ScrapeCollector, ScrapeSettings
from telemetry.collect.scraping.targets import Target, parse_target
from telemetry.collect.series.mapping import SourceMapping
from telemetry.dataset.channels import CATALOGUE
from telemetry.staging.folder import StagingFolder

START = datetime(2026, 3, 1, tzinfo=UTC)


def exporter_page(node: str, tick: float, *, xids: dict[int, int] | None = None) -> str:
    """Return a page of two GPUs; its energy tells the tick."""
    lines = []
    for name, kind, value in (
        ("DCGM_FI_DEV_GPU_TEMP", "gauge", 40 + tick % 7),
        ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter", 1000 * tick),
        ("DCGM_FI_DEV_XID_ERRORS", "gauge", 0),
    ):
        lines += [f"# HELP {name} text", f"# TYPE {name} {kind}"]
        lines += [f"{name}{{{_labels(node, gpu)}}} {value}" for gpu in range(2)]
    for xid, count in (xids or {}).items():
        lines.append(f'DCGM_EXP_XID_ERRORS_COUNT{{{_labels(node, 0)},xid="{xid}"}} {count}')
    return "\n".join(lines) + "\n"


def _labels(node: str, gpu: int) -> str:
    return (
        f'gpu="{gpu}",UUID="GPU-{node}-{gpu}",pci_bus_id="00000000:{gpu:02X}:00.0",device="nvidia{gpu}",'
        f'modelName="NVIDIA H100",Hostname="{node}",DCGM_FI_DRIVER_VERSION="580.1"'
    )


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time jumps to the next timer as soon as there is nothing else to do."""

    def __init__(self) -> None:
        super().__init__(selectors.DefaultSelector())
        self._virtual_s = 1000.0
        select = self._selector.select

        def jump(timeout: float | None = None) -> Any:
            events = select(0)
            if not events and timeout is not None and timeout > 0:
                self._virtual_s += timeout
            return events

        self._selector.select = jump

    def time(self) -> float:
        return self._virtual_s


def fleet_time() -> datetime:
    return START + timedelta(seconds=asyncio.get_running_loop().time() - 1000.0)


async def inline(work: Callable[..., Any], *given: object) -> Any:
    return work(*given)


Answer = Callable[[str, int], str | Exception]


class FakeFetcher:
    """Answers by a function of the URL and the number of its scrape."""

    def __init__(self, answer: Answer, took_s: float = 0.01) -> None:
        self.answer = answer
        self.took_s = took_s
        self.calls: list[tuple[float, str]] = []
        self.number: dict[str, int] = {}

    async def fetch(self, url: str) -> Page:
        self.calls.append((asyncio.get_running_loop().time(), url))
        number = self.number[url] = self.number.get(url, -1) + 1
        await asyncio.sleep(self.took_s)
        answer = self.answer(url, number)
        if isinstance(answer, Exception):
            raise answer
        return Page(answer.encode(), {"content-length": "0", "date": format_datetime(fleet_time())}, self.took_s)


def make_collector(
    root: Path,
    fetcher: Any,
    targets: list[str | Target],
    *,
    staging: Any = None,
    settings: ScrapeSettings | None = None,
) -> ScrapeCollector:
    staging = staging or StagingFolder(root, writer="exporters", channels=CATALOGUE)
    made = [target if isinstance(target, Target) else parse_target(target, "test") for target in targets]
    settings, accounting = settings or ScrapeSettings(), Accounting()
    catalogue = fleet_catalogue(CATALOGUE, SourceMapping())
    return ScrapeCollector(
        read_targets=lambda: made,
        fetch=fetcher.fetch,
        watch=lambda target: PageWatch(target, catalogue, accounting),
        sink=RowBuffer(staging, accounting, max_rows=settings.max_buffered_rows),
        settings=settings,
        accounting=accounting,
        clock=fleet_time,
        run_blocking=inline,
    )


def run_virtual(work: Callable[[], Awaitable[Any]]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work())


async def run_for(collector: ScrapeCollector, seconds: float) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, stop.set)
    await collector.run(stop)


def collect(
    root: Path, answer: Answer | FakeFetcher, seconds: float, targets: Sequence[str] = ("n1",), **more: Any
) -> ScrapeCollector:
    """Scrape for some virtual seconds, or once; give the collector, ended."""

    async def work() -> ScrapeCollector:
        fetcher = answer if isinstance(answer, FakeFetcher) else FakeFetcher(answer)
        collector = make_collector(root, fetcher, list(targets), **more)
        with contextlib.suppress(InputError):  # nothing could be scraped, or written
            await (run_for(collector, seconds) if seconds else collector.once())
        return collector

    return run_virtual(work)
