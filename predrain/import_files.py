"""``predrain import``: Parquet, CSV and kernel logs into a validated dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from predrain.console import progress, show
from predrain.options import JsonOption, ParamsOption, read_params


def import_files(
    inventory: Annotated[Path, typer.Option(help="Who was where, when: Parquet or CSV. The one file that is needed.")],
    out: Annotated[Path, typer.Option(help="Folder of the dataset; an existing one is added to.")],
    samples: Annotated[
        list[Path] | None, typer.Option(help="Telemetry samples, Parquet or CSV: files, or folders of them.")
    ] = None,
    events: Annotated[
        list[Path] | None,
        typer.Option(help="Events (Parquet, CSV) or kernel logs (.log, .txt, .jsonl): files, or folders of them."),
    ] = None,
    jobs: Annotated[Path | None, typer.Option(help="What ran where: Parquet or CSV.")] = None,
    mapping: Annotated[
        Path | None, typer.Option(help="YAML file that maps your columns, units and time zone to predrain's.")
    ] = None,
    max_loss: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Share of a file's rows, or of a channel's values, that may be unusable before it is refused.",
        ),
    ] = 0.05,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read your own files into a dataset. Rows that cannot be used go to OUT/quarantine with the reason, counted.

    Example: predrain import --samples dcgm.parquet --events tickets.csv --inventory hosts.csv --out fleet
    """
    with progress("importing") as advance:
        from telemetry.dataset.channels import resolve_channels
        from telemetry.doctor.dataset_source import sparse_samples
        from telemetry.importing.event_runs import count_by_type
        from telemetry.importing.importer import import_dataset

        loaded = read_params(params)
        result = import_dataset(
            out,
            samples=samples or (),
            events=events or (),
            inventory=inventory,
            jobs=jobs,
            mapping=mapping,
            step=loaded.telemetry.step,
            channels=resolve_channels(loaded.channels),
            dedupe=loaded.events.dedupe,
            delay=loaded.features.delay,
            progress=advance,
            max_loss=max_loss,
        )
        meta = result.dataset.meta
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
                "notes": "; ".join(f"{note.what}. {note.do}" for note in sparse_samples(result.dataset)) or None,
            },
            as_json=as_json,
        )
