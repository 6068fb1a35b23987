"""Random histories of a Slurm cluster with a process that dies at any call: what must hold whatever happens."""

from dataclasses import replace
from datetime import timedelta
from random import Random

import pytest

from policy.fleet import Level
from scheduler.evacuation.progress import stored_progress
from scheduler.ports.readings import Switches
from scheduler.slurm.job import Requirements, SlurmJob
from scheduler.slurm.marks import KEY, slurm_marks_on, with_record
from scheduler.slurm.node import SlurmNode
from scheduler.slurm.settings import SlurmSettings
from tests.histories import COUNT, History, blocks, play_all, step
from tests.policy.decide_world import HOUR, T0
from tests.scheduler.cluster import RATE_LIMITS
from tests.scheduler.evacuation.emptying_cluster import silent_waits
from tests.scheduler.faults import Crash, Watch
from tests.scheduler.slurm.memory_port import MemorySlurm
from tests.scheduler.slurm.slurm_world import LEASE, World

NODES = 4
ANY = Requirements()
NEEDS = (
    lambda _: {}, lambda _: {}, lambda nodes: {"nodes": frozenset(nodes)}, lambda _: {"reservation": "gone"},
    lambda _: {"partitions": frozenset({"closed"})},
    lambda nodes: {"excluded": frozenset(f"n{i}" for i in range(NODES)) - {*nodes}},
)  # fmt: skip
FACTS = (
    {}, {}, {}, {}, {"states": frozenset({"SUSPENDED"})}, {"held": True}, {"requeue": False}, {"batch": False},
    {"comment": "predrain.keep"}, {"start_by": T0},
)  # fmt: skip
FAULTS = ("refused", "timeout_before", "timeout_after", "crash_before", "crash_after")


class Watched(MemorySlurm):
    """It sees to it that nothing is written where another's reason stands, and no work is reached that may not be."""

    crash: str | None = None
    settings = SlurmSettings("/nowhere")  # of the installation that writes
    kill = False

    def __init__(self, clock):
        super().__init__(clock, NODES)
        self.watch = Watch()
        self.left: list[SlurmJob] = []
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
        whole = self.reached(job.requeue_name)
        assert any(self.marks(name).drained for part in whole for name in part.nodes)
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
        self.left += reached
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


class SlurmHistory(History):
    """People, tools, faults and crashes around a controller on Slurm.

    ``reasons``: what people wrote. ``frozen``: nodes with a record that somebody edited: nothing on them is ours.
    """

    longest = 9

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.world = World(None, NODES, evacuates=True)
        watched = Watched(self.world.clock)
        watched.all, watched.configured = self.world.slurm.all, self.world.slurm.configured
        self.world.slurm = self.slurm = watched
        self.world.restart()
        self.other = World(None, NODES, installation="other")
        self.other.slurm, self.other.clock, self.other.risks = watched, self.world.clock, self.world.risks
        self.other.restart()
        self.names = sorted(watched.all)
        self.extras = {name: item.extra for name, item in watched.all.items()}
        self.reasons: dict[str, tuple[frozenset[str], str | None]] = {}
        self.frozen: dict[str, SlurmNode] = {}
        self.wiped: set[str] = set()  # of these the record with the weight that was found may be gone
        self.taken = self.made = 0

    def check(self) -> None:
        assert self.slurm.watch.broken == []
        assert self.taken <= RATE_LIMITS[0].max_nodes
        for name, (out, reason) in self.reasons.items():
            node = self.slurm.all[name]
            assert (node.out, node.reason) == (out, reason)
        for name, extra in self.extras.items():
            if name in self.frozen:
                assert self.slurm.all[name] == self.frozen[name]
            else:
                assert with_record(self.slurm.all[name].extra, None, name, "predrain") == extra

    def end(self) -> None:
        """Everything of ours ends, by itself or on request, and nothing else."""
        self._quiet()
        self.world.clock.move(LEASE)
        self.world.restart()
        if self.happens(0.5):  # all of it ends by itself
            self.world.clock.move(timedelta(hours=13))
        else:
            self.world.scheduler.set_switches(Switches(release_all=True))
            self.other.scheduler.set_switches(Switches(release_all=True))
        for _ in range(3):
            self.world.clock.move(LEASE)
            self._others_round()
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

    @step(3)
    def one_is_scored(self) -> None:
        self.world.scored(**{self._node(): self.one_of(0.01, 0.15, 0.4, 0.7, 0.95, None)})

    @step(6)
    def work_runs_on_a_node_at_risk(self) -> None:
        node = self._node()
        mark, width = self.one_of(("", 1), ("", 1), ("", 2), ("_", 3), ("+", 3))
        facts, needs = self.one_of(*FACTS), self.one_of(*NEEDS)
        nodes = tuple((self.names + self.names)[self.names.index(node) :][:width])
        first, comment = self.made + 1, self.one_of("", "predrain.checkpoint=USR1")
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
            self.a_round()
            self.world.clock.move(HOUR / 12)
        if self.world.level(node) is Level.DRAIN:
            kind = {"_": "task", "+": "component"}.get(mark, "job")
            self.met.update([f"a {kind} on a drained node", *(f"{fact} {value}" for fact, value in facts.items())])
            self.met["tied to its nodes"] += needs(nodes) != {}

    @step(3)
    def something_happens_to_a_job(self) -> None:
        running = self.slurm.running
        if not running:
            return
        number, what = self.one_of(*sorted(running)), self.one_of(
            "ends", "suspend", "resume", "hold", "answer", "pin", "completes"
        )  # fmt: skip
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

    @step(2)
    def what_was_requeued_comes_back_to_its_nodes(self) -> None:
        for _ in range(self.one_of(1, 2, 4)):
            if not self.slurm.left:
                self.work_runs_on_a_node_at_risk()
            while self.slurm.left:
                job = self.slurm.left.pop()
                self.slurm.running[job.number] = replace(job, uid=f"{job.uid}+")
                self.met["came back"] += 1
            self.a_round()

    @step(2)
    def time_passes(self) -> None:
        self.world.clock.move(self.one_of(0.01, 0.5, 7, 13) * HOUR)
        self.a_round()

    @step()
    def a_person_drains(self) -> None:
        self._theirs(self._node(), self.one_of("DRAIN", "FAIL"), self.one_of("bad disk", "predrain: mine"))

    @step(2)
    def somebody_edits_the_reason_of_a_drain(self) -> None:
        node, more = self._drained(), self.one_of(" - RMA 4711, keep out", " ", " : reboot issued", "")
        if self.slurm.all[node].out:  # with the same words it is theirs too, from the next second on
            self.world.clock.move(timedelta(seconds=1))
            self._theirs(node, None, f"{self.slurm.all[node].reason}{more}")
            self.met["reason edited"] += 1

    @step()
    def a_person_copies_a_drain_to_another_node(self) -> None:
        node, other, record = self._drained(), self._node(), self.happens(0.5)
        source, target = self.slurm.all[node], self.slurm.all[other]
        if source.out and other not in self.frozen and node != other:
            self._theirs(other, "DRAIN", source.reason)
            self.met["drain copied"] += 1
            if record and KEY in source.extra and KEY not in target.extra:
                self._edit(other, extra=source.extra)

    @step()
    def a_person_edits_the_record(self) -> None:
        node = self._drained()
        extra = self.slurm.all[node].extra
        if '"level": "' in extra and node not in self.frozen:
            self._edit(node, extra=extra.replace('"level": "', '"note": "RMA 4711", "level": "'))
            self.met["record edited"] += 1

    @step()
    def a_person_reboots_the_node(self) -> None:
        node = self._drained()
        self._cleaned(node)
        current = self.slurm.all[node]
        self.slurm.all[node] = replace(current, states=current.states | {"REBOOT_ISSUED", "DOWN"} - {"IDLE"})
        before = self.slurm.all[node]
        self.a_round()
        assert self.slurm.all[node] == before
        self._resumed(node)

    @step()
    def a_person_resumes(self) -> None:
        self._resumed(self.one_of(*self.reasons or self.names))

    @step()
    def a_person_writes_the_whole_extra(self) -> None:
        node, extra = self._drained(), self.one_of("", "note", '{"rack": 4}')
        current = self.slurm.all[node]
        self.frozen.pop(node, None)
        if current.out:  # without its record a drain is nobody's, and stays until somebody resumes the node
            self.reasons[node] = (current.out, current.reason)
        self.slurm.all[node] = replace(current, extra=extra)
        self.extras[node] = extra
        self.wiped.add(node)

    @step()
    def a_person_configures_a_weight(self) -> None:
        node, weight = self._node(), self.one_of(5, 900)
        self.slurm.configured[node] = weight
        self.slurm.all[node] = replace(self.slurm.all[node], weight=weight)
        if node in self.frozen:
            self.frozen[node] = replace(self.frozen[node], weight=weight)

    @step()
    def slurm_is_reconfigured(self) -> None:
        self.slurm.reconfigure()
        self.frozen = {name: replace(node, weight=self.slurm.all[name].weight) for name, node in self.frozen.items()}

    @step(3)
    def a_write_fails(self) -> None:
        fault = self.one_of(*FAULTS)
        if fault.startswith("crash"):
            self.slurm.crash = fault
        else:
            self.slurm.failing.append(fault)
        self.work_runs_on_a_node_at_risk()

    @step()
    def a_person_switches(self) -> None:
        kill = self.happens(0.3)
        self.world.scheduler.set_switches(Switches(kill=kill))
        self.slurm.kill = kill

    @step()
    def another_process_takes_over(self) -> None:
        self._takes_over()

    @step()
    def another_leader_has_another_clock(self) -> None:
        seconds = self.one_of(-20, 20)
        self.world.clock.move(timedelta(seconds=seconds))
        self.world.seconds -= seconds
        self._takes_over()
        self.met["another clock"] += 1

    @step()
    def another_installation_marks_a_node_that_is_below_our_thresholds_soon_after(self) -> None:
        node = self._node()
        self._quiet()
        self.world.scored(**{node: 0.95})
        self._others_round()
        self.world.clock.move(HOUR / 60)
        self.world.scored(**{node: 0.01})
        self.a_round()

    @step()
    def a_second_round_changes_nothing(self) -> None:
        self._quiet()
        self.a_round()
        self.a_round()
        writes = len(self.slurm.writes)
        self.a_round()
        assert self.slurm.writes[writes:] == []

    @step(2)
    def a_round(self) -> None:
        before = {name for name in self.slurm.all if self.world.level(name).hard}
        theirs = {name: node for name, node in self.slurm.all.items() if self.other.level(name)}
        requeued, sent = len(self.slurm.requeued), len(self.slurm.sent)
        try:
            report = self.world.round()
            if report.active and not report.failed:
                levels = {name: self.world.level(name) for name in self.slurm.all}
                assert silent_waits(report, self.world.workloads, levels, self.world.clock.now()) == []
        except Crash:
            self.met["crashes"] += 1
            self.world.restart()
            self.world.round()
            self.world.clock.move(LEASE)
        assert {name: self.slurm.all[name] for name in theirs} == theirs
        after = {name for name in self.slurm.all if self.world.level(name).hard}
        self.taken = max(len(after - before), self.taken)
        self.met["requeued"] += len(self.slurm.requeued) - requeued
        self.met["signalled"] += len(self.slurm.sent) - sent
        self.met["undrained"] += len(before - after)

    def _node(self) -> str:
        return self.one_of(*self.names)

    def _drained(self) -> str:
        """A node that we drained, if one can be."""
        node = self.one_of(*[name for name in self.names if self.world.level(name).hard] or self.names)
        if not self.world.level(node).hard:
            self.world.clock.move(25 * HOUR)
            self.world.scored(**{node: 0.95})
            self.a_round()
        return node

    def _resumed(self, node: str) -> None:
        self._cleaned(node)
        self.slurm.person(node, "RESUME")
        self.reasons.pop(node, None)

    def _takes_over(self) -> None:
        self.world.restart()
        self.a_round()  # it sees the other one's lease
        self.world.clock.move(LEASE)

    def _theirs(self, node: str, state: str | None, reason: str | None) -> None:
        self.slurm.person(node, state, reason)
        current = self.slurm.all[node]
        self.reasons[node] = (current.out, current.reason)
        if node in self.frozen:
            self.frozen[node] = current

    def _edit(self, node: str, extra: str) -> None:
        """Somebody writes a record that predrain did not write so."""
        self.slurm.all[node] = replace(self.slurm.all[node], extra=extra)
        self.frozen[node] = self.slurm.all[node]
        self.wiped.add(node)

    def _cleaned(self, node: str) -> None:
        """Somebody removes a record that they edited."""
        if self.frozen.pop(node, None) is not None:
            self.slurm.all[node] = replace(self.slurm.all[node], extra=self.extras[node])

    def _others_round(self) -> None:
        """Another installation acts: on nothing that is ours."""
        ours = {name: node for name, node in self.slurm.all.items() if self.world.level(name)}
        self.slurm.settings = self.other.settings
        try:
            assert self.other.round().active
        finally:
            self.slurm.settings = self.world.settings
        assert {name: self.slurm.all[name] for name in ours} == ours

    def _quiet(self) -> None:
        self.slurm.crash, self.slurm.failing = None, []


MET = (
    "a job on a drained node", "a task on a drained node", "a component on a drained node", "tied to its nodes",
    "states frozenset({'SUSPENDED'})", "held True", "requeue False", "batch False", "comment predrain.keep",
    "came back", "another clock", "crashes", "requeued", "signalled", "undrained", "reason edited", "drain copied",
    "record edited",
)  # fmt: skip


@pytest.mark.parametrize("block", blocks(COUNT // 20))
def test_whatever_happens_on_slurm_only_what_is_ours_and_may_be_moved_is_touched_and_all_ends(block: range) -> None:
    play_all(SlurmHistory, block, MET)
