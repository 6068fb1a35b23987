"""Random histories of a cluster with a process that dies at any call: what must hold whatever happens."""

from collections import Counter
from dataclasses import replace
from datetime import timedelta

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from policy.fleet import Fact, Level
from scheduler.ports.node_object import Keys, Taint
from scheduler.ports.readings import Switches
from scheduler.ports.risks import ReportedFacts
from tests.policy.decide_world import HOUR
from tests.scheduler.cluster import DISRUPTION_BUDGETS, RATE_LIMITS, Cluster, ClusterHistories, without_our_taints
from tests.scheduler.faults import Crash

COUNT = 5
NODES = st.sampled_from([f"n{i}" for i in range(COUNT)])
WRITES = ("apply", "save_state")
READS = ("revalidate", "read_switches", "hold_lease", "load_state", "read_fleet")
MINUTE = timedelta(minutes=1)
NEWS = st.sampled_from([0.01, 0.4, 0.8, 0.95])


class Histories(ClusterHistories):
    """People, tools, faults and crashes around a controller."""

    def __init__(self) -> None:
        super().__init__(Cluster(COUNT, lease=timedelta(seconds=30)))
        self.begun: list[tuple[float, str]] = []
        self.other = Cluster(COUNT, lease=timedelta(seconds=30))  # another installation on the same nodes
        self.other.scheduler.nodes, self.other.clock = self.cluster.scheduler.nodes, self.cluster.clock
        self.other.scheduler._clock, self.other.risks = self.cluster.clock, self.cluster.risks
        self.other.scheduler.keys = Keys(owner="other")
        self.other.restart()
        self.claimed: dict[str, set[object]] = {}  # what somebody made of our marks on a node, and is theirs since

    @rule(node=NODES, risk=st.sampled_from([0.01, 0.15, 0.4, 0.7, 0.9, None]))
    def one_is_scored(self, node, risk):
        self.cluster.scored(**{node: risk})

    @rule(nodes=st.sets(NODES, max_size=4), risk=st.sampled_from([0.7, 0.95]))
    def some_are_scored(self, nodes, risk):
        self.cluster.scored(**dict.fromkeys(nodes, risk))

    @rule()
    def all_are_well_scored(self):
        self.cluster.scored(**dict.fromkeys(self.cluster.names, 0.01))

    @rule(hours=st.sampled_from([0.01, 0.5, 3, 7, 13, 30]))
    def time_passes(self, hours):
        self.cluster.clock.move(hours * HOUR)

    @rule(node=NODES)
    def a_person_cordons_or_uncordons(self, node):
        self._theirs(node, lambda node: replace(node, unschedulable=not node.unschedulable))

    @rule(node=NODES, key=st.sampled_from(["predrain.io/managed", "other.example/x"]))
    def a_person_labels(self, node, key):
        # the opt-out stands under our prefix and is theirs all the same
        def change(target):
            labels = dict(target.labels)
            if labels.pop(key, None) is None:
                labels[key] = "false"
            return replace(target, labels=labels)

        self._theirs(node, change)

    @rule(node=NODES)
    def a_person_takes_our_taints_off(self, node):
        self.cluster.write(node, lambda node: without_our_taints(node, self.cluster))
        self.claimed[node] = {item for item in self.claimed.get(node, ()) if not isinstance(item, Taint)}

    @rule(node=NODES, value=st.sampled_from(["rma-4711", "High"]))
    def a_person_edits_our_taints(self, node, value):
        def change(target):
            taints = [
                replace(taint, value=value) if taint.key == self._keys.taint else taint for taint in target.taints
            ]
            return replace(target, taints=tuple(taints))

        self._claim(node, change)

    @rule(node=NODES, key=st.sampled_from(["prediction", "applied", "drain"]))
    def a_person_edits_an_annotation(self, node, key):
        name = getattr(self._keys, key)

        def change(target):
            text = target.annotations.get(name)
            notes = {} if text is None else {name: f"{text} - RMA 4711"}
            return replace(target, annotations={**target.annotations, **notes})

        self._claim(node, change)

    @rule(node=NODES, other=NODES, record=st.booleans())
    def a_tool_copies_our_marks_to_another_node(self, node, other, record):
        source = self.cluster.scheduler.nodes[node].object
        taints = tuple(taint for taint in source.taints if taint.key == self._keys.taint)
        if node == other or not taints or self._of_ours(other):
            return
        notes = {key: text for key, text in source.annotations.items() if record and key.startswith("predrain.io/")}

        def change(target):
            return replace(target, taints=(*target.taints, *taints), annotations={**target.annotations, **notes})

        self._claim(other, change)

    @rule(node=NODES)
    def a_person_cleans_a_node(self, node):
        def change(target):
            labels, notes = (
                {key: text for key, text in texts.items() if key.partition("=")[0] not in self._names}
                for texts in (target.labels, target.annotations)
            )
            taints = tuple(taint for taint in target.taints if taint.key != self._keys.taint)
            return replace(target, labels=labels, annotations=notes, taints=taints)

        self.cluster.write(node, change)
        self.claimed.pop(node, None)

    @rule(node=NODES, what=st.sampled_from(["down", "readable"]))
    def a_node_changes(self, node, what):
        self.cluster.change(node, **{what: not getattr(self.cluster.scheduler.nodes[node].base, what)})

    @rule(node=NODES)
    def a_gpu_falls_off_the_bus(self, node):
        self.cluster.facts.facts[f"{node}-0"] = ReportedFacts((Fact("xid 79", self.cluster.clock.now()),))

    @rule(node=NODES)
    def a_gpu_is_repaired(self, node):
        self.cluster.facts.facts[f"{node}-0"] = ReportedFacts((), self.cluster.clock.now())

    @rule(kill=st.booleans(), release=st.booleans())
    def a_person_sets_the_switches(self, kill, release):
        self.cluster.scheduler.switches = Switches(kill=kill, release_all=release)

    @rule(
        kind=st.sampled_from(["crash_before", "crash_after"]), call=st.sampled_from([*WRITES, *WRITES, *READS]),
        skip=st.integers(0, 4), node=NODES, risk=NEWS,
    )  # fmt: skip
    def the_process_dies_in_a_round(self, kind, call, skip, node, risk):
        self._with_news(node, risk)
        self.cluster.scheduler.faults.plan(kind, call, skip)
        self.a_round()

    @rule(
        kind=st.sampled_from(["conflict", "refused", "timeout_before", "timeout_after"]), call=st.sampled_from(WRITES),
        skip=st.integers(0, 4), node=NODES, risk=NEWS,
    )  # fmt: skip
    def a_write_fails(self, kind, call, skip, node, risk):
        self._with_news(node, risk)
        self.cluster.scheduler.faults.plan(kind, call, skip)
        self.a_round()

    @rule(call=st.sampled_from(READS), skip=st.integers(0, 4), node=NODES, risk=NEWS)
    def a_read_fails(self, call, skip, node, risk):
        self._with_news(node, risk)
        self.cluster.scheduler.faults.plan("unreadable", call, skip)
        self.a_round()

    @rule()
    def another_installation_does_a_round(self):
        self._others_round()

    def _others_round(self):
        ours = {name: self.cluster.scheduler.nodes[name] for name in self.cluster.levels()}
        assert self.other.round().active
        assert {name: self.cluster.scheduler.nodes[name] for name in ours} == ours

    @rule()
    def a_round(self):
        cluster = self.cluster
        theirs = {name: cluster.scheduler.nodes[name] for name in self.other.levels()}
        before, objects = cluster.levels(), dict(cluster.scheduler.nodes)
        lost_before = self._lost(before)
        try:
            report = cluster.round()
        except Crash:
            report = None
            self.another_process()
        assert {name: cluster.scheduler.nodes[name] for name in theirs} == theirs
        after = cluster.levels()
        newly = [n for n, level in after.items() if level.hard and not before.get(n, Level.NONE).hard]
        self._floors(newly, lost_before, self._lost(after))
        now = cluster.clock.now()
        for name in newly:
            base, target = objects[name].base, objects[name].object
            assert base.readable
            assert not target.unschedulable
            assert "predrain.io/managed" not in target.labels
            assert not cluster.scheduler.switches.kill
        cluster.scheduler.faults.clear()
        if report is None or report.failed or not report.active:
            return
        for name, node in cluster.scheduler.nodes.items():
            if not node.base.readable or not after.get(name):
                continue
            text = node.object.annotations.get(cluster.scheduler.keys.prediction)
            assert text is not None, "a mark that says not until when it holds"
            published = cluster.scheduler.revalidate(name).view.marks.published
            assert published.expires_at > now, "a mark stands on an expired prediction"
        assert cluster.ledger.unsettled() == ()
        given_back = {step.action.node for step in report.steps if step.action.verb == "release"}
        for step in report.steps:
            if step.outcome in ("done", "already") and step.action.node not in given_back:
                assert after[step.action.node] >= step.action.to, "confirmed, and it does not stand"
        came_back = any(s.action.verb == "release" and s.action.to < Level.SWAP for s in report.steps)
        skipped = any(s.outcome == "skipped" for s in report.steps)
        if not came_back and not skipped and cluster.restarts % 2:  # it takes as long as all else
            nodes = dict(cluster.scheduler.nodes)
            again = cluster.round()
            assert again.steps == []
            assert dict(cluster.scheduler.nodes) == nodes

    @invariant()
    def what_somebody_made_of_ours_stands(self):
        for name, claimed in self.claimed.items():
            assert claimed <= self._of_ours(name), "what somebody edited or copied stands"

    def teardown(self):
        for name in self.cluster.names:
            self.cluster.change(name, readable=True)
        self.everything_ends()
        self._others_round()
        for name in self.cluster.names:
            assert self.claimed.get(name) or not self._of_ours(name)

    def _with_news(self, node, risk):
        # so that there is something to do in which to fail
        self.cluster.clock.move(MINUTE)
        self.cluster.scored(**{node: risk})

    @property
    def _keys(self):
        return self.cluster.scheduler.keys

    @property
    def _names(self):
        return {self._keys.tier, self._keys.prediction, self._keys.applied, self._keys.drain}

    def _of_ours(self, node):
        """All that stands under our names."""
        target = self.cluster.scheduler.nodes[node].object
        texts = {*target.labels.items(), *target.annotations.items()}
        return {item for item in texts if item[0] in self._names} | {
            t for t in target.taints if t.key == self._keys.taint
        }

    def _claim(self, node, change):
        """Somebody changes what stands under our names; without an intact record all of it is theirs."""
        before = self._of_ours(node)
        self.cluster.write(node, change)
        now = self._of_ours(node)
        if now == before:
            return
        keys = self._keys
        recorded = {item for item in now if isinstance(item, tuple) and item[0] == keys.applied}
        proved = recorded and recorded <= before and not self.claimed.get(node, set()) & recorded
        mine = before if proved else set()
        self.claimed[node] = self.claimed.get(node, set()) - (before - now) | (now - mine)

    def _theirs(self, node, change):
        self.cluster.write(node, change)
        self.theirs = self.cluster.foreign()

    def _lost(self, levels):
        out = []
        for name, node in self.cluster.scheduler.nodes.items():
            hard = levels.get(name, Level.NONE).hard
            if hard or node.base.down or not node.base.readable or node.object.unschedulable:
                out.append(name)
        return self._scopes(out)

    def _scopes(self, names):
        nodes = self.cluster.scheduler.nodes
        return Counter(scope for name in names for scope in nodes[name].base.scopes)

    def _floors(self, newly, before, after):
        total = self._scopes(self.cluster.names)
        views = [node.base for node in self.cluster.scheduler.nodes.values()]
        # a job that does not go on without a node stops once, whether it loses one of its nodes or all
        gangs = {("job", f"{view.cluster}/{job.name}") for view in views for job in view.jobs if not job.can_shrink}
        touched = {scope for name in newly for scope in self.cluster.scheduler.nodes[name].base.scopes} - gangs
        for floor in DISRUPTION_BUDGETS:
            for scope in {scope for scope in touched if scope[0] == floor.scope}:
                assert after[scope] <= max(floor.allowed(total[scope]), before[scope]), scope
        now = self.cluster.clock.now().timestamp()
        self.begun += [(now, name) for name in newly]
        window = RATE_LIMITS[0].window.total_seconds()
        assert len({name for at, name in self.begun if at > now - window}) <= RATE_LIMITS[0].max_nodes


Histories.TestCase.settings = settings(
    max_examples=150, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHistories = Histories.TestCase
