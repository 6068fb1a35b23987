"""``predrain collect kubernetes``: drains, repairs, trouble and jobs of a cluster, from its API server."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from predrain.console import show
from predrain.options import JsonOption, duration_option


def collect_kubernetes(
    dataset: Annotated[Path, typer.Option(help="Dataset to collect for; rows are written to DATASET.live next to it.")],
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
    rules: Annotated[
        Path | None,
        typer.Option(help="YAML file with rules for taints, conditions and events; they go before the defaults."),
    ] = None,
    interval: Annotated[str, typer.Option(help="How often new rows are written.")] = "60s",
    once: Annotated[bool, typer.Option("--once", help="Compare once with the saved state, then exit.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Follow nodes, events and pods of a Kubernetes cluster: drains, repairs, node problems, jobs on GPUs.

    It needs to get, list and watch nodes, pods and events, and changes nothing: deploy/kubernetes/collector-rbac.yaml.

    Example: predrain collect kubernetes --dataset fleet --cluster east
    """
    from foundation.kubernetes.client import connect
    from foundation.running import stop_on_signals
    from telemetry.collect.kubernetes.collector import WRITER, KubernetesCollector
    from telemetry.collect.kubernetes.rules import load_rules
    from telemetry.landing.folder import Landing, landing_of

    interval_s = duration_option(interval, "--interval").total_seconds()
    if interval_s <= 0:
        raise typer.BadParameter("must be positive", param_hint="--interval")
    loaded = load_rules(rules)
    with stop_on_signals() as stop:
        api = connect(kubeconfig, context)
        landing = Landing(landing_of(dataset), writer=WRITER)
        with closing(
            KubernetesCollector(
                api,
                landing,
                loaded,
                cluster=cluster,
                node_selector=node_selector,
                namespace_selector=namespace_selector,
                jobs=jobs,
            )
        ) as collector:
            if once:
                collector.once()
            else:
                collector.run(stop, interval_s=interval_s)
    result = {"dataset": str(dataset), "nodes": len(collector.nodes), "written": dict(collector.outbox.landed)}
    show(result, as_json=as_json, accounting=collector.accounting())
