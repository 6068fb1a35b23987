"""``predrain collect slurm`` and ``kubernetes``: drains, repairs, trouble and jobs from the schedulers."""

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
from predrain.options import JsonOption, instant_option


def slurm(
    dataset: DatasetOption,
    since: Annotated[
        str | None, typer.Option(help="Where jobs begin the first time (ISO 8601).  Default: a day ago.")
    ] = None,
    interval: IntervalOption = "60s",
    reasons: Annotated[
        Path | None, typer.Option(help="YAML rules for drain reasons, before those of docs/reference/phrases.md.")
    ] = None,
    cluster: Annotated[str, typer.Option(help="Name of the cluster, where several feed one dataset.")] = "default",
    timeout: Annotated[str, typer.Option(help="Time limit of each Slurm command.")] = "60s",
    listen: ListenOption = None,
    once: OnceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Ask Slurm on an interval, until SIGTERM, and write what changed. Run one for a cluster, where `sinfo` works.

    Example: predrain collect slurm --dataset fleet --since 2026-01-01T00:00:00Z
    """
    import functools
    import re
    from datetime import UTC, datetime

    from foundation.programs import run_command
    from foundation.settings import read_settings
    from telemetry.accounting import Accounting
    from telemetry.collect.outbox import Outbox
    from telemetry.collect.slurm.collector import ENVIRONMENT, SlurmCollector
    from telemetry.landing.folder import Landing, landing_of
    from telemetry.phrases.classifier import PhraseRules

    interval_s, timeout_s = seconds(interval, "--interval"), seconds(timeout, "--timeout")
    if not re.fullmatch(r"[A-Za-z0-9.-]{1,60}", cluster):
        raise typer.BadParameter("use letters, digits, - and .", param_hint="--cluster")
    start = None if since is None else instant_option(since, "--since")
    rules = PhraseRules() if reasons is None else read_settings(reasons, PhraseRules, "rules")
    landing, accounting = Landing(landing_of(dataset), writer=f"slurm-{cluster}"), Accounting()
    with collecting(lambda: accounting, listen) as stop, Outbox(landing, f"slurm-{cluster}", accounting) as outbox:
        run = functools.partial(run_command, timeout_s=timeout_s, environment=ENVIRONMENT)
        collector = SlurmCollector(outbox, landing, run=run, rules=rules, clock=lambda: datetime.now(UTC), since=start)
        if once:
            collector.once()
        else:
            collector.follow(interval_s, stop.wait)
        names = ("rounds", "events", "jobs", "job_rows", "failed")
        counts = {name: collector.counts[name] for name in names}
    result = {"dataset": str(dataset), **counts, "phrases": collector.review.rows()}
    show(result, as_json=as_json, accounting=accounting)


def collect_kubernetes(
    dataset: DatasetOption,
    kubeconfig: Annotated[
        Path | None, typer.Option(help="Kubeconfig file.  Default: the pod's service account, else kubectl's.")
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
