"""``predrain collect slurm`` and ``kubernetes``: drains, repairs, node problems and jobs from the schedulers."""

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from predrain.console import show
from predrain.options import (
    DatasetOption,
    IntervalOption,
    JsonOption,
    ListenOption,
    OnceOption,
    RulesOption,
    collecting,
    instant_option,
    seconds,
)


def slurm(
    dataset: DatasetOption,
    since: Annotated[
        str | None, typer.Option(help="Start time of jobs in the first round (ISO 8601). Default: a day ago.")
    ] = None,
    interval: IntervalOption = "60s",
    reasons: Annotated[
        Path | None,
        typer.Option(help="Rules (YAML) for drain reasons; they precede those of docs/reference/phrases.md."),
    ] = None,
    cluster: Annotated[str, typer.Option(help="Cluster name, if several clusters share a dataset.")] = "default",
    timeout: Annotated[str, typer.Option(help="Timeout of each Slurm command.")] = "60s",
    listen: ListenOption = None,
    once: OnceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Poll Slurm for drains, reservations and jobs until SIGTERM. Run it once per cluster, where `sinfo` works.

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
    from telemetry.phrases import PhraseRules
    from telemetry.staging.folder import StagingFolder, staging_of

    interval_s, timeout_s = seconds(interval, "--interval"), seconds(timeout, "--timeout")
    if not re.fullmatch(r"[A-Za-z0-9.-]{1,60}", cluster):
        raise typer.BadParameter("use letters, digits, - and .", param_hint="--cluster")
    start = None if since is None else instant_option(since, "--since")
    rules = PhraseRules() if reasons is None else read_settings(reasons, PhraseRules, "rules")
    staging, accounting = StagingFolder(staging_of(dataset), writer=f"slurm-{cluster}"), Accounting()
    with collecting(lambda: accounting, listen) as stop, Outbox(staging, f"slurm-{cluster}", accounting) as outbox:
        run = functools.partial(run_command, timeout_s=timeout_s, environment=ENVIRONMENT)
        collector = SlurmCollector(outbox, staging, run=run, rules=rules, clock=lambda: datetime.now(UTC), since=start)
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
        Path | None, typer.Option(help="Kubeconfig file. Default: the pod's service account, else kubectl's.")
    ] = None,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Cluster name in the inventory.")] = None,
    node_selector: Annotated[
        str | None,
        typer.Option(help="Label selector of nodes; it includes nodes without GPUs. Default: all GPU nodes."),
    ] = None,
    jobs: Annotated[bool, typer.Option(help="Collect jobs from pods.")] = True,
    rules: RulesOption = None,
    interval: IntervalOption = "60s",
    listen: ListenOption = None,
    once: OnceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Watch nodes, events and pods of a Kubernetes cluster for drains, repairs, node problems and GPU jobs.

    Read-only. Required permissions: deploy/kubernetes/collector-rbac.yaml.

    Example: predrain collect kubernetes --dataset fleet --cluster east
    """
    from foundation.kubernetes.credentials import connect
    from telemetry.collect.kubernetes.collector import WRITER, KubernetesCollector
    from telemetry.collect.kubernetes.rules import load_rules
    from telemetry.staging.folder import StagingFolder, staging_of

    interval_s, loaded = seconds(interval, "--interval"), load_rules(rules)
    staging = StagingFolder(staging_of(dataset), writer=WRITER)
    collector = KubernetesCollector(
        connect(kubeconfig, context),
        staging,
        loaded,
        cluster=cluster,
        node_selector=node_selector,
        jobs=jobs,
    )
    with closing(collector), collecting(collector.accounting, listen) as stop:
        if once:
            collector.once()
        else:
            collector.run(stop, interval_s=interval_s)
    result = {"dataset": str(dataset), "nodes": len(collector.nodes), "written": dict(collector.outbox.staged)}
    show(result, as_json=as_json, accounting=collector.accounting())
