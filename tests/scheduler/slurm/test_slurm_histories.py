"""Random histories of a Slurm cluster with a process that dies at any call: what must hold whatever happens."""

import os
import shutil
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from policy.fleet import Level
from scheduler.evacuation.progress import stored_progress
from scheduler.ports.readings import Switches
from scheduler.slurm.job import Requirements, SlurmJob
from scheduler.slurm.marks import KEY, slurm_marks_on, with_record
from scheduler.slurm.node import SlurmNode
from scheduler.slurm.settings import SlurmSettings
from tests.policy.decide_world import HOUR, T0
from tests.scheduler.cluster import RATE_LIMITS
from tests.scheduler.evacuation.emptying_cluster import silent_waits
from tests.scheduler.faults import Crash, Watch
from tests.scheduler.slurm.memory_port import MemorySlurm
from tests.scheduler.slurm.slurm_world import LEASE, World

NODES = st.sampled_from([f"n{i}" for i in range(8)])
ANY = Requirements()
NEEDS = (
    lambda _: {}, lambda _: {}, lambda nodes: {"nodes": frozenset(nodes)}, lambda _: {"reservation": "gone"},
    lambda _: {"partitions": frozenset({"closed"})},
    lambda nodes: {"excluded": frozenset(f"n{i}" for i in range(8)) - {*nodes}},
)  # fmt: skip
FACTS = (
    {}, {}, {}, {}, {"states": frozenset({"SUSPENDED"})}, {"held": True}, {"requeue": False}, {"batch": False},
    {"comment": "predrain.keep"}, {"start_by": T0},
)  # fmt: skip
IN_MEMORY = next((path for path in ("/dev/shm",) if os.access(path, os.W_OK)), None)
"""Where the shared folder is: half of a history would be waiting for the disk."""
EVENLY = st.randoms(use_true_random=True)
"""Draws evenly, which hypothesis does not."""
FAULTS = st.sampled_from(["refused", "timeout_before", "timeout_after", "crash_before", "crash_after"])


class Watched(MemorySlurm):
    """It sees to it that nothing is written where another's reason stands, and no work is reached that may not be."""

    crash: str | None = None
    settings = SlurmSettings("/nowhere")  # of the installation that writes
    kill = False

    def __init__(self, clock):
        super().__init__(clock)
        self.watch = Watch()
        for name in ("update", "signal", "requeue"):
            setattr(self, name, self.watch.over(getattr(self, f"_{name}")))

    def _update(self, node, change):
        current = self.all[node]
        theirs = current.reason is not None and not self.marks(node).tainted
        if theirs:
            assert (change.state, change.reason) == (None, None), (current, change)
        assert current.readable, (current, change)
        assert not current.relied_on, (current, change)
        return self._crashing("update", MemorySlurm.update, node, change)

    def _signal(self, job, signal):
        assert self.reached(job.name) == [job], "another task is reached"
        assert any(self.marks(name).drained for name in job.nodes)
        assert "RUNNING" in job.states
        return self._crashing("signal", MemorySlurm.signal, job, signal)

    def _requeue(self, job):
        reached = self.reached(job.requeue_name)
        assert reached == [job] or "+" in job.name, "another task is reached"
        drained = [name for other in reached for name in other.nodes if self.marks(name).drained]
        assert drained, "nothing of it is on a node that is drained"
        assert not self.kill
        for other in reached:
            assert other.states == {"RUNNING"}
            assert other.batch
            assert other.requeue
            assert not other.held
            assert "keep" not in other.comment
            assert not other.needs.nodes & {*drained}, "it requires the node"
            assert not other.needs.reservation, "which nodes it may use is not known"
            assert not other.needs.partitions, "its partition is down"
            free = {name for name, node in self.all.items() if not node.out and not node.down}
            assert len(free - {*other.needs.excluded, *drained}) >= len(other.nodes), "there is no other place"
        return self._crashing("requeue", MemorySlurm.requeue, job)

    def _crashing(self, name, call, *args):
        crash, self.crash = self.crash, None
        if crash == "crash_before":
            raise Crash(name)
        answer = call(self, *args)
        if crash == "crash_after":
            raise Crash(name)
        return answer

    def marks(self, node):
        return slurm_marks_on(self.all[node], self.settings, self.clock.now()).marks


class SlurmHistories(RuleBasedStateMachine):
    """People, tools, faults and crashes around a controller on Slurm."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="sh", dir=IN_MEMORY))
        self.world = World(self.folder, evacuates=True)
        watched = Watched(self.world.clock)
        watched.all, watched.configured = self.world.slurm.all, self.world.slurm.configured
        self.world.slurm = watched
        self.world.restart()
        self.other = World(self.folder / "other", installation="other")
        self.other.slurm, self.other.clock, self.other.risks = watched, self.world.clock, self.world.risks
        self.other.restart()
        self.extras = {name: item.extra for name, item in watched.all.items()}
        self.reasons: dict[str, tuple[frozenset[str], str | None]] = {}
        self.frozen: dict[str, SlurmNode] = {}  # with a record that somebody edited: nothing on it is ours any more
        self.wiped: set[str] = set()  # of these the record with the weight that was found may be gone
        self.taken = self.made = 0

    @property
    def slurm(self) -> Watched:
        assert isinstance(self.world.slurm, Watched)
        return self.world.slurm

    @rule(node=NODES, risk=st.sampled_from([0.01, 0.15, 0.4, 0.7, 0.95, None]))
    def one_is_scored(self, node, risk):
        self.world.scored(**{node: risk})

    @initialize(node=NODES, random=EVENLY)
    def a_history_begins_with_work_at_risk(self, node, random):
        self.work_runs_on_a_node_at_risk(node, random)

    @rule(node=NODES, random=EVENLY)
    def work_runs_on_a_node_at_risk(self, node, random):
        mark, width = random.choice([("", 1), ("", 1), ("", 2), ("_", 3), ("+", 3)])
        facts, needs, names = random.choice(FACTS), random.choice(NEEDS), sorted(self.slurm.all)
        nodes = tuple((names + names)[names.index(node) :][:width])
        first, comment = self.made + 1, random.choice(["", "predrain.checkpoint=USR1"])
        self.made += width
        for index, places in enumerate([nodes] if not mark else [(place,) for place in nodes]):
            number = first + index  # of the first task that of the array, of the first component that of the whole job
            known = {
                "needs": replace(ANY, **needs(places)), "comment": comment, "gpus": 8 * len(places), "requeue": True,
                "batch": True, "started_at": self.world.clock.now(), **facts,
            }  # fmt: skip
            self.slurm.running[number] = SlurmJob(
                number, f"{first}{mark}{index if mark else ''}", first if mark == "+" else number, f"{number}.0",
                places, **{"states": frozenset({"RUNNING"}), **known},
            )  # fmt: skip
        self.world.clock.move(25 * HOUR)  # the rate allows another one
        for _ in range(3):
            self.world.scored(**{node: 0.95})
            self._round()
            self.world.clock.move(HOUR / 12)

    @rule(data=st.data(), what=st.sampled_from(["ends", "suspend", "resume", "hold", "answer", "pin", "completes"]))
    def something_happens_to_a_job(self, data, what):
        running = self.slurm.running
        if not running:
            return
        number = data.draw(st.sampled_from(sorted(running)))
        job = running[number]
        if what == "ends":
            del running[number]
            return
        states = {"suspend": {"SUSPENDED"}, "resume": {"RUNNING"}, "completes": {"COMPLETING"}}
        changes = {
            "hold": {"held": not job.held}, "pin": {"needs": replace(job.needs, nodes=frozenset(job.nodes))},
            "answer": {"comment": f"{job.comment} predrain.checkpointed={number}"},
            **{name: {"states": frozenset(value)} for name, value in states.items()},
        }  # fmt: skip
        running[number] = replace(job, **changes[what])

    @rule(rounds=st.integers(1, 4))
    def what_was_requeued_comes_back_to_its_nodes(self, rounds):
        for _ in range(rounds):
            before = dict(self.slurm.running)
            self._round()
            for number in before.keys() - self.slurm.running.keys():
                self.slurm.running[number] = replace(before[number], uid=f"{before[number].uid}+")

    @rule(seconds=st.sampled_from([-20, 20]))
    def another_leader_has_another_clock(self, seconds):
        self.world.clock.move(timedelta(seconds=seconds))
        self.world.seconds -= seconds
        self.another_process_takes_over()

    @rule(hours=st.sampled_from([0.01, 0.5, 7, 13]))
    def time_passes(self, hours):
        self.world.clock.move(hours * HOUR)

    @rule(node=NODES, state=st.sampled_from(["DRAIN", "FAIL"]), reason=st.sampled_from(["bad disk", "predrain: mine"]))
    def a_person_drains(self, node, state, reason):
        self._theirs(node, state, reason)

    @rule(node=NODES, more=st.sampled_from([" - RMA 4711, keep out", " ", " : reboot issued"]))
    def somebody_appends_to_a_reason(self, node, more):
        if self.slurm.all[node].out:
            self._theirs(node, None, f"{self.slurm.all[node].reason}{more}")

    @rule(node=NODES)
    def a_person_takes_a_drain_over_in_the_same_words(self, node):
        if self.slurm.all[node].out:
            self._theirs(node, None, self.slurm.all[node].reason)

    @rule(node=NODES, other=NODES, record=st.booleans())
    def a_person_copies_a_drain_to_another_node(self, node, other, record):
        source, target = self.slurm.all[node], self.slurm.all[other]
        if source.out and other not in self.frozen and node != other:
            self._theirs(other, "DRAIN", source.reason)
            if record and KEY in source.extra and KEY not in target.extra:
                self._edit(other, extra=source.extra)

    @rule(node=NODES)
    def a_person_edits_the_record(self, node):
        extra = self.slurm.all[node].extra
        if '"level": "' in extra and node not in self.frozen:
            self._edit(node, extra=extra.replace('"level": "', '"note": "RMA 4711", "level": "'))

    @rule(node=NODES)
    def a_person_reboots_the_node(self, node):
        self._cleaned(node)
        current = self.slurm.all[node]
        self.slurm.all[node] = replace(current, states=current.states | {"REBOOT_ISSUED", "DOWN"} - {"IDLE"})
        before = self.slurm.all[node]
        self._round()
        assert self.slurm.all[node] == before
        self.a_person_resumes(node)

    @rule(node=NODES)
    def a_person_resumes(self, node):
        self._cleaned(node)
        self.slurm.person(node, "RESUME")
        self.reasons.pop(node, None)

    @rule(node=NODES, extra=st.sampled_from(["", "note", '{"rack": 4}']))
    def a_person_writes_the_whole_extra(self, node, extra):
        current = self.slurm.all[node]
        self.frozen.pop(node, None)
        if current.out:  # without its record a drain is nobody's, and stays until somebody resumes the node
            self.reasons[node] = (current.out, current.reason)
        self.slurm.all[node] = replace(current, extra=extra)
        self.extras[node] = extra
        self.wiped.add(node)

    @rule(node=NODES, weight=st.sampled_from([5, 900]))
    def a_person_configures_a_weight(self, node, weight):
        self.slurm.configured[node] = weight
        self.slurm.all[node] = replace(self.slurm.all[node], weight=weight)
        if node in self.frozen:
            self.frozen[node] = replace(self.frozen[node], weight=weight)

    @rule()
    def slurm_is_reconfigured(self):
        self.slurm.reconfigure()
        self.frozen = {name: replace(node, weight=self.slurm.all[name].weight) for name, node in self.frozen.items()}

    @rule(fault=FAULTS)
    def a_write_will_fail(self, fault):
        if fault.startswith("crash"):
            self.slurm.crash = fault
        else:
            self.slurm.failing.append(fault)

    @rule(kill=st.booleans())
    def a_person_switches(self, kill):
        self.world.scheduler.set_switches(Switches(kill=kill))
        self.slurm.kill = kill

    @rule()
    def another_process_takes_over(self):
        self.world.restart()
        self._round()  # it sees the other one's lease
        self.world.clock.move(LEASE)

    @rule()
    def the_controller_does_a_round(self):
        self._round()

    @rule(node=NODES)
    def another_installation_marks_a_node_that_is_below_our_thresholds_soon_after(self, node):
        self._quiet()
        self.world.scored(**{node: 0.95})
        self._others(self.other.round)
        self.world.clock.move(HOUR / 60)
        self.world.scored(**{node: 0.01})
        self._round()

    @rule()
    def a_second_round_changes_nothing(self):
        self._quiet()
        self._round()
        self._round()
        writes = len(self.slurm.writes)
        self._round()
        assert self.slurm.writes[writes:] == []

    def _theirs(self, node, state, reason):
        self.slurm.person(node, state, reason)
        current = self.slurm.all[node]
        self.reasons[node] = (current.out, current.reason)
        if node in self.frozen:
            self.frozen[node] = current

    def _edit(self, node, extra):
        """Somebody writes a record that predrain did not write so."""
        self.slurm.all[node] = replace(self.slurm.all[node], extra=extra)
        self.frozen[node] = self.slurm.all[node]
        self.wiped.add(node)

    def _cleaned(self, node):
        """Somebody removes a record that they edited."""
        if self.frozen.pop(node, None) is not None:
            self.slurm.all[node] = replace(self.slurm.all[node], extra=self.extras[node])

    def _others(self, act):
        """Another installation acts: on nothing that is ours."""
        ours = {name: node for name, node in self.slurm.all.items() if self.world.level(name)}
        self.slurm.settings = self.other.settings
        try:
            assert act().active
        finally:
            self.slurm.settings = self.world.settings
        assert {name: self.slurm.all[name] for name in ours} == ours

    def _quiet(self):
        self.slurm.crash, self.slurm.failing = None, []

    def _round(self):
        before = {name for name in self.slurm.all if self.world.level(name).hard}
        theirs = {name: node for name, node in self.slurm.all.items() if self.other.level(name)}
        try:
            report = self.world.round()
            if report.active and not report.failed:
                levels = {name: self.world.level(name) for name in self.slurm.all}
                assert silent_waits(report, self.world.workloads, levels, self.world.clock.now()) == []
        except Crash:
            self.world.restart()
            self.world.round()
            self.world.clock.move(LEASE)
        assert {name: self.slurm.all[name] for name in theirs} == theirs
        after = {name for name in self.slurm.all if self.world.level(name).hard}
        self.taken = max(len(after - before), self.taken)

    @invariant()
    def every_call_was_allowed(self):
        assert self.slurm.watch.broken == []

    @invariant()
    def what_people_wrote_stands(self):
        for name, (out, reason) in self.reasons.items():
            node = self.slurm.all[name]
            assert (node.out, node.reason) == (out, reason)
        for name, extra in self.extras.items():
            if name in self.frozen:
                assert self.slurm.all[name] == self.frozen[name]
            else:
                assert with_record(self.slurm.all[name].extra, None, name, "predrain") == extra

    @invariant()
    def no_more_at_once_than_the_rate_allows(self):
        assert self.taken <= RATE_LIMITS[0].max_nodes

    def teardown(self):
        try:
            self._quiet()
            self.world.clock.move(LEASE)
            self.world.restart()
            if self.made % 2:  # all of it ends by itself
                self.world.clock.move(timedelta(hours=13))
            else:
                self.world.scheduler.set_switches(Switches(release_all=True))
                self.other.scheduler.set_switches(Switches(release_all=True))
            for _ in range(3):
                self.world.clock.move(LEASE)
                self._others(self.other.round)
                self.world.round()
            progress = stored_progress(self.world.workloads)
            assert progress.load() is None
            assert progress.value.nodes == {}
            for name, node in self.slurm.all.items():
                assert self.world.level(name) is Level.NONE
                if name in self.frozen:
                    assert node == self.frozen[name]
                    continue
                assert node.extra == self.extras[name], (name, node, self.extras[name])
                assert node.out == (self.reasons[name][0] if name in self.reasons else frozenset())
                assert node.weight == self.slurm.configured[name] or name in self.wiped
        finally:
            shutil.rmtree(self.folder)


SlurmHistories.TestCase.settings = settings(
    max_examples=32, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSlurmHistories = SlurmHistories.TestCase
