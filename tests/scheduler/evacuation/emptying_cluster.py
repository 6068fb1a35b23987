"""A small cluster whose nodes run workloads, with a controller that empties them."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from policy.fleet import JobView, Level
from scheduler.controller.controller import Controller
from scheduler.controller.facts import VerifiedFacts
from scheduler.evacuation.engine import Evacuation
from scheduler.evacuation.progress import EvacuationProgress, stored_progress
from scheduler.evacuation.settings import EvacuationSettings, VerificationSettings
from scheduler.ports.workloads import CheckpointOffer, Hook, Workload, Workloads
from tests.policy.decide_world import T0, config
from tests.scheduler.cluster import Cluster
from tests.scheduler.faults import MemoryVerification, MemoryWorkloads

MINUTE = timedelta(minutes=1)
SCHEDULER = CheckpointOffer("scheduler")
FAST = EvacuationSettings(
    enabled=True,
    retry_initial_delay=MINUTE,
    retry_max_delay=4 * MINUTE,
    verification=VerificationSettings(method="scheduler"),
)


def workload(name: str, node: str, **others: object) -> Workload:
    """A job's pod that began an hour ago."""
    known: dict[str, object] = {
        "uid": f"{name}-uid", "kind": "pod", "node": node, "checkpoint": SCHEDULER,
        "job": JobView(name, 2, T0 - timedelta(hours=1)),
    }  # fmt: skip
    return Workload(name, **{**known, **others})


class Recording:
    """A hook that records its requests."""

    def __init__(self, *replies: object) -> None:
        self.requests: list[tuple[Mapping[str, object], str]] = []
        self.replies = list(replies)

    def tell(self, payload, key):
        """Note it; the last reply stays."""
        self.requests.append((payload, key))
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


class EmptyingCluster(Cluster):
    """Nodes n0 to n7 with one workload each on the first three."""

    def __init__(self, settings: EvacuationSettings = FAST, hooks: Mapping[str, Hook] | None = None, **others) -> None:
        self.evacuation_settings = settings
        self.hooks = dict(hooks or {})
        self.workloads: MemoryWorkloads | None = None
        self.verification = MemoryVerification()
        others.setdefault("policy", config("g", free=True))
        super().__init__(**others)

    def restart(self, holder: str | None = None) -> None:
        """Another process takes over."""
        if self.workloads is None:
            self.workloads = MemoryWorkloads([workload(f"w{i}", f"n{i}") for i in range(3)], self.clock)
        self.restarts += 1
        settings = self.evacuation_settings
        verification = None if settings.verification.method == "none" else self.verification
        self.evacuation = Evacuation(
            self.scheduler, self.workloads, self.clock, settings, self.hooks, verification, verification
        )
        facts = VerifiedFacts(self.facts, self.evacuation.results)
        self.controller = Controller(
            self.scheduler, self.risks, facts, self.ledger, self.clock, self.policy, self.settings,
            holder=holder or f"p{self.restarts}", code="1.0", evacuation=self.evacuation,
        )  # fmt: skip

    def clear_faults(self) -> None:
        """What was planned to fail does not."""
        for part in (self.scheduler, self.workloads, self.verification):
            part.faults.clear()

    def later(self, minutes: float = 1):
        """Some time later, another round; the scores are as they were."""
        self.clock.move(minutes * MINUTE)
        return self.round()

    def acknowledge(self, uid: str) -> None:
        """The workload writes its checkpoint."""
        self.workloads.written.add(self.workloads.asked[uid].key)

    def leave(self, uid: str) -> None:
        del self.workloads.running[uid]

    def runs(self, uid: str, **fields: object) -> None:
        self.workloads.running[uid] = replace(self.workloads.running[uid], **fields)

    def evicted(self) -> list[str]:
        """Uids of what was evicted, in order."""
        return [uid for _, _, uid in self.workloads.evicted]

    def progress(self) -> EvacuationProgress:
        stored = stored_progress(self.workloads)
        with self.workloads.faults.paused():
            assert stored.load() is None
        return stored.value


def silent_waits(report, workloads: Workloads, levels: Mapping[str, Level], now: datetime) -> list[str]:
    """Nodes that wait for longer than they may without it being reported, and workloads that a round does not name."""
    stored = stored_progress(workloads)
    assert stored.load() is None
    held = {step.node for step in report.work if step.verb == "hold"}
    named = {(step.node, step.workload) for step in report.work}
    silent = []
    for name, entry in stored.value.nodes.items():
        if entry.phase != "evacuating" or levels.get(name) is not Level.DRAIN:
            continue
        late = now >= (entry.waiting_since or entry.began_at) + FAST.stuck_after
        silent += [name] if late and "stuck" not in entry.reported else []
        left = () if name in held else workloads.on_node(name)
        silent += [item.name for item in left if item.stays is None and (name, item.name) not in named]
    return silent


def work(report) -> list[tuple[str, str, str | None]]:
    """What was done to empty nodes: verb, what it came to, workload."""
    return [(step.verb, step.outcome, step.workload) for step in report.work]


def draining(**others) -> EmptyingCluster:
    """Node n1 is drained, and its workload was asked for a checkpoint."""
    cluster = EmptyingCluster(**others)
    cluster.scored(n1=0.9)
    report = cluster.round()
    assert not report.failed, report.errors
    assert cluster.level("n1") is Level.DRAIN
    return cluster


def findings(cluster) -> list[tuple[str, str, str]]:
    """What the ledger holds of what was found: node, kind, words."""
    rows = cluster.ledger._read("SELECT node, kind, json_extract(content, '$.message') FROM findings ORDER BY id")
    return [tuple(row) for row in rows]


def found(cluster: EmptyingCluster, kind: str) -> list[str]:
    return [message for _, found_kind, message in findings(cluster) if found_kind == kind]
