"""How many exporter pages one core reads a second, beside prometheus_client's parser.

Run it alone: ``python benchmarks/parse_exporter_page.py [--quick]``. The pages are those of a node with 8 GPUs, with
the labels that dcgm-exporter writes in Kubernetes: about 57 kB. Each page differs from the one before in its numbers,
as on a node at work. Both sides read the same pages, which is checked sample by sample before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from telemetry.channels import resolve_channels
from telemetry.collect.series.identity import SeriesCatalogue
from telemetry.exposition.page import PageReader
from telemetry.exposition.scanner import Scanner

REQUIRED: Final = 50.0
AIM: Final = f"{REQUIRED:g} times prometheus_client"
"""How many times as fast as the peer the scanner must be."""

_GPUS = 8
# The metrics of dcgm-exporter's stock counter file: name, type, lowest and highest number, decimals.
_METRICS = (
    ("DCGM_FI_DEV_SM_CLOCK", "gauge", 210, 1980, 0),
    ("DCGM_FI_DEV_MEM_CLOCK", "gauge", 405, 2619, 0),
    ("DCGM_FI_DEV_MEMORY_TEMP", "gauge", 30, 95, 0),
    ("DCGM_FI_DEV_GPU_TEMP", "gauge", 30, 85, 0),
    ("DCGM_FI_DEV_POWER_USAGE", "gauge", 70, 700, 6),
    ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter", 10**9, 10**13, 0),
    ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "counter", 0, 3, 0),
    ("DCGM_FI_DEV_GPU_UTIL", "gauge", 0, 100, 0),
    ("DCGM_FI_DEV_MEM_COPY_UTIL", "gauge", 0, 100, 0),
    ("DCGM_FI_DEV_ENC_UTIL", "gauge", 0, 1, 0),
    ("DCGM_FI_DEV_DEC_UTIL", "gauge", 0, 1, 0),
    ("DCGM_FI_DEV_XID_ERRORS", "gauge", 0, 1, 0),
    ("DCGM_FI_DEV_FB_FREE", "gauge", 100, 80000, 0),
    ("DCGM_FI_DEV_FB_USED", "gauge", 100, 80000, 0),
    ("DCGM_FI_DEV_FB_RESERVED", "gauge", 500, 501, 0),
    ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "counter", 0, 3, 0),
    ("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "counter", 0, 3, 0),
    ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "gauge", 0, 1, 0),
    ("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", "counter", 0, 10**9, 0),
    ("DCGM_FI_DEV_VGPU_LICENSE_STATUS", "gauge", 0, 1, 0),
    ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "gauge", 0, 1, 6),
    ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "gauge", 0, 1, 6),
    ("DCGM_FI_PROF_DRAM_ACTIVE", "gauge", 0, 1, 6),
    ("DCGM_FI_PROF_PCIE_TX_BYTES", "gauge", 0, 10**9, 0),
    ("DCGM_FI_PROF_PCIE_RX_BYTES", "gauge", 0, 10**9, 0),
)


def exporter_page(seed: int, node: str = "gpu-node-0417") -> bytes:
    """Return a page of a node with 8 GPUs; the seed draws the numbers only."""
    draw = random.Random(seed)  # noqa: S311 - numbers of a benchmark, not of a secret
    lines = []
    for metric, kind, low, high, decimals in _METRICS:
        lines += [f"# HELP {metric} As the counter file describes it.", f"# TYPE {metric} {kind}"]
        for gpu in range(_GPUS):
            number = f"{draw.uniform(low, high):.6f}" if decimals else str(draw.randint(low, high))
            lines.append(
                f'{metric}{{gpu="{gpu}",UUID="GPU-8f3c1a7{gpu}-5b2d-4e6f-9a01-c4d27be3f51{gpu}",'
                f'pci_bus_id="00000000:{16 + gpu:02X}:00.0",device="nvidia{gpu}",modelName="NVIDIA H100 80GB HBM3",'
                f'Hostname="{node}",DCGM_FI_DRIVER_VERSION="550.54.15",container="train",namespace="research",'
                f'pod="llm-{gpu}"}} {number}'
            )
    return "\n".join([*lines, ""]).encode()


def by_peer(page: bytes) -> list[tuple[str, dict[str, str], float]]:
    """Read a page with prometheus_client, undoing the ``_total`` that it adds to the names of counters."""
    samples = []
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            added = family.type == "counter" and sample.name == f"{family.name}_total"
            written = any(sample.name == metric for metric, *_ in _METRICS)
            samples.append((family.name if added and not written else sample.name, sample.labels, float(sample.value)))
    return samples


def by_scanner(scanner: Scanner, page: bytes) -> list[tuple[str, dict[str, str], float]]:
    """Read a page with ours, in the same form."""
    scanned = scanner.scan(page)
    return [(*scanner.labels(key), value) for key, value in zip(scanned.keys, scanned.values.tolist(), strict=True)]


def seconds_a_page(readers: dict[str, tuple[Callable[[bytes], object], int]], rounds: int) -> dict[str, float]:
    """Return each reader's best time a page.

    The readers take turns, so that a slow moment of the machine meets all of them; ``readers`` maps a name to what
    reads a page and how many pages it reads in a round.
    """
    best = dict.fromkeys(readers, math.inf)
    for turn in range(rounds):
        for name, (read, count) in readers.items():
            pages = [exporter_page(turn * 1000 + number) for number in range(count)]
            start = time.perf_counter()
            for page in pages:
                read(page)
            best[name] = min(best[name], (time.perf_counter() - start) / count)
    return best


def main() -> None:
    """Check, measure, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 4 if parser.parse_args().quick else 20
    pages = [exporter_page(seed) for seed in range(20)]
    checked = Scanner()
    for number, page in enumerate(pages):
        if by_scanner(checked, page) != by_peer(page):
            sys.exit(f"page {number} is not read as prometheus_client reads it: nothing is measured")
    catalogue = SeriesCatalogue(resolve_channels({}))
    reader = PageReader(catalogue)
    if reader.read(pages[0], 0).samples.num_rows != _GPUS:
        sys.exit(f"the page does not become {_GPUS} rows: nothing is measured")
    figures = seconds_a_page(
        {
            "scanner": (checked.scan, 10),
            "scanner, first page": (lambda page: Scanner().scan(page), 3),
            "page to rows": (lambda page: reader.read(page, 0), 10),
            "page to rows, first page": (lambda page: PageReader(catalogue).read(page, 0), 3),
            "prometheus_client": (lambda page: list(text_string_to_metric_families(page.decode())), 3),
        },
        rounds,
    )
    peer = figures["prometheus_client"]
    print(f"a page of {len(pages[0]):,} bytes, {len(_METRICS) * _GPUS} samples")
    print(f"{'reader':<26}{'pages/s':>12}{'us/page':>12}{'ratio':>10}")
    for name, seconds in figures.items():
        print(f"{name:<26}{1 / seconds:>12,.0f}{seconds * 1e6:>12,.0f}{peer / seconds:>10.1f}")
    ratio = peer / figures["scanner"]
    met = ratio >= REQUIRED
    line = {
        "name": "parse_exporter_page",
        "value": round(1 / figures["scanner"]),
        "unit": "pages/s",
        "peer": "prometheus_client",
        "ratio": round(ratio, 1),
        "limit_share": None,
        "checked": True,
        "aim": AIM,
        "met": met,
    }
    print(json.dumps(line))
    if not met:
        sys.exit(f"the scanner is {ratio:.1f} times as fast as prometheus_client; it must be {REQUIRED:.0f} times")


if __name__ == "__main__":
    main()
