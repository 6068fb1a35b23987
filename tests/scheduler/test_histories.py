"""Random histories of a cluster with evacuation, and a process that dies at any call: what holds whatever happens."""

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from random import Random

import pytest

from policy.fleet import Fact, JobView, Level
from scheduler.ports.node_object import Taint
from scheduler.ports.readings import Switches
from scheduler.ports.risks import ReportedFacts
from scheduler.ports.workloads import UNRESTRICTED, CheckpointOffer, DiagnosticResult, Placement
from tests.histories import COUNT, History, blocks, play_all, step
from tests.policy.decide_world import HOUR
from tests.scheduler.cluster import DISRUPTION_BUDGETS, RATE_LIMITS, without_our_taints
from tests.scheduler.evacuation.emptying_cluster import FAST, MINUTE, SCHEDULER, silent_waits, workload
from tests.scheduler.faults import Crash, Watch
from tests.scheduler.light_cluster import BUDGETED, CALLS, FREE, KINDS, LightCluster, another_installation, new_ledger

PINNED = Placement(False, "it requires this node")
PLACEMENTS = (UNRESTRICTED, UNRESTRICTED, UNRESTRICTED, PINNED, Placement(None, "no right to list nodes"))
LEASE = timedelta(seconds=30)
RELEASING = {"hold_lease", "read_fleet", "revalidate", "apply"}  # the calls that a release needs


class ClusterHistory(History):
    """People, tools, owners, faults and crashes around a controller that empties nodes.

    ``theirs``: all that is not ours, as people and tools left it.
    ``claimed``: by node, what somebody made of our marks, and is theirs since.
    """

    longest = 7

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.budgeted = self.happens(0.5)
        policy, settings = BUDGETED if self.budgeted else FREE, replace(FAST, max_concurrent=self.one_of(1, 3))
        self.cluster = cluster = LightCluster(
            nodes=random.randint(3, 5), ledger=new_ledger(self.random), settings=settings, lease=LEASE, policy=policy
        )
        cluster.change("n0", jobs=())
        self.scheduler, self.workloads, self.names = cluster.scheduler, cluster.workloads, cluster.names
        self.keys = keys = self.scheduler.keys
        self.ours = {keys.tier, keys.prediction, keys.applied, keys.drain}
        self.other = another_installation(cluster, LEASE)
        self.theirs, self.claimed = cluster.foreign(), dict[str, set[object]]()
        self.begun: list[tuple[float, str]] = []
        self.made = self.crashes = 0
        self.moved: Counter[tuple[str, object, str]] = Counter()  # evictions by node, drain and origin
        self.watch = Watch()
        over, verification = self.watch.over, cluster.verification
        self._evict, self._ask, self._start = self.workloads.evict, self.workloads.ask_checkpoint, verification.start
        self.workloads.evict, self.workloads.ask_checkpoint = over(self._watched_evict), over(self._watched_ask)
        verification.start = over(self._watched_start)

    def check(self) -> None:
        assert self.watch.broken == []
        assert self.cluster.foreign() == self.theirs, "something foreign is changed"
        for name, claimed in self.claimed.items():
            assert claimed <= self._of_ours(name), "what somebody edited or copied stands"
        # of each process that died, the last eviction may not have been noted
        assert all(count <= 2 + self.crashes for count in self.moved.values())
        assert len(self.cluster.evicted()) == len(set(self.cluster.evicted()))

    def end(self) -> None:
        """Everything of ours ends, by itself or on request, and nothing else."""
        for name in self.names:
            self.cluster.change(name, readable=True)
        self.scheduler.lease = None
        self._another_process()
        self.random = Random(self.made)
        released = self.happens(0.5)
        self.scheduler.switches = Switches(release_all=released)
        self.cluster.clock.move(MINUTE if released else timedelta(days=10))
        report = self.cluster.round()
        assert not report.failed, report.errors
        assert self.cluster.levels() == {}
        self.check()
        self.cluster.clock.move(timedelta(days=10))
        if self.other.levels():
            self.another_installation_does_a_round()
        assert all(self.claimed.get(name) or not self._of_ours(name) for name in self.names)
        if self.cluster.progress().nodes:
            self.scheduler.switches = Switches()
            self.cluster.round()
        assert self.cluster.progress().nodes == {}

    @step(4)
    def nodes_are_scored(self) -> None:
        names = self.names if self.happens(0.3) else self.random.sample(self.names, self.random.randint(1, 2))
        risk = 0.01 if names is self.names else self.one_of(0.01, 0.15, 0.4, 0.7, 0.95, 0.95, None)
        self.cluster.scored(**dict.fromkeys(names, risk))

    @step(2)
    def time_passes(self) -> None:
        self.cluster.clock.move(self.one_of(0.01, 0.1, 0.5, 3, 7, 13, 30) * HOUR)
        self.a_round()

    @step(2)
    def a_gpu_falls_off_the_bus_or_is_repaired(self) -> None:
        now = self.cluster.clock.now()
        facts = self.one_of(ReportedFacts((Fact("xid 79", now),)), ReportedFacts((), now))
        self.cluster.facts.facts[f"{self._node()}-0"] = facts

    @step()
    def a_node_changes(self) -> None:
        node, what = self._node(), self.one_of("down", "readable")
        self.cluster.change(node, **{what: not getattr(self.scheduler.nodes[node].base, what)})

    @step(2)
    def a_person_cordons_or_labels(self) -> None:
        # the opt-out stands under our prefix and is theirs all the same
        node, what = self._node(), self.one_of("cordon", "predrain.io/managed", "other.example/x")

        def change(target):
            if what == "cordon":
                return replace(target, unschedulable=not target.unschedulable)
            labels = dict(target.labels)
            if labels.pop(what, None) is None:
                labels[what] = "false"
            return replace(target, labels=labels)

        for _ in range(self.one_of(1, 1, 2)):  # and perhaps takes it back after a round
            self.cluster.write(node, change)
            self.theirs = self.cluster.foreign()
            self.a_round()

    @step()
    def a_person_removes_our_taints(self) -> None:
        node = self._marked()
        self.cluster.write(node, lambda target: without_our_taints(target, self.cluster))
        self.claimed[node] = {item for item in self.claimed.get(node, ()) if not isinstance(item, Taint)}
        self.met["taints removed"] += 1

    @step(2)
    def a_person_edits_our_marks(self) -> None:
        value, what = self.one_of("rma-4711", "High"), self.one_of("taint", "taint", "prediction", "applied", "drain")
        name = getattr(self.keys, what)

        def change(target):
            taints = (replace(taint, value=value) if taint.key == name else taint for taint in target.taints)
            text = target.annotations.get(name)
            notes = {} if text is None else {name: f"{text} - {value}"}
            return replace(target, taints=tuple(taints), annotations={**target.annotations, **notes})

        self._claim(self._marked(), change, "taint edited" if what == "taint" else "annotation edited")

    @step()
    def a_tool_copies_our_marks_to_another_node(self) -> None:
        node, target, record = self._marked(), self._node(), self.happens(0.5)
        source = self.scheduler.nodes[node].object
        taints = tuple(taint for taint in source.taints if taint.key == self.keys.taint)
        if node == target or not taints or self._of_ours(target):
            return
        notes = {key: text for key, text in source.annotations.items() if record and key.startswith("predrain.io/")}

        def change(copy):
            return replace(copy, taints=(*copy.taints, *taints), annotations={**copy.annotations, **notes})

        self._claim(target, change, "marks copied")

    @step()
    def a_person_cleans_a_node(self) -> None:
        def change(target):
            texts = (target.labels, target.annotations)
            labels, notes = ({key: text for key, text in kind.items() if key not in self.ours} for kind in texts)
            return replace(without_our_taints(target, self.cluster), labels=labels, annotations=notes)

        node = self.one_of(*self.claimed or self.names)
        self.cluster.write(node, change)
        self.claimed.pop(node, None)

    @step()
    def a_person_sets_the_switches(self) -> None:
        self.scheduler.switches = self.one_of(Switches(kill=True), Switches(release_all=True))
        self.a_round()
        if self.happens(0.8):
            self.scheduler.switches = Switches()

    @step(4)
    def work_runs_on_a_node_that_is_drained(self) -> None:
        state, placement = self.one_of("running", "running", "running", "suspended", "held"), self.one_of(*PLACEMENTS)
        node = self._work_at_risk(state, placement, self.one_of(None, SCHEDULER))
        for asked in sorted(self.workloads.asked):
            if asked in self.workloads.running and self.happens(0.5):
                self.cluster.acknowledge(asked)
        if self.cluster.level(node) is Level.DRAIN:
            kind = {True: "movable", False: "pinned", None: "undecided"}[placement.elsewhere]
            self.met.update([f"{state} work on a drained node", f"{kind} work on a drained node"])

    def _work_at_risk(self, state: str, placement: Placement, offer: CheckpointOffer | None) -> str:
        node, gang, end = self._node(), self.one_of(None, None, "g"), self.one_of(None, None, 0.2, 5)
        self.made += 1
        now = self.cluster.clock.now()
        job = JobView(f"m{self.made}", 16, now - 3 * HOUR, ends_at=None if end is None else now + end * HOUR)
        uid = f"m{self.made}-uid"
        # the same name comes back with another uid
        self.workloads.running[uid] = workload(
            f"m{self.made % 3}", node, uid=uid, checkpoint=offer if state == "running" else None,
            loss=self.one_of(None, None, None, "local data"), stays=self.one_of(None, None, None, None, "daemon set"),
            job=job, gang=gang, placement=placement, state=state, origin=f"origin {self.made}",
        )  # fmt: skip
        self.cluster.scored(**{node: 0.95})
        self.a_round()
        return node

    @step(3)
    def something_happens_to_work(self) -> None:
        if not self.workloads.running:
            return
        uid, what = self.one_of(*sorted(self.workloads.running)), self.one_of(
            "goes", "writes", "cannot", "blocked", "freed", "ending", "suspended", "running", "pinned", "unpinned"
        )  # fmt: skip
        if what == "goes":
            self.cluster.leave(uid)
        elif what == "writes" and uid in self.workloads.asked:
            self.cluster.acknowledge(uid)
        elif what == "cannot":
            self.workloads.cannot.add(uid)
        elif what == "blocked":
            self.workloads.blocked[uid] = "budget"
        elif what == "freed":
            self.workloads.blocked.pop(uid, None)
        elif what in ("pinned", "unpinned"):
            self.cluster.runs(uid, placement=PINNED if what == "pinned" else UNRESTRICTED)
        elif what != "writes" and not self.workloads.running[uid].ending:
            self.cluster.runs(uid, state=what)

    @step(2)
    def what_was_evicted_goes_or_comes_back(self) -> None:
        if not any(work.ending for work in self.workloads.running.values()):
            self._work_at_risk("running", UNRESTRICTED, None)
        for _ in range(self.one_of(1, 2, 4)):
            for uid, old in [(uid, work) for uid, work in self.workloads.running.items() if work.ending]:
                self.cluster.leave(uid)
                if self.happens(0.8):
                    self.made += 1
                    self.workloads.running[f"m{self.made}"] = replace(old, uid=f"m{self.made}", state="running")
                    self.met["came back"] += 1
            self.a_round()

    @step()
    def a_drained_node_is_empty_and_its_diagnostic_ends(self) -> None:
        for uid, work in list(self.workloads.running.items()):
            if self.cluster.level(work.node) is Level.DRAIN:
                self.cluster.leave(uid)
        self.a_round()
        kind = self.one_of("passed", "failed", "inconclusive", None)
        for node, _ in self.cluster.verification.started.values():
            self.met["diagnostics"] += 1
            self.cluster.verification.results.pop(node, None)
            if kind is not None:
                self.cluster.verification.results[node] = DiagnosticResult(kind)

    @step(3)
    def something_fails_in_a_round(self) -> None:
        part, kind = self.one_of(*CALLS), self.one_of(*KINDS.split())
        faults = {"workloads": self.workloads, "verification": self.cluster.verification}.get(part, self.scheduler)
        self.cluster.clock.move(MINUTE)
        faults.faults.plan(kind, self.one_of(*CALLS[part].split()), self.one_of(0, 0, 1, 3))
        self._work_at_risk("running", UNRESTRICTED, self.one_of(None, SCHEDULER))

    @step()
    def a_marker_expires_while_nothing_new_can_be_stored(self) -> None:
        node = self._marked()
        self.cluster.clock.move(13 * HOUR)
        self.cluster.scored(**{node: self.one_of(0.4, 0.95)})
        self.met["expired"] += bool(self._expired())
        self.scheduler.faults.plan(self.one_of("refused", "timeout_before"), "save_state")
        self.a_round()

    @step()
    def another_leader_has_another_clock(self) -> None:
        self.scheduler.lease = None
        self.cluster.clock.move(timedelta(seconds=self.one_of(-20, 20)))
        self.cluster.restart()
        self.a_round()
        self.met["another clock"] += 1

    @step()
    def the_ledger_is_lost(self) -> None:
        self.cluster.ledger = new_ledger(self.random)
        self._another_process()

    @step(3)
    def a_round(self) -> None:
        cluster, scheduler = self.cluster, self.scheduler
        cluster.clock.move(MINUTE / 2)
        theirs = {name: scheduler.nodes[name] for name in self.other.levels()}
        before, nodes, results = cluster.levels(), dict(scheduler.nodes), cluster.evacuation.results()
        lost = self._lost(before)
        blocked = {work.node for uid, work in self.workloads.running.items() if uid in self.workloads.blocked}
        try:
            report = cluster.round()
        except Crash:
            report = None
            self.crashes += 1
            self.met["crashes"] += 1
            self._another_process()
        reached = not RELEASING & scheduler.faults.failed
        cluster.clear_faults()
        assert {name: scheduler.nodes[name] for name in theirs} == theirs
        after = cluster.levels()
        newly = [name for name, level in after.items() if level.hard and not before.get(name, Level.NONE).hard]
        self._floors(newly, lost, self._lost(after))
        for name in newly:
            assert nodes[name].base.readable
            assert not nodes[name].object.unschedulable
            assert "predrain.io/managed" not in nodes[name].object.labels
            assert not scheduler.switches.kill
        if report is None or not report.active:
            return
        assert not (reached and self._expired()), "an expired prediction still has a marker"
        # a node with a stuck budget loses its taint only by the controller's own release, never for being stuck
        released = {step.action.node for step in report.steps if step.action.verb == "release"}
        assert all(
            cluster.level(name) is Level.DRAIN
            for name in blocked - released
            if before.get(name) is Level.DRAIN and scheduler.nodes[name].base.readable
        )
        if report.failed:
            return
        self.met["releases"] += len(released)
        assert silent_waits(report, self.workloads, cluster.levels(), cluster.clock.now()) == []
        self._stand(report, released)
        outcomes = {step.outcome for step in (*report.steps, *report.work)}
        open_ends = outcomes & {"skipped", "held", "failed", "unknown", "gone"}  # gone: also after a planned conflict
        if not open_ends and cluster.evacuation.results() == results and self.happens(0.2):
            self._nothing_more(after, before)

    def _stand(self, report, released) -> None:
        """Confirmed marks are on the node."""
        after = self.cluster.levels()
        assert self.cluster.ledger.unsettled() == ()
        self.cluster.ledger.open_calls()
        for done in report.steps:
            if done.outcome in ("done", "already") and done.action.node not in released:
                assert after[done.action.node] >= done.action.to, "confirmed, and it does not stand"

    def _expired(self) -> list[str]:
        """Readable nodes with a marker whose prediction has expired, or that has none."""
        now, expired = self.cluster.clock.now(), []
        for name in self.cluster.levels():
            if self.scheduler.nodes[name].base.readable:
                published = self.scheduler.revalidate(name).view.marks.published
                expired += [name] if published is None or published.expires_at <= now else []
        return expired

    def _nothing_more(self, after, before) -> None:
        """A second run does nothing again, and where no node came back into service nothing at all."""
        nodes = dict(self.scheduler.nodes)
        again = self.cluster.round()
        work = {(step.verb, step.outcome) for step in again.work}
        assert not {("checkpoint", "done"), ("evict", "done"), ("evict", "blocked")} & work
        if all(after.get(name, Level.NONE).hard for name, level in before.items() if level.hard):
            assert again.steps == []
            assert self.scheduler.nodes == nodes

    def _another_process(self) -> None:
        self.cluster.clear_faults()
        self.cluster.clock.move(MINUTE)  # the lease of the dead one ends
        self.cluster.restart()

    @step()
    def another_installation_does_a_round(self) -> None:
        ours = {name: self.scheduler.nodes[name] for name in self.cluster.levels()}
        assert self.other.round().active
        assert {name: self.scheduler.nodes[name] for name in ours} == ours

    def _node(self) -> str:
        return self.one_of(*self.names)

    def _marked(self) -> str:
        """A node with marks of ours, if one can have some."""
        node = self.one_of(*self.cluster.levels() or self.names)
        if not self.cluster.level(node):
            self.cluster.clock.move(25 * HOUR)  # the rate allows another one
            self.cluster.scored(**{node: self.one_of(0.4, 0.95)})
            self.a_round()
        return node

    def _of_ours(self, node: str) -> set[object]:
        """All that stands under our names."""
        target = self.scheduler.nodes[node].object
        texts = {*target.labels.items(), *target.annotations.items()}
        taints = {taint for taint in target.taints if taint.key == self.keys.taint}
        return {item for item in texts if item[0] in self.ours} | taints

    def _claim(self, node, change, what: str) -> None:
        """Somebody changes what stands under our names; without an intact record all of it is theirs."""
        before = self._of_ours(node)
        self.cluster.write(node, change)
        now = self._of_ours(node)
        if now == before:
            return
        recorded = {item for item in now if isinstance(item, tuple) and item[0] == self.keys.applied}
        proved = recorded and recorded <= before and not self.claimed.get(node, set()) & recorded
        mine = before if proved else set()
        self.claimed[node] = self.claimed.get(node, set()) - (before - now) | (now - mine)
        self.met[what] += 1

    def _lost(self, levels) -> Counter:
        def is_lost(name: str) -> bool:
            base, target = self.scheduler.nodes[name].base, self.scheduler.nodes[name].object
            return levels.get(name, Level.NONE).hard or base.down or not base.readable or target.unschedulable

        return self._scopes(filter(is_lost, self.names))

    def _scopes(self, names) -> Counter:
        return Counter(scope for name in names for scope in self.scheduler.nodes[name].base.scopes)

    def _floors(self, newly, before, after) -> None:
        if not self.budgeted or not newly:
            return
        total = self._scopes(self.names)
        views = [node.base for node in self.scheduler.nodes.values()]
        # a job that does not go on without a node stops once, whether it loses one of its nodes or all
        gangs = {("job", f"{view.cluster}/{job.name}") for view in views for job in view.jobs if not job.can_shrink}
        touched = {scope for name in newly for scope in self.scheduler.nodes[name].base.scopes} - gangs
        for floor in DISRUPTION_BUDGETS:
            for scope in {scope for scope in touched if scope[0] == floor.scope}:
                assert after[scope] <= max(floor.allowed(total[scope]), before[scope]), scope
        now = self.cluster.clock.now().timestamp()
        self.begun += [(now, name) for name in newly]
        window = RATE_LIMITS[0].window.total_seconds()
        assert len({name for at, name in self.begun if at > now - window}) <= RATE_LIMITS[0].max_nodes

    def _watched_evict(self, asked, fence):
        target = self.workloads.running.get(asked.uid)
        if target is None or target.ending:
            return self._evict(asked, fence)
        self._may_go(target)
        drain = self.cluster.progress().nodes[target.node].began_at
        answer = self._evict(asked, fence)
        moved = self.workloads.running[target.uid].ending
        self.moved[target.node, drain, target.origin or target.name] += moved
        self.met["evictions"] += moved
        return answer

    def _watched_ask(self, asked, request, fence):
        assert self.cluster.level(asked.node) is Level.DRAIN
        assert "predrain.io/managed" not in self.scheduler.nodes[asked.node].object.labels
        self.met["requests"] += 1
        return self._ask(asked, request, fence)

    def _watched_start(self, node, units, key, fence, remedy=None, *, probe=False):
        switches = self.scheduler.switches
        assert not probe or not (self.cluster.level(node).hard or switches.kill or switches.release_all)
        assert not probe or not self.scheduler.nodes[node].object.unschedulable
        assert probe or self.cluster.level(node) is Level.DRAIN
        assert not [w for w in self.workloads.running.values() if w.node == node and w.stays is None], "not empty"
        return self._start(node, units, key, fence, remedy, probe=probe)

    def _may_go(self, target) -> None:
        cluster, now = self.cluster, self.cluster.clock.now()
        node = self.scheduler.nodes[target.node]
        assert cluster.level(target.node) is Level.DRAIN, "no drain mark stands"
        assert node.base.readable
        assert not node.object.unschedulable
        assert "predrain.io/managed" not in node.object.labels
        assert not self.scheduler.switches.kill
        assert (target.state, target.placement.elsewhere) == ("running", True)
        assert (target.opt_out, target.loss, target.stays) == (None, None, None)
        published = self.scheduler.revalidate(target.node).view.marks.published
        assert published.expires_at > now, "its prediction has expired"
        # what hangs has lost its place
        evicted = {uid for at, _, uid in self.workloads.evicted if now < at + FAST.retry_max_delay}
        # what its owner ends, or ends on a node that is no more drained, is not the controller's to count
        going = [
            work
            for work in self.workloads.running.values()
            if work.ending and work.uid in evicted and cluster.level(work.node) is Level.DRAIN
        ]
        # a job that stops is not stopped once more for the rest of its parts
        most = cluster.evacuation_settings.max_concurrent
        assert len(going) < most or target.gang in {work.gang for work in going} - {None}, "too many at once"
        if target.checkpoint is None or target.uid in self.workloads.cannot:
            return
        leaving = cluster.progress().nodes[target.node].leaving[target.uid]
        shown = self.workloads.asked.get(target.uid)
        written = shown is not None and shown.key in self.workloads.written
        assert written or (leaving.deadline is not None and now >= leaving.deadline), "neither written nor waited for"
        if not written and shown is not None and shown.key == leaving.key:
            assert now >= shown.deadline


MET = (
    "taints removed", "taint edited", "annotation edited", "marks copied", "came back", "another clock", "crashes",
    "evictions", "requests", "releases", "diagnostics", "expired",
    *(f"{what} work on a drained node" for what in ("movable", "pinned", "undecided", "suspended", "held")),
)  # fmt: skip


@pytest.mark.parametrize("block", blocks(COUNT * 7 // 10))
def test_whatever_happens_nothing_foreign_changes_nothing_pinned_moves_and_all_of_ours_ends(block: range) -> None:
    play_all(ClusterHistory, block, MET)
