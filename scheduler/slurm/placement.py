"""Whether a job could run on other nodes than those it has, by what it requires and what is in service."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Final

from scheduler.ports.workloads import ANYWHERE, Placement
from scheduler.slurm.job import Requirements, SlurmJob
from scheduler.slurm.node import SlurmNode

_PLAIN: Final = re.compile(r"[\w.+:/-]+(?:(?:[&,][\w.+:/-]+)*|(?:\|[\w.+:/-]+)*)\Z")
_NAME: Final = re.compile(r"[\w.+:/-]+")


def placement_of(
    job: SlurmJob, node: str, nodes: Sequence[SlurmNode], reserved: Collection[str] | None = None
) -> Placement:
    """Decide whether a job could run without one of its nodes.

    ``nodes``: all nodes of the cluster. ``reserved``: nodes of the job's reservation; None: not known.

    Whether the other nodes are free now does not matter: a requeued job waits in its queue, as for licences, which are
    the cluster's, and for ``--switches``, which Slurm gives up after a while. Memory, CPUs, GPUs and
    their type are compared with what a whole node has.
    """
    need = job.needs
    if node in need.nodes:
        return Placement(False, f"it requires {','.join(sorted(need.nodes))} (--nodelist)")
    undecidable = _undecidable(need, reserved)
    if undecidable is not None:
        return Placement(None, undecidable)
    most = max((other.gpus for other in nodes if other.name == node), default=job.gpus)
    gpus = min(math.ceil(job.gpus / max(1, len(job.nodes))), most)  # what it got here is enough
    usable = {
        other.name
        for other in nodes
        if other.name != node and _takes(other, need, gpus) and _admits(other, need, reserved)
    }
    if not need.nodes <= usable:
        return Placement(False, f"{','.join(sorted(need.nodes - usable))} of its --nodelist cannot take it")
    if len(usable) < len(job.nodes):
        return Placement(
            False, f"it needs {len(job.nodes)} nodes{_described(need, gpus)}, and {len(usable)} others fit"
        )
    return ANYWHERE


def _undecidable(need: Requirements, reserved: Collection[str] | None) -> str | None:
    if need.contiguous:
        return "it requires consecutive nodes (--contiguous)"
    if need.features and not _PLAIN.match(need.features):
        return f"its constraint {need.features} is neither a plain AND nor a plain OR"
    if need.reservation and reserved is None:
        return f"the nodes of its reservation {need.reservation} cannot be read"
    return None


def _admits(node: SlurmNode, need: Requirements, reserved: Collection[str] | None) -> bool:
    if need.reservation:
        return node.name in (reserved or ())
    return not node.states & {"RESERVED", "MAINT", "MAINTENANCE"}


def _takes(node: SlurmNode, need: Requirements, gpus: int) -> bool:
    in_service = not node.out and not node.down
    in_partition = not need.partitions or bool(need.partitions & set(node.partitions))
    big_enough = (
        node.gpus >= gpus
        and (node.cpus is None or node.cpus >= need.cpus)
        and (node.memory_mb is None or node.memory_mb >= need.memory_mb)
        and (not need.gpu_type or need.gpu_type in node.gpu_types)
    )
    wanted = set(_NAME.findall(need.features))
    has = wanted & set(node.features)
    matches = not wanted or (bool(has) if "|" in need.features else has == wanted)
    return in_service and in_partition and big_enough and matches and node.name not in need.excluded


def _described(need: Requirements, gpus: int) -> str:
    parts = [f"partition {','.join(sorted(need.partitions))}"] if need.partitions else []
    parts += [f"reservation {need.reservation}"] if need.reservation else []
    parts += [f"constraint {need.features}"] if need.features else []
    parts += [f"{gpus} GPUs{f' of type {need.gpu_type}' if need.gpu_type else ''} each"] if gpus else []
    return f" ({', '.join(parts)})" if parts else ""
