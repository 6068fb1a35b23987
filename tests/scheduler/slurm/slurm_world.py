"""A small Slurm with a controller over it."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from policy.breaker import BreakerConfig
from policy.budget import BudgetConfig
from policy.fleet import Level, Marks
from policy.ladder.cost_benefit import CostBenefitConfig
from policy.plan import Action
from scheduler.controller.controller import Controller
from scheduler.controller.facts import VerifiedFacts
from scheduler.controller.settings import ControllerSettings
from scheduler.evacuation.engine import Evacuation
from scheduler.evacuation.settings import VerificationSettings
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.clock import ManualClock
from scheduler.ports.readings import Precondition, WriteResult
from scheduler.ports.report import RoundReport
from scheduler.ports.risks import MemoryFacts, MemoryRisks
from scheduler.slurm.folder import NONE_YET, SharedFolder
from scheduler.slurm.marks import slurm_marks_on
from scheduler.slurm.scheduler import SlurmScheduler
from scheduler.slurm.settings import SlurmSettings
from scheduler.slurm.workloads import SlurmWorkloads
from tests.policy.decide_world import STEP, T0, config
from tests.scheduler.cluster import DISRUPTION_BUDGETS, RATE_LIMITS, risks_of
from tests.scheduler.evacuation.emptying_cluster import FAST
from tests.scheduler.slurm.memory_port import MemorySlurm

LEASE = timedelta(seconds=30)
ME = "me"


class MemoryFolder(SharedFolder):
    """The documents of a shared folder without its files; they outlive a process."""

    def __init__(self, documents: dict[str, str], clock: ManualClock, monotonic: Callable[[], float]) -> None:
        super().__init__(Path(__file__).parent, clock, monotonic, longest_s=None)
        self._documents = documents

    def _read(self, name):
        text = self._documents.get(name)
        return ({}, NONE_YET) if text is None else (json.loads(text), text)

    def _write(self, name, document):
        self._documents[name] = json.dumps(document)
        return self._documents[name]

    def _locked(self, name):
        return contextlib.nullcontext()

    def _has_expired(self, lease, now_s):
        return self._observed.left_s(lease.beat, lease.duration_s, now_s) <= 0


class World:
    """All of it; the wall clock and the monotonic one are one and the same here, until a test moves them apart.

    ``folder``: None: in memory.
    """

    def __init__(self, folder: Path | None, nodes: int = 8, *, evacuates: bool = False, **settings: object) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self.documents: dict[str, str] | None = {} if folder is None else None
        self.clock = ManualClock(T0)
        self.seconds = 0.0
        self.slurm = MemorySlurm(self.clock, nodes)
        self.settings = SlurmSettings(str(folder), cluster="c", rack_prefix="rack_", **settings)
        self.policy = config(
            "g", budget=BudgetConfig(DISRUPTION_BUDGETS, RATE_LIMITS), breaker=BreakerConfig(max_risky=1.0, jump=100.0),
            cost_benefit=CostBenefitConfig(always=evacuates, may_wait=not evacuates),
        )  # fmt: skip
        self.evacuation_settings = replace(FAST, enabled=evacuates, verification=VerificationSettings())
        self.risks = MemoryRisks()
        self.values = dict.fromkeys(self.slurm.all, 0.01)
        self.ledger = SqliteLedger(None)
        self.restarts = 0
        self.scored()
        self.restart()

    def monotonic(self) -> float:
        return (self.clock.now() - T0).total_seconds() + self.seconds

    def restart(self) -> None:
        """Another process takes over: nothing but Slurm and the folder knows of the past."""
        self.restarts += 1
        if self.documents is None:
            self.folder = SharedFolder(Path(self.settings.folder), self.clock, self.monotonic)
        else:
            self.folder = MemoryFolder(self.documents, self.clock, self.monotonic)
        self.scheduler = SlurmScheduler(self.slurm, self.folder, self.clock, self.settings)
        self.workloads = SlurmWorkloads(self.slurm, self.folder, self.clock)
        evacuation = Evacuation(self.scheduler, self.workloads, self.clock, self.evacuation_settings, {}, None)
        self.controller = Controller(
            self.scheduler, self.risks, VerifiedFacts(MemoryFacts(), evacuation.results), self.ledger, self.clock,
            self.policy, ControllerSettings(lease=LEASE), holder=f"p{self.restarts}", code="1.0", evacuation=evacuation,
        )  # fmt: skip

    def scored(self, duration: timedelta = 2 * STEP, **risks: float | None) -> None:
        self.values |= risks
        self.risks.risks = risks_of(self.values, self.clock.now(), duration)

    def round(self) -> RoundReport:
        return self.controller.round()

    def level(self, node: str) -> Level:
        return self.marks(node).level

    def marks(self, node: str) -> Marks:
        return slurm_marks_on(self.slurm.all[node], self.settings, self.clock.now()).marks

    def lease(self, holder: str = ME) -> datetime:
        until = self.scheduler.hold_lease(holder, LEASE)
        assert until is not None
        return until

    def apply(self, action: Action, *, until: datetime | None = None, **other: object) -> WriteResult:
        """Re-read, as the controller does, and apply."""
        reading = self.scheduler.revalidate(action.node)
        given = {"version": reading.version, "boot_id": reading.boot_id, "holder": ME}
        return self.scheduler.apply(action, Precondition(until=until or self.lease(), **{**given, **other}))


def action(verb: str, node: str = "n0", tier: str = "high", risk: float | None = 0.83, hours: float = 6) -> Action:
    level = {"publish": 1, "avoid": 2, "swap": 3, "drain": 4}[verb]
    return Action(verb, node, tier, Level(level), risk, T0 + timedelta(hours=hours), ("its errors rise",))


def release(node: str = "n0", to: Level = Level.NONE) -> Action:
    return Action("release", node, "clear", to, 0.01, None, ("it is calm",))
