"""Creates the parts of ``predrain act``: scheduler adapter, evacuation and diagnostics, the history of each GPU."""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foundation.version import VERSION

if TYPE_CHECKING:
    from features.config import LabelSection
    from policy.episodes import OutcomeEvent
    from policy.node_tier.hard_rules import HardRulesConfig
    from scheduler.controller.facts import NodeHistories
    from scheduler.controller.settings import ActSettings
    from scheduler.evacuation.engine import Evacuation
    from scheduler.evacuation.progress import Result
    from scheduler.evacuation.settings import CheckpointSettings, EvacuationSettings, VerificationSettings
    from scheduler.ledger.sqlite_ledger import SqliteLedger
    from scheduler.ports.protocols import Clock, FactReader, FactSource, SchedulerAdapter
    from scheduler.ports.workloads import Hook, Verification, Workloads


AGENT = f"predrain-act/{VERSION}"
"""User agent of the controller's requests."""


class SchedulerKind(StrEnum):
    """Values of ``--scheduler``."""

    FILE = "file"
    KUBERNETES = "kubernetes"
    SLURM = "slurm"


@dataclass(frozen=True, slots=True)
class ChosenScheduler:
    """A connected scheduler.

    ``workloads``: workloads on its nodes; None: it does not report them, and nothing is evicted.
    ``location``: its name in errors.
    ``cluster``: its name in the ledger.
    ``verification``: its own diagnostic of evacuated nodes; None: it has none.
    ``prober``: its own probe of idle nodes; None: the diagnostic of evacuated nodes.
    """

    adapter: "SchedulerAdapter"
    workloads: "Workloads | None"
    location: str
    cluster: str
    verification: "Verification | None" = None
    prober: "Verification | None" = None


def choose_scheduler(
    kind: SchedulerKind,
    cluster: Path | None,
    settings: "ActSettings",
    *,
    waits: bool,
    follows: bool = False,
    by_hand: bool = False,
) -> ChosenScheduler:
    """Connect to a scheduler.

    ``cluster``: cluster file, for ``file``.
    ``waits``: whether this process runs a single round, and so has to wait for another holder's lease instead of
    retrying in the next round.
    ``follows``: whether this process runs in a loop.
    ``by_hand``: whether an operator stops or undoes actions; settings that only new actions need may then be invalid.
    Raises ``InputError`` if the scheduler is unreachable, or the settings are invalid.
    """
    from scheduler.ports.clock import SystemClock

    if kind is SchedulerKind.SLURM:
        return _slurm(settings)
    if kind is SchedulerKind.KUBERNETES:
        from foundation.kubernetes.credentials import connect
        from scheduler.kubernetes.diagnostic_job import KubernetesVerification, read_manifest
        from scheduler.kubernetes.scheduler import KubernetesScheduler
        from scheduler.kubernetes.workloads import KubernetesWorkloads

        chosen = settings.kubernetes
        kubeconfig = None if chosen.kubeconfig is None else Path(chosen.kubeconfig).expanduser()
        connection = connect(kubeconfig, chosen.context, limits=chosen.limits, agent=AGENT)
        adapter = KubernetesScheduler(
            connection, SystemClock(), chosen, waits=waits, follows=follows, horizon=settings.policy.horizon
        )
        verification = None
        if chosen.diagnostic_job is not None and not by_hand:
            verification = KubernetesVerification(adapter, read_manifest(Path(chosen.diagnostic_job)))
        cluster_name = f"{chosen.cluster} at {connection.name}"
        return ChosenScheduler(adapter, KubernetesWorkloads(adapter), connection.name, cluster_name, verification)
    from scheduler.file import FileScheduler

    if cluster is None:
        raise typer.BadParameter("required", param_hint="--cluster")
    adapter_of_file = FileScheduler(cluster, SystemClock())
    return ChosenScheduler(adapter_of_file, None, str(cluster), str(cluster.resolve()))


def _slurm(settings: "ActSettings") -> ChosenScheduler:
    from foundation.errors import InputError
    from scheduler.ports.clock import SystemClock
    from scheduler.slurm.commands import SlurmCommands
    from scheduler.slurm.probes import SlurmProbes
    from scheduler.slurm.scheduler import open_slurm
    from scheduler.slurm.workloads import SlurmWorkloads

    if settings.slurm is None:
        raise InputError(
            "the settings have no section slurm",
            "--settings",
            "Add it with folder: a directory shared by all controllers.",
        )
    clock = SystemClock()
    adapter = open_slurm(settings.slurm, clock)
    workloads = SlurmWorkloads(adapter.port, adapter.folder, clock)
    cluster = f"Slurm {settings.slurm.cluster}"
    prober = None
    if settings.slurm.probe is not None and isinstance(adapter.port, SlurmCommands):
        prober = SlurmProbes(adapter.port, adapter.folder, settings.slurm.probe, clock)
    return ChosenScheduler(adapter, workloads, settings.slurm.rest_url or cluster, cluster, prober=prober)


def evacuation_of(chosen: ChosenScheduler, config: "ActSettings", clock: "Clock", *, undo: bool) -> "Evacuation | None":
    """Create the evacuation engine.

    ``undo``: release-all is set; settings that the scheduler does not support are then no error.
    Returns: None if the scheduler does not report workloads. If evacuation is disabled, the engine still reads results
    of diagnostics, so that they stay in force.
    Raises ``InputError`` if the settings need something that this scheduler does not support.
    """
    from foundation.errors import InputError
    from scheduler.evacuation.engine import Evacuation

    settings = config.evacuation
    if chosen.workloads is None:
        if settings.enabled and not undo:
            raise InputError(
                "evacuation.enabled is true, but the scheduler does not report what runs on the nodes",
                chosen.location,
                "Set it to false; the jobs of drained nodes then end by themselves.",
            )
        return None
    verification = _verification(chosen, settings)
    if verification is None and settings.verification.method != "none" and not undo:
        raise InputError(
            "evacuation.verification.method is 'scheduler', and this scheduler cannot start diagnostics",
            chosen.location,
            "Use webhook or command, or none.",
        )
    hooks, prober = _hooks(settings.checkpoint), chosen.prober or verification
    return Evacuation(chosen.adapter, chosen.workloads, clock, settings, hooks, verification, prober)


def facts_of(
    events: Path | None,
    evacuation: "Evacuation | None",
    ledger: "SqliteLedger",
    rules: "HardRulesConfig",
    scores: Path | None = None,
) -> "FactSource":
    """Create the source of facts: reports of GPUs, results of diagnostics, and outcomes of alerts.

    ``events``: a dataset, or its ``events.parquet``. Without an inventory in the same folder, no alert is evaluated.
    ``ledger``: records when predrain took a node out of service.
    ``rules``: name the facts to report.
    """
    from scheduler.controller.facts import EventFacts, VerifiedFacts
    from scheduler.ports.risks import MemoryFacts

    def results() -> "tuple[Result, ...] | None":
        return () if evacuation is None else evacuation.results()

    if events is not None and events.is_dir():
        events /= "events.parquet"
    known: FactReader = MemoryFacts() if events is None else EventFacts(events, rules)
    if events is None or not (events.parent / "inventory.parquet").is_file():
        return VerifiedFacts(known, results)
    return VerifiedFacts(known, results, DatasetHistory(events.parent, events, scores).read, ledger.service)


def _verification(chosen: ChosenScheduler, settings: "EvacuationSettings") -> "Verification | None":
    from scheduler.evacuation.diagnostics import HookVerification

    verification = settings.verification
    if verification.method == "scheduler":
        return chosen.verification
    hook = _hooks(verification).get(verification.method)
    return None if hook is None else HookVerification(hook)


def _hooks(settings: "CheckpointSettings | VerificationSettings") -> "dict[str, Hook]":
    """Return the configured hooks by their name in the settings."""
    from scheduler.evacuation.hooks import CommandHook, Webhook

    hooks: dict[str, Hook] = {}
    if settings.webhook is not None:
        hooks["webhook"] = Webhook(settings.webhook, AGENT)
    if settings.command is not None:
        hooks["command"] = CommandHook(settings.command)
    return hooks


class DatasetHistory:
    """Reads a dataset's events and inventory, and reloads them when an import has replaced them.

    ``events``: events file; None: that of the folder.
    ``scores``: folder of the scores that are acted on; None: the default label settings apply.

    Incidents come from :func:`features.labels.incidents.find_incidents` with the label settings of the newest decision,
    so that an alert is evaluated by its model's definition of an incident; everything else comes from
    :func:`serving.scores.alert_outcomes.outcome_events`. The history is complete up to the end of the dataset's span,
    or without ``dataset.json`` up to the last ``known_at``.
    """

    def __init__(self, folder: Path, events: Path | None = None, scores: Path | None = None) -> None:
        self._folder, self._scores = folder, scores
        self._files = (events or folder / "events.parquet", folder / "inventory.parquet", folder / "dataset.json")
        self._key: tuple[Any, ...] | None = None
        self._outcome_events: list[tuple[datetime, str, OutcomeEvent]] = []
        self._homes: dict[str, str] = {}
        self._until: datetime | None = None

    def read(self, now: datetime) -> "NodeHistories":
        """Return the histories as known at ``now``.

        Raises ``SourceError`` if the files cannot be read.
        """
        from pyarrow.lib import ArrowException

        from foundation.errors import InputError
        from foundation.files import stamp_of
        from scheduler.controller.facts import NodeHistories
        from scheduler.ports.errors import SourceError

        try:
            labels = self._labels()
            key = (*map(stamp_of, self._files), labels)
            if key != self._key:
                self._load(labels)
                self._key = key
        except (OSError, ArrowException, KeyError, ValueError, InputError) as error:
            raise SourceError(f"cannot read events and inventory from {self._folder}: {error}") from error
        units: dict[str, list[OutcomeEvent]] = {}
        for known_at, unit, event in self._outcome_events:
            if known_at <= now:
                units.setdefault(unit, []).append(event)
        return NodeHistories(units, dict(self._homes), self._until)

    def _labels(self) -> "LabelSection":
        from features.config import LabelSection
        from serving.scores.alert_outcomes import label_settings_of

        return LabelSection() if self._scores is None else label_settings_of(self._scores)[0]

    def _load(self, labels: "LabelSection") -> None:
        import pyarrow.parquet as pq

        from features.labels.incidents import find_incidents
        from serving.scores.alert_outcomes import outcome_events
        from telemetry.dataset.installations import Installations
        from telemetry.dataset.meta import read_meta

        events, inventory = (pq.read_table(file).to_pandas() for file in self._files[:2])
        incidents = find_incidents(events, inventory, labels)
        self._outcome_events = list(outcome_events(events, Installations.of(inventory), incidents))
        until = _instant(events["known_at"].max()) if len(events) else datetime.fromtimestamp(0, UTC)
        if self._files[2].is_file():
            until = read_meta(self._folder).span[1]
        self._until = until
        installations = inventory[inventory["gpu"].notna()].sort_values("installed_at")
        self._homes = dict(zip(installations["gpu"], installations["node"], strict=True))


def _instant(value: Any) -> datetime:
    instant: datetime = value.to_pydatetime()
    return instant.astimezone(UTC)
