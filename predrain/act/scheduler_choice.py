"""Which scheduler ``predrain act`` works on, and how it is reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from predrain.version import VERSION

if TYPE_CHECKING:
    from scheduler.controller.settings import ActSettings
    from scheduler.ports.protocols import SchedulerAdapter
    from scheduler.ports.workloads import Verification, Workloads


AGENT = f"predrain-act/{VERSION}"
"""What requests of the controller give as their sender."""


class SchedulerKind(StrEnum):
    """What ``--scheduler`` takes."""

    FILE = "file"
    KUBERNETES = "kubernetes"
    SLURM = "slurm"


@dataclass(frozen=True, slots=True)
class ChosenScheduler:
    """A scheduler, ready to be asked.

    ``workloads``: what runs on its nodes; None: it cannot tell, and nothing is evicted.
    ``where``: what it is called in errors.
    ``verification``: its own way to run a diagnostic on an emptied node; None: it has none.
    """

    adapter: SchedulerAdapter
    workloads: Workloads | None
    where: str
    verification: Verification | None = None


def choose_scheduler(
    kind: SchedulerKind, cluster: Path | None, settings: Callable[[], ActSettings], *, waits: bool, told: bool = False
) -> ChosenScheduler:
    """Reach a scheduler.

    ``cluster``: file that describes the cluster, for ``file``.
    ``settings``: reads the settings; the file of a cluster needs none, and is told to stop also where they are broken.
    ``waits``: whether this process does one round and ends, so that it has to watch another one's lease rather than
    come again.
    ``told``: whether a person stops or undoes something: what is needed for new work only may then be broken.
    Raises ``InputError`` if there is no way to it, or the settings are wrong.
    """
    from scheduler.ports.clock import SystemClock

    if cluster is not None and kind is not SchedulerKind.FILE:
        raise typer.BadParameter("goes with --scheduler file only", param_hint="--cluster")
    if kind is SchedulerKind.SLURM:
        return _slurm(settings())
    if kind is SchedulerKind.KUBERNETES:
        from scheduler.kubernetes.diagnostic_job import KubernetesVerification, read_manifest
        from scheduler.kubernetes.scheduler import KubernetesScheduler
        from scheduler.kubernetes.workloads import KubernetesWorkloads
        from telemetry.collect.kubernetes.client import connect

        chosen = settings().kubernetes
        kubeconfig = None if chosen.kubeconfig is None else Path(chosen.kubeconfig).expanduser()
        connection = connect(kubeconfig, chosen.context, limits=chosen.limits, agent=AGENT)
        adapter = KubernetesScheduler(connection, SystemClock(), chosen, waits=waits)
        verification = None
        if chosen.diagnostic_job is not None and not told:
            verification = KubernetesVerification(adapter, read_manifest(Path(chosen.diagnostic_job)))
        return ChosenScheduler(adapter, KubernetesWorkloads(adapter), connection.name, verification)
    from scheduler.file import FileScheduler

    if cluster is None:
        raise typer.BadParameter("needed", param_hint="--cluster")
    return ChosenScheduler(FileScheduler(cluster, SystemClock()), None, str(cluster))


def _slurm(settings: ActSettings) -> ChosenScheduler:
    from scheduler.ports.clock import SystemClock
    from scheduler.slurm.scheduler import open_slurm
    from scheduler.slurm.workloads import SlurmWorkloads
    from telemetry.errors import InputError

    if settings.slurm is None:
        raise InputError(
            "the settings have no section slurm", "--settings", "Give it with folder: a folder all controllers share."
        )
    clock = SystemClock()
    adapter = open_slurm(settings.slurm, clock)
    workloads = SlurmWorkloads(adapter.port, adapter.folder, clock)
    return ChosenScheduler(adapter, workloads, settings.slurm.rest_url or f"Slurm {settings.slurm.cluster}")
