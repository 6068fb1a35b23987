"""``predrain collect compact``: merges staged rows into the dataset, once or at an interval."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from predrain.console import fail, progress, show, until_stopped
from predrain.options import JsonOption, ParamsOption, duration_option, read_params

if TYPE_CHECKING:
    from telemetry.staging.compaction import CompactResult


def compact(
    dataset: Annotated[Path, typer.Option(help="Dataset; created if missing.")],
    inventory: Annotated[
        Path | None, typer.Option(help="Known installations (Parquet or CSV); they override observations.")
    ] = None,
    interval: Annotated[
        str | None, typer.Option(help="Repeat at this interval (such as 1h) until SIGTERM. Default: once.")
    ] = None,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Merge staged rows into the dataset. Readers and collectors may run concurrently.

    Example: predrain collect compact --dataset fleet --interval 1h
    """
    pause = None if interval is None else duration_option(interval, "--interval")
    from foundation.errors import InputError

    failures = 0
    for _ in until_stopped(pause):
        try:
            _show(_compacted(dataset, inventory, params), dataset, as_json=as_json)
            failures = 0
        except InputError as error:
            if pause is None:
                raise
            # Another compaction, or a full disk: the staged files wait for the next round.
            failures += 1
            sys.stderr.write(f"predrain: error: {error} ({failures} consecutive failures; files wait)\n")
    if failures:
        fail("the last compaction failed; files wait in the staging folder")


def _compacted(dataset: Path, inventory: Path | None, params: list[Path] | None) -> "CompactResult":
    from foundation.errors import InputError
    from pipeline.sources import compact_staged
    from telemetry.staging.folder import staging_of

    if not dataset.exists() and not staging_of(dataset).exists():
        raise InputError(
            f"no dataset {dataset} and no staged files",
            str(staging_of(dataset)),
            "Check the path: use the same --dataset as the collectors.",
        )
    if dataset.name.endswith(".live"):
        raise InputError(f"{dataset} is a staging folder", "--dataset", f"Give {str(dataset).removesuffix('.live')}.")
    with progress("compacting") as advance:
        return compact_staged(dataset, read_params(params), inventory, advance)


def _show(result: "CompactResult", dataset: Path, *, as_json: bool) -> None:
    fields: dict[str, Any] = {"dataset": str(dataset), "compacted files": result.compacted}
    if result.waits_for:
        fields["waits for"] = result.waits_for
    if result.refused:
        fields["unreadable files in refused/"] = result.refused
    if result.meta is not None:
        fields["span"] = " to ".join(instant.isoformat() for instant in result.meta.span)
        fields["samples"] = int(result.meta.counts["samples"])
    if result.compacted:
        fields |= {"this compaction": result.counts, "quarantined": result.quarantined}
    show(fields, as_json=as_json, accounting=result.accounting)
