"""Random histories of nodes that are emptied, with a process that dies at any call: what must hold whatever happens."""

from collections import Counter
from dataclasses import replace
from datetime import timedelta

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from policy.fleet import JobView, Level
from policy.ladder.rungs import RUNGS
from scheduler.ports.readings import Switches
from scheduler.ports.workloads import ANYWHERE, DiagnosticResult, Placement
from tests.policy.decide_world import HOUR, config
from tests.scheduler.cluster import ClusterHistories, without_our_taints
from tests.scheduler.evacuation.emptying_cluster import FAST, MINUTE, SCHEDULER, EmptyingCluster, silent_waits, workload
from tests.scheduler.faults import Crash, Watch

PINNED = Placement(False, "it requires this node")
PLACEMENTS = st.sampled_from([ANYWHERE, ANYWHERE, ANYWHERE, PINNED, Placement(None, "no right to list nodes")])
STATES = st.sampled_from(["running", "running", "running", "suspended", "held"])
WORK_CHANGES = (
    "goes", "writes", "cannot", "blocked", "freed", "ends", "suspended", "resumed", "pinned", "unpinned",
)  # fmt: skip
NODES = st.sampled_from(["n0", "n1", "n2"])
WORK_CALLS = ("ask_checkpoint", "evict", "save_progress", "on_node", "checkpoint_state", "load_progress")
VERIFY_CALLS = ("start", "result")
OTHER_CALLS = ("apply", "save_state", "revalidate", "read_switches", "hold_lease", "read_fleet")
KINDS = ("crash_before", "crash_after", "timeout_before", "timeout_after", "refused", "unreadable")


class Evacuations(ClusterHistories):
    """People, owners, faults and crashes around a controller that empties nodes."""

    def __init__(self) -> None:
        policy = config("g", free=True, rungs=RUNGS)
        super().__init__(
            EmptyingCluster(
                nodes=6, settings=replace(FAST, max_concurrent=3), lease=timedelta(seconds=30), policy=policy
            )
        )
        for name in ("n0", "n5"):
            self.cluster.change(name, jobs=())
        self.made = self.crashes = 0
        self.moved: Counter[tuple[str, object, str]] = Counter()  # evictions by node, drain and origin
        self.asked_at: dict[str, tuple[object, object]] = {}  # uid: when it was first shown a request, and its deadline
        self.watch = Watch()
        self._watch()

    def _watch(self) -> None:
        """Look over the shoulder of the scheduler at each eviction and request."""
        cluster, workloads = self.cluster, self.cluster.workloads
        evict, ask, start = workloads.evict, workloads.ask_checkpoint, cluster.verification.start

        def watched_evict(workload, fence):
            target = workloads.running.get(workload.uid)
            if target is None or target.ending:
                return evict(workload, fence)
            self._may_go(target)
            drain = cluster.progress().nodes[target.node].began_at
            answer = evict(workload, fence)
            left = workloads.running[target.uid]
            self.moved[target.node, drain, target.origin or target.name] += left.ending
            return answer

        def watched_ask(workload, request, fence):
            node = cluster.scheduler.nodes[workload.node]
            assert cluster.level(workload.node) is Level.DRAIN
            assert "predrain.io/managed" not in node.object.labels
            answer = ask(workload, request, fence)
            if workload.uid in workloads.asked and workloads.asked[workload.uid].key == request.key:
                self.asked_at.setdefault(request.key, (cluster.clock.now(), request.deadline))
            return answer

        def watched_start(node, units, key, fence, remedy=None, *, probe=False):
            switches = cluster.scheduler.switches
            assert not probe or not (cluster.level(node).hard or switches.kill or switches.release_all)
            assert not probe or not cluster.scheduler.nodes[node].object.unschedulable
            assert probe or cluster.level(node) is Level.DRAIN
            assert not [w for w in workloads.running.values() if w.node == node and w.stays is None], "not empty"
            return start(node, units, key, fence, remedy, probe=probe)

        over = self.watch.over
        workloads.evict, workloads.ask_checkpoint = over(watched_evict), over(watched_ask)
        cluster.verification.start = over(watched_start)

    def _may_go(self, target) -> None:
        cluster, now = self.cluster, self.cluster.clock.now()
        node = cluster.scheduler.nodes[target.node]
        assert cluster.level(target.node) is Level.DRAIN, "no drain mark stands"
        assert node.base.readable
        assert not node.object.unschedulable
        assert "predrain.io/managed" not in node.object.labels
        assert not cluster.scheduler.switches.kill
        assert (target.state, target.placement.elsewhere) == ("running", True)
        assert (target.opt_out, target.loss, target.stays) == (None, None, None)
        published = cluster.scheduler.revalidate(target.node).view.marks.published
        assert published.expires_at > now, "its prediction has expired"
        # what hangs has lost its place
        evicted = {uid for at, _, uid in cluster.workloads.evicted if now < at + FAST.retry_max_delay}
        # what its owner ends, or ends on a node that is no more drained, is not the controller's to count
        going = [
            w
            for w in cluster.workloads.running.values()
            if w.ending and w.uid in evicted and cluster.level(w.node) is Level.DRAIN
        ]
        # a job that stops is not stopped once more for the rest of its parts
        assert len(going) < 3 or target.gang in {w.gang for w in going} - {None}, "too many at once"
        if target.checkpoint is None or target.uid in cluster.workloads.cannot:
            return
        entry = cluster.progress().nodes[target.node]
        deadline = entry.leaving[target.uid].deadline
        shown = cluster.workloads.asked.get(target.uid)
        written = shown is not None and shown.key in cluster.workloads.written
        assert written or (deadline is not None and now >= deadline), "neither written nor waited for"
        if not written and shown is not None and shown.key == entry.leaving[target.uid].key:
            assert now >= shown.deadline

    @rule(node=NODES, risk=st.sampled_from([0.01, 0.7, 0.9, 0.95]))
    def one_is_scored(self, node, risk):
        self.cluster.clock.move(MINUTE)
        self.cluster.scored(**{node: risk})
        self.a_round()

    @rule(node=NODES, writes=st.booleans(), state=st.sampled_from(["running", "suspended", "held"]))
    def one_is_drained_and_asked(self, node, writes, state="running"):
        self.a_workload_comes(node, None, None, None, None, None, ANYWHERE, state)
        self.one_is_scored(node, 0.95)
        for uid in sorted(self.cluster.workloads.asked):
            if writes and uid in self.cluster.workloads.running:
                self.cluster.acknowledge(uid)

    @rule()
    def all_workloads_of_a_drained_node_are_gone(self):
        for uid, item in list(self.cluster.workloads.running.items()):
            if self.cluster.level(item.node) is Level.DRAIN:
                self.cluster.leave(uid)
        self.a_round()

    @rule(minutes=st.sampled_from([0.2, 1, 3, 6, 40, 400]))
    def time_passes(self, minutes):
        self.cluster.clock.move(minutes * MINUTE)

    @rule(
        node=NODES, offer=st.sampled_from([None, SCHEDULER]), loss=st.sampled_from([None, None, "local data"]),
        stays=st.sampled_from([None, None, None, "daemon set"]), ends=st.sampled_from([None, None, 0.2, 5]),
        gang=st.sampled_from([None, None, "g"]), placement=PLACEMENTS, state=STATES,
    )  # fmt: skip
    def a_workload_comes(self, node, offer, loss, stays, ends, gang, placement, state):
        self.made += 1
        now = self.cluster.clock.now()
        job = JobView(f"m{self.made}", 16, now - 3 * HOUR, ends_at=None if ends is None else now + ends * HOUR)
        uid = f"m{self.made}-uid"
        # the same name comes back with another uid
        self.cluster.workloads.running[uid] = workload(
            f"m{self.made % 3}", node, uid=uid, checkpoint=offer if state == "running" else None, loss=loss,
            stays=stays, job=job, gang=gang, placement=placement, state=state, origin=f"origin {self.made}",
        )  # fmt: skip

    @rule(data=st.data(), what=st.sampled_from([*WORK_CHANGES]))
    def something_happens_to_a_workload(self, data, what):
        workloads = self.cluster.workloads
        if not workloads.running:
            return
        uid = data.draw(st.sampled_from(sorted(workloads.running)))
        if what == "goes":
            self.cluster.leave(uid)
        elif what == "writes" and uid in workloads.asked:
            self.cluster.acknowledge(uid)
        elif what == "cannot":
            workloads.cannot.add(uid)
        elif what == "blocked":
            workloads.blocked[uid] = "budget"
        elif what == "freed":
            workloads.blocked.pop(uid, None)
        elif what == "ends":
            self.cluster.runs(uid, state="ending")
        elif what in ("suspended", "resumed") and not workloads.running[uid].ending:
            self.cluster.runs(uid, state="suspended" if what == "suspended" else "running")
        elif what in ("pinned", "unpinned"):
            self.cluster.runs(uid, placement=PINNED if what == "pinned" else ANYWHERE)

    @rule()
    def what_was_evicted_goes(self):
        for uid in [u for u, w in self.cluster.workloads.running.items() if w.ending]:
            self.cluster.leave(uid)

    @rule(rounds=st.integers(1, 4))
    def what_was_evicted_comes_back_to_its_node(self, rounds):
        for _ in range(rounds):
            for uid, old in [(u, w) for u, w in self.cluster.workloads.running.items() if w.ending]:
                self.made += 1
                self.cluster.leave(uid)
                new = f"m{self.made}-uid"
                self.cluster.workloads.running[new] = replace(old, uid=new, state="running")
            self.a_round()

    @rule(seconds=st.sampled_from([-20, 20]))
    def another_leader_has_another_clock(self, seconds):
        self.cluster.scheduler.lease = None
        self.cluster.clock.move(timedelta(seconds=seconds))
        self.cluster.restart()
        self.a_round()

    @rule(node=NODES, kind=st.sampled_from(["passed", "failed", "inconclusive", None]))
    def a_diagnostic_ends(self, node, kind):
        self.cluster.verification.results.pop(node, None)
        if kind is not None:
            self.cluster.verification.results[node] = DiagnosticResult(kind)

    @rule(node=NODES, what=st.sampled_from(["cordon", "label", "taints"]))
    def a_person_does_something(self, node, what):
        self.one_is_drained_and_asked(node, True)
        if what == "taints":
            self.cluster.write(node, lambda node: without_our_taints(node, self.cluster))
            return

        def change(target):
            if what == "cordon":
                return replace(target, unschedulable=not target.unschedulable)
            labels = dict(target.labels)
            if labels.pop("predrain.io/managed", None) is None:
                labels["predrain.io/managed"] = "false"
            return replace(target, labels=labels)

        for _ in range(2):  # and takes it back after a round
            self.cluster.write(node, change)
            self.theirs = self.cluster.foreign()
            self.a_round()

    @rule(node=NODES, switches=st.sampled_from([Switches(kill=True), Switches(release_all=True)]))
    def a_person_sets_the_switches(self, node, switches):
        self.one_is_drained_and_asked(node, True)
        self.cluster.scheduler.switches = switches
        self.a_round()
        self.cluster.scheduler.switches = Switches()

    @rule(
        call=st.sampled_from([*WORK_CALLS, *WORK_CALLS, *VERIFY_CALLS, *OTHER_CALLS]), kind=st.sampled_from(KINDS),
        skip=st.integers(0, 3),
    )  # fmt: skip
    def something_fails_in_a_round(self, call, kind, skip):
        cluster = self.cluster
        if call in WORK_CALLS:
            faults = cluster.workloads.faults
        else:
            faults = cluster.verification.faults if call in VERIFY_CALLS else cluster.scheduler.faults
        self.cluster.clock.move(MINUTE)
        self.cluster.scored(n1=0.95, n2=0.9)
        faults.plan(kind, call, skip)
        self.a_round()

    @rule()
    def a_round(self):
        cluster = self.cluster
        cluster.clock.move(MINUTE / 2)
        blocked_before = {
            name
            for name, level in cluster.levels().items()
            if level is Level.DRAIN
            and any(w.node == name and w.uid in cluster.workloads.blocked for w in cluster.workloads.running.values())
        }
        try:
            report = cluster.round()
        except Crash:
            report = None
            self.crashes += 1
            self.another_process()
        cluster.clear_faults()
        if report is None:
            return
        # a node with a stuck budget loses its taint only by the controller's own release, never for being stuck
        released = {step.action.node for step in report.steps if step.action.verb == "release"}
        for name in blocked_before - released:
            assert cluster.level(name) is Level.DRAIN
        if not report.failed and report.active:
            assert silent_waits(report, cluster.workloads, cluster.levels(), cluster.clock.now()) == []
        unasked = any(step.outcome in ("failed", "unknown") for step in report.work)  # it is asked again
        if report.failed or unasked or not report.active:
            return
        cluster.ledger.open_calls()
        if not released and not any(step.outcome in ("skipped", "held") for step in [*report.steps, *report.work]):
            again = cluster.round()
            new = [s for s in again.work if s.outcome in ("done", "blocked") and s.verb in ("checkpoint", "evict")]
            assert new == [], "a second run does something again"

    @invariant()
    def what_comes_back_is_not_evicted_for_ever(self):
        # of each process that died, the last eviction may not have been noted
        assert all(count <= 2 + self.crashes for count in self.moved.values())

    @invariant()
    def every_call_was_allowed(self):
        assert self.watch.broken == []

    @invariant()
    def no_uid_was_evicted_twice(self):
        evicted = self.cluster.evicted()
        assert len(evicted) == len(set(evicted))

    def teardown(self):
        self.everything_ends()
        self.cluster.clock.move(MINUTE)
        self.cluster.round()
        assert self.cluster.progress().nodes == {}


Evacuations.TestCase.settings = settings(
    max_examples=40, stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEvacuations = Evacuations.TestCase
