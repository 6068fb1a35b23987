"""``predrain collect diagnostics``: verdicts of ``dcgmi diag`` on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from predrain.collect.options import DatasetOption, every_file
from predrain.console import show
from predrain.options import JsonOption, ParamsOption, instant_option, read_params

if TYPE_CHECKING:
    from telemetry.collect.diagnostics import GpuNames


def diagnostics(
    files: Annotated[list[Path], typer.Argument(help="Output of `dcgmi diag -r LEVEL -j`, DCGM 3 or 4.")],
    dataset: DatasetOption,
    node: Annotated[str, typer.Option(help="The node that was tested.")],
    gpus: Annotated[
        Path | None,
        typer.Option(
            help="CSV of `nvidia-smi --query-gpu=index,uuid,serial --format=csv`.  Default: what the dataset and its "
            "landing folder know of the node."
        ),
    ] = None,
    at: Annotated[
        str | None, typer.Option(help="When the run ended (ISO 8601).  Default: when the file was written.")
    ] = None,
    may_skip: Annotated[
        list[str] | None,
        typer.Option(help="A test that does not count when skipped, such as eud; may be repeated."),
    ] = None,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write pass, fail or inconclusive for each GPU; what was skipped, warned or cut short is never a pass.

    Example: predrain collect diagnostics diag.json --dataset fleet --node node07 --gpus gpus.csv
    """
    from collections import Counter

    from telemetry.accounting import Accounting
    from telemetry.collect.diagnostics import collect_diagnostics, read_gpu_names
    from telemetry.landing.folder import Landing, landing_of

    when = None if at is None else instant_option(at, "--at")
    landing = Landing(landing_of(dataset), writer="diagnostics")
    names = read_gpu_names(gpus) if gpus is not None else _known_gpus(dataset, landing.waiting("inventory"), node)
    delay = read_params(params).features.delay
    verdicts: Counter[str] = Counter()
    repeated, accounting = list[bool](), Accounting()

    def read(path: Path) -> None:
        counts = collect_diagnostics(
            path, landing, node=node, names=names, delay=delay, at=when, may_skip=may_skip or (), accounting=accounting
        )
        repeated.append(counts is None)
        verdicts.update(counts or {})

    with every_file(files, read, accounting):
        result = {"dataset": str(dataset), "verdicts": dict(verdicts), "already_written": sum(repeated)}
        show(result, as_json=as_json, accounting=accounting)


def _known_gpus(dataset: Path, observed: list[Path], node: str) -> GpuNames:
    """Return the GPUs of a node that the dataset holds now, and those seen there since."""
    from functools import partial

    import pyarrow.parquet as pq

    from telemetry.collect.diagnostics import gpu_names
    from telemetry.dataset.meta import META_NAME
    from telemetry.dataset.store import Dataset
    from telemetry.identity.nodes import are_one_node

    rows: list[dict[str, object]] = []
    if (dataset / META_NAME).exists():
        stays = Dataset.open(dataset).inventory()
        stays = stays[stays["node"].map(partial(are_one_node, node)) & stays["removed_at"].isna()]
        rows += stays[["gpu", "serial", "slot"]].to_dict("records")
    for path in observed:
        try:
            seen = pq.read_table(path, columns=["gpu", "node", "serial", "slot"])
        except FileNotFoundError:  # folded just now
            continue
        rows += [row for row in seen.to_pylist() if are_one_node(row["node"], node)]
    return gpu_names(rows)
