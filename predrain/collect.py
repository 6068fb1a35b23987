"""``predrain collect``: telemetry from where it really is, one file a source."""

from __future__ import annotations

import typer

from predrain import (
    collect_compact,
    collect_diagnostics,
    collect_exporters,
    collect_kernel_log,
    collect_kubernetes,
    collect_nvml,
    collect_openmetrics,
    collect_prometheus,
    collect_receive,
    collect_slurm,
    collect_tickets,
)

SOURCES = typer.Typer(
    name="collect",
    help="Gather telemetry, events and jobs from where they are, and fold them into a dataset.",
    no_args_is_help=True,
)

collect_compact.add_to(SOURCES)
collect_prometheus.add_to(SOURCES)
collect_openmetrics.add_to(SOURCES)
collect_exporters.add_to(SOURCES)
collect_receive.add_to(SOURCES)
collect_nvml.add_to(SOURCES)
collect_kernel_log.add_to(SOURCES)
collect_slurm.add_to(SOURCES)
collect_kubernetes.add_to(SOURCES)
collect_tickets.add_to(SOURCES)
collect_diagnostics.add_to(SOURCES)


def add_to(app: typer.Typer) -> None:
    """Register the group of verbs."""
    app.add_typer(SOURCES)
