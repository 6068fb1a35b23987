"""``predrain collect kubernetes``: drains, repairs, trouble and jobs of a cluster, from its API server."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from predrain.collect.options import (
    DatasetOption,
    IntervalOption,
    ListenOption,
    OnceOption,
    RulesOption,
    collecting,
    seconds,
)
from predrain.console import show
from predrain.options import JsonOption


def collect_kubernetes(
    dataset: DatasetOption,
    kubeconfig: Annotated[
        Path | None, typer.Option(help="Default: the pod's service account, else what kubectl uses.")
    ] = None,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Name of the cluster in the inventory.")] = None,
    node_selector: Annotated[
        str | None,
        typer.Option(help="Labels of the nodes to read; given, nodes without GPUs too. Default: all GPU nodes."),
    ] = None,
    namespace_selector: Annotated[
        str | None, typer.Option(help="Labels of the namespaces whose GPU pods are jobs. Default: all.")
    ] = None,
    jobs: Annotated[bool, typer.Option(help="Read pods.")] = True,
    rules: RulesOption = None,
    interval: IntervalOption = "60s",
    listen: ListenOption = None,
    once: OnceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Follow nodes, events and pods of a Kubernetes cluster: drains, repairs, node problems, jobs on GPUs.

    It needs to get, list and watch nodes, pods and events, and changes nothing: deploy/kubernetes/collector-rbac.yaml.

    Example: predrain collect kubernetes --dataset fleet --cluster east
    """
    from foundation.kubernetes.client import connect
    from telemetry.collect.kubernetes.collector import WRITER, KubernetesCollector
    from telemetry.collect.kubernetes.rules import load_rules
    from telemetry.landing.folder import Landing, landing_of

    interval_s, loaded = seconds(interval, "--interval"), load_rules(rules)
    landing = Landing(landing_of(dataset), writer=WRITER)
    collector = KubernetesCollector(
        connect(kubeconfig, context),
        landing,
        loaded,
        cluster=cluster,
        node_selector=node_selector,
        namespace_selector=namespace_selector,
        jobs=jobs,
    )
    with closing(collector), collecting(collector.accounting, listen) as stop:
        if once:
            collector.once()
        else:
            collector.run(stop, interval_s=interval_s)
    result = {"dataset": str(dataset), "nodes": len(collector.nodes), "written": dict(collector.outbox.landed)}
    show(result, as_json=as_json, accounting=collector.accounting())
