"""The group of verbs ``predrain collect``."""

import typer

from predrain.collect.compact import compact
from predrain.collect.exporters import exporters, gpud
from predrain.collect.files import diagnostics, openmetrics, tickets
from predrain.collect.node import kernel_log, nvml
from predrain.collect.prometheus import collect_prometheus
from predrain.collect.receive import receive
from predrain.collect.schedulers import collect_kubernetes, slurm

SOURCES = typer.Typer(
    name="collect",
    help="Collect telemetry, events and jobs from their sources into a dataset.\n\n"
    "Example: predrain collect exporters --targets gpu-nodes.txt --dataset fleet",
    no_args_is_help=True,
)

SOURCES.command("compact")(compact)
SOURCES.command("prometheus")(collect_prometheus)
SOURCES.command("openmetrics")(openmetrics)
SOURCES.command("exporters")(exporters)
SOURCES.command("receive")(receive)
SOURCES.command("nvml")(nvml)
SOURCES.command("kernel-log")(kernel_log)
SOURCES.command("slurm")(slurm)
SOURCES.command("kubernetes")(collect_kubernetes)
SOURCES.command("gpud")(gpud)
SOURCES.command("tickets")(tickets)
SOURCES.command("diagnostics")(diagnostics)
