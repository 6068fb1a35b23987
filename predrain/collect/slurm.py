"""``predrain collect slurm``: drains, resumes, repairs and jobs from Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from predrain.collect.options import DatasetOption, IntervalOption, ListenOption, OnceOption, collecting, seconds
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

    interval_s, timeout_s = seconds(interval, "--interval", least=1), seconds(timeout, "--timeout", least=1)
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
