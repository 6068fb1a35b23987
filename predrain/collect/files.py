"""``predrain collect openmetrics``, ``tickets`` and ``diagnostics``: sources that are files."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from predrain.console import progress, show
from predrain.options import DatasetOption, JsonOption, ParamsOption, SourceMappingOption, instant_option, read_params

if TYPE_CHECKING:
    from telemetry.accounting import Accounting
    from telemetry.collect.diagnostics import GpuNames


def openmetrics(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Series as OpenMetrics text, as JSON from `query_range`, VictoriaMetrics or OpenTelemetry, or as CSV "
            "from Grafana; plain, .gz or .zst.",
            metavar="FILE",
        ),
    ],
    dataset: DatasetOption,
    mapping: SourceMappingOption = None,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read dumps of a Prometheus database and exports of series. Each file is read only once.

    Repeat the command after an interruption. Sorting needs about 20 bytes per sample on the disk of the dataset.

    Example: predrain collect openmetrics march.om.gz --dataset fleet
    """
    from telemetry.accounting import Accounting
    from telemetry.collect.openmetrics import stage_dump
    from telemetry.collect.series.identity import NODE_LABEL_STATE, SeriesCatalogue
    from telemetry.collect.series.mapping import load_source_mapping
    from telemetry.dataset.channels import resolve_channels
    from telemetry.staging.folder import StagingFolder, staging_of

    loaded, accounting, results = read_params(params), Accounting(), []
    channels = resolve_channels(loaded.channels)
    catalogue = SeriesCatalogue(channels, load_source_mapping(mapping))
    staging = StagingFolder(staging_of(dataset), writer="openmetrics", channels=channels)
    catalogue.remember(staging.state(NODE_LABEL_STATE))

    def read(path: Path) -> None:
        with progress(path.name) as advance:
            result = stage_dump(
                path, staging, catalogue, accounting=accounting, delay=loaded.features.delay, progress=advance
            )
        results.append({"file": str(path), "staged before": result["files staged"] == 0, **result})

    with every_file(files, read, accounting):
        show({"files": results}, as_json=as_json, accounting=accounting)


def tickets(
    file: Annotated[
        Path,
        typer.Argument(help="CSV, Parquet or JSON with timestamp, type, and node or gpu; or a folder of such files."),
    ],
    dataset: DatasetOption,
    mapping: Annotated[
        Path | None,
        typer.Option(help="Mapping file (YAML) with an `events` section, as for `predrain import --mapping`."),
    ] = None,
    max_loss: Annotated[
        float,
        typer.Option(min=0, max=1, help="Maximum share of unusable rows; above it, the table is rejected."),
    ] = 0.05,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read events from a table of tickets. Reading a table again has no effect.

    Example: predrain collect tickets rma.csv --dataset fleet --mapping rma.yaml
    """
    from telemetry.accounting import Accounting
    from telemetry.collect.tickets import collect_tickets
    from telemetry.dataset.meta import META_NAME
    from telemetry.dataset.store import Dataset
    from telemetry.importing.files.sources import expand_sources
    from telemetry.importing.inventory import InstallationIndex
    from telemetry.importing.mapping import load_mapping
    from telemetry.staging.folder import StagingFolder, staging_of

    installations, rules = None, load_mapping(mapping)
    if (dataset / META_NAME).exists():
        known = Dataset.open(dataset)
        installations = InstallationIndex(known.inventory(), known.meta.unit, aliases=rules.nodes.aliases)
    staging, accounting = StagingFolder(staging_of(dataset), writer="tickets"), Accounting()
    summary: dict[str, Any] = {}
    files = expand_sources((file,), "tickets")

    def read(path: Path) -> None:
        result, account = collect_tickets(
            path,
            staging,
            mapping=rules.events,
            delay=read_params(params).features.delay,
            installations=installations,
            max_loss=max_loss,
        )
        accounting.add(account)
        summary.update({str(path): result} if len(files) > 1 else result)

    with every_file(files, read, accounting):
        show({"dataset": str(dataset), **summary}, as_json=as_json, accounting=accounting)


def diagnostics(
    files: Annotated[list[Path], typer.Argument(help="Files written by `dcgmi diag -j` (DCGM 3 or 4).")],
    dataset: DatasetOption,
    node: Annotated[str, typer.Option(help="Name of the tested node.")],
    gpus: Annotated[
        Path | None,
        typer.Option(
            help="Output of `nvidia-smi --query-gpu=index,uuid,serial --format=csv`. Default: the GPUs of "
            "the node in the dataset and its staging folder."
        ),
    ] = None,
    at: Annotated[
        str | None, typer.Option(help="End of the diagnostic (ISO 8601). Default: modification time of the file.")
    ] = None,
    may_skip: Annotated[
        list[str] | None,
        typer.Option(help="Test that may be skipped, such as eud. Repeatable."),
    ] = None,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read `dcgmi diag -j` results per GPU. Skipped and interrupted tests and warnings never count as passed.

    Example: predrain collect diagnostics diag.json --dataset fleet --node node07 --gpus gpus.csv
    """
    from collections import Counter

    from telemetry.accounting import Accounting
    from telemetry.collect.diagnostics import collect_diagnostics, read_gpu_names
    from telemetry.staging.folder import StagingFolder, staging_of

    end = None if at is None else instant_option(at, "--at")
    staging = StagingFolder(staging_of(dataset), writer="diagnostics")
    names = read_gpu_names(gpus) if gpus is not None else _known_gpus(dataset, staging.waiting("inventory"), node)
    delay = read_params(params).features.delay
    verdicts: Counter[str] = Counter()
    repeated: list[bool] = []
    accounting = Accounting()

    def read(path: Path) -> None:
        counts = collect_diagnostics(
            path,
            staging,
            node=node,
            names=names,
            delay=delay,
            end=end,
            may_skip=may_skip or (),
            accounting=accounting,
        )
        repeated.append(counts is None)
        verdicts.update(counts or {})

    with every_file(files, read, accounting):
        result = {"dataset": str(dataset), "verdicts": dict(verdicts), "already_written": sum(repeated)}
        show(result, as_json=as_json, accounting=accounting)


def _known_gpus(dataset: Path, observed: list[Path], node: str) -> "GpuNames":
    """Return a node's GPUs: those currently installed according to the dataset, and those observed since."""
    from functools import partial

    import pyarrow.parquet as pq

    from telemetry.collect.diagnostics import gpu_names
    from telemetry.dataset.meta import META_NAME
    from telemetry.dataset.store import Dataset
    from telemetry.identity.nodes import are_one_node

    rows: list[dict[str, object]] = []
    if (dataset / META_NAME).exists():
        installations = Dataset.open(dataset).inventory()
        installations = installations[
            installations["node"].map(partial(are_one_node, node)) & installations["removed_at"].isna()
        ]
        rows += installations[["gpu", "serial", "slot"]].to_dict("records")
    for path in observed:
        try:
            table = pq.read_table(path, columns=["gpu", "node", "serial", "slot"])
        except FileNotFoundError:  # compacted just now
            continue
        rows += [row for row in table.to_pylist() if are_one_node(row["node"], node)]
    return gpu_names(rows)


@contextmanager
def every_file(files: Sequence[Path], read: Callable[[Path], object], accounting: "Accounting") -> Iterator[None]:
    """Read every file, even if others are invalid, before a block that shows the results.

    Raises the first file's ``InputError`` after the block.
    """
    from foundation.errors import InputError

    errors: list[InputError] = []
    for path in files:
        try:
            read(path)
        except InputError as error:
            errors.append(error)
            accounting.take("files", 1, {"cannot be used": 1}, error)
        else:
            accounting.take("files", 1, {})
    yield
    if errors:
        raise errors[0]
