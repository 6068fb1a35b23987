"""``predrain import``: imports Parquet, CSV and kernel logs into a validated dataset."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from predrain.console import progress, show
from predrain.options import JsonOption, ParamsOption, read_params


def import_files(
    inventory: Annotated[
        Path | None,
        typer.Option(help="Inventory of GPUs (Parquet or CSV). Default: derived from the samples."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Dataset directory; rows are added to an existing dataset.")] = None,
    samples: Annotated[list[Path] | None, typer.Option(help="Samples (Parquet or CSV): files or folders.")] = None,
    events: Annotated[
        list[Path] | None,
        typer.Option(help="Events (Parquet, CSV) or kernel logs (.log, .txt, .jsonl): files or folders."),
    ] = None,
    jobs: Annotated[Path | None, typer.Option(help="Jobs with their nodes and times (Parquet or CSV).")] = None,
    mapping: Annotated[Path | None, typer.Option(help="Mapping file (YAML) for columns, units and time zone.")] = None,
    suggest_mapping: Annotated[
        Path | None,
        typer.Option(help="Write a draft mapping of unknown columns to this file instead of importing."),
    ] = None,
    max_loss: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Maximum share of unusable rows of a file, or values of a channel; above it, the import fails.",
        ),
    ] = 0.05,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Import files into a dataset. Invalid rows are counted and written to OUT/quarantine with a reason.

    Example: predrain import --samples dcgm.parquet --events tickets.csv --inventory hosts.csv --out fleet
    """
    tables = tables_of(samples, events, inventory, jobs)
    if suggest_mapping is not None:
        write_suggestion(tables, mapping, suggest_mapping, params)
        return
    if out is None:
        raise typer.BadParameter("give the folder of the dataset: --out")
    with progress("importing") as advance:
        from pipeline.sources import import_tables
        from telemetry.doctor.dataset_source import sparse_samples
        from telemetry.importing.event_runs import count_by_type

        result = import_tables(tables, out, read_params(params), mapping=mapping, max_loss=max_loss, progress=advance)
        meta, contradictions = result.dataset.meta, list(result.contradictions)
        if contradictions and not as_json:
            contradictions = [f"{len(contradictions)}: {'; '.join(contradictions[:5])}"]
        show(
            {
                "dataset": str(out),
                "changed": result.changed,
                "span": " to ".join(instant.isoformat() for instant in meta.span),
                "unit": meta.unit,
                "units": int(result.dataset.inventory()[meta.unit].nunique()),
                "samples": int(meta.counts["samples"]),
                "events": count_by_type(result.dataset.events()),
                "this import": dict(result.counts),
                "quarantined": dict(result.quarantined),
                "phrases": result.phrases,
                "contradictions": contradictions,
                "notes": "; ".join(f"{note.what}. {note.do}" for note in sparse_samples(result.dataset)) or None,
            },
            as_json=as_json,
            accounting=result.accounting,
        )


def tables_of(
    samples: list[Path] | None, events: list[Path] | None, inventory: Path | None, jobs: Path | None
) -> dict[str, list[Path]]:
    """Return the files by their section in a mapping."""
    tables = {"samples": samples or [], "events": events or []}
    return tables | {role: [path] for role, path in (("inventory", inventory), ("jobs", jobs)) if path is not None}


def write_suggestion(
    tables: Mapping[str, Sequence[Path]], mapping: Path | None, to: Path, params: list[Path] | None
) -> None:
    """Write a draft mapping of unknown columns, never over an existing file, and report what to review."""
    from foundation.errors import InputError
    from foundation.files import write_bytes
    from telemetry.dataset.channels import resolve_channels
    from telemetry.importing.mapping import load_mapping
    from telemetry.importing.suggestion.questions import Inquiry, find_questions

    inquiry = Inquiry(
        tables, mapping, *find_questions(tables, load_mapping(mapping), resolve_channels(read_params(params).channels))
    )
    if to.exists():
        raise InputError("the file already exists", str(to), "Give another name, or remove it.")
    if not inquiry.guesses and not inquiry.questions:
        sys.stderr.write("predrain: all columns are known, no mapping is needed\n")
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(to, inquiry.mapping_text().encode())
    sys.stderr.write(inquiry.report(to))
