"""The replay of the controller's decisions: it does what the controller itself does on the same fleet."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache

import numpy as np
import pandas as pd
import pytest

from evaluation.value.controller_replay import Controlled, rule_events
from evaluation.value.gpu_hours import count_outcome, net_interval, net_of
from evaluation.value.load import HOUR_MS, Placements, ReplayedFleet
from evaluation.value.marks import NO_ACTION, ReplayMarks
from evaluation.value.probing import ProbeReplay, node_risks
from evaluation.value.readings import Readings
from foundation.times import NEVER, duration_ms, instant_ms
from policy.config import PolicyConfig
from policy.fleet import Level
from policy.ladder.cost_benefit import CostBenefitConfig
from policy.ladder.rungs import RUNGS
from policy.tiers import TierThresholds
from telemetry.dataset.schema import EVENTS
from tests.evaluation.controller_oracle import ControllerOracle

T0 = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
STEP, DELAY, REACH = 6 * HOUR, timedelta(minutes=10), 72 * HOUR
POLICY = PolicyConfig(TierThresholds(0.05, 0.15, 0.4))
H = HOUR_MS
BEGIN = instant_ms(T0)


def differing(one: ReplayMarks, other: ReplayMarks, decision: timedelta) -> list[str]:
    """Name the drains of one that the other has not on the same node within a decision, and those of the other."""
    wrong = []
    for mine, theirs, whose in ((one, other, "the controller"), (other, one, "the replay")):
        for node, at, until in zip(mine.node, mine.at, mine.until, strict=True):
            near = (theirs.node == node) & (np.abs(theirs.at - at) <= duration_ms(decision))
            if not (near & (np.abs(theirs.until - until) <= duration_ms(decision))).any():
                wrong.append(f"{whose} marks node {node} from {at} to {until}, the other does not")
    return wrong


class World:
    """Nodes of two GPUs over some decisions, with failures that XID 79 reports and repairs end."""

    def __init__(self, nodes: int, decisions: int, failures: list[tuple[int, float, float]]) -> None:
        self.names = [f"n{place:02}" for place in range(nodes)]
        self.times = [T0 + k * STEP for k in range(decisions)]
        self.failures = failures
        self.planned: list[tuple[int, datetime, datetime]] = []
        self.repairs_name_gpus = True
        self.risk = np.full((decisions, nodes), 0.01)
        self.removed: dict[int, float] = {}
        self.moved: list[tuple[int, int, float]] = []

    def fleet(self) -> ReplayedFleet:
        """The fleet, of racks of three nodes."""
        installed = pd.DataFrame(
            [
                {"node": name, "gpu": f"{name}-{slot}", "group": "g", "rack": f"r{place // 3}"}
                for place, name in enumerate(self.names)
                for slot in range(2)
            ]
        ).assign(installed_at=pd.Timestamp(T0 - 100 * HOUR), removed_at=pd.Series(pd.NaT, dtype="datetime64[ms, UTC]"))
        for node, at in self.removed.items():
            installed.loc[installed["node"] == self.names[node], "removed_at"] = T0 + at * HOUR
        for node, target, at in self.moved:
            gpu = installed[installed["gpu"] == f"{self.names[node]}-0"]
            installed.loc[gpu.index, "removed_at"] = T0 + at * HOUR
            arrival = gpu.assign(node=self.names[target], rack=f"r{target // 3}", installed_at=T0 + at * HOUR)
            installed = pd.concat([installed, arrival], ignore_index=True)
        rows = [
            {"gpu": f"{self.names[node]}-0", "node": self.names[node], "start": T0 + at * HOUR, "end": T0 + end * HOUR}
            for node, at, end in self.failures
        ]
        failed = pd.DataFrame(rows, columns=["gpu", "node", "start", "end"])
        failed = failed.astype(dict.fromkeys(("start", "end"), "datetime64[ms, UTC]"))
        return ReplayedFleet.of(installed, failed, BEGIN, instant_ms(self.times[-1] + STEP))

    def events(self) -> list[dict]:
        """What the failed GPUs and their repairs report."""
        rows = [
            (begin, self.names[node], None, "maintenance", end.isoformat(), "", "", begin)
            for node, begin, end in self.planned
        ]
        for node, at, end in self.failures:
            for kind, code, when in (("xid", "79", at + 0.05), ("repair", "", end)):
                seen = T0 + when * HOUR
                gpu = f"{self.names[node]}-0" if kind == "xid" or self.repairs_name_gpus else None
                rows.append((seen, self.names[node], gpu, kind, code, "", "", seen))
        times = dict.fromkeys(("timestamp", "known_at"), "datetime64[ms, UTC]")
        return rule_events(pd.DataFrame(rows, columns=EVENTS.names).astype(times))

    def scores(self):
        """The scores of each decision; a model is refitted each week."""
        frame = pd.DataFrame(
            [
                {"decision_time": at, "unit": f"{name}-{slot}", "risk": self.risk[k, place] if slot == 0 else 0.001}
                for k, at in enumerate(self.times)
                for place, name in enumerate(self.names)
                for slot in range(2)
            ]
        ).assign(fold=lambda frame: (frame["decision_time"] - T0).dt.days // 7)
        folds = pd.DataFrame({"fold": range(9), "refit_at": [T0 + k * timedelta(days=7) for k in range(9)]})
        return Readings(frame, folds, delay=DELAY, lifetime=2 * STEP)


def jobs(*rows: tuple[int, float, float, float]) -> Placements:
    """Jobs on whole nodes: node, begin, end and checkpoint interval in hours."""
    node, start, end, every = (np.array(column) for column in zip(*rows, strict=True))
    number = np.arange(len(rows))
    return Placements.ordered(
        number, node, np.full(len(rows), 2), *((BEGIN + hours * H).astype(np.int64) for hours in (start, end)),
        (every * H).astype(np.int64),
    )  # fmt: skip


def random_world(seed: int) -> tuple[World, Placements]:
    """Twenty busy nodes: risks that rise before most failures, and a few that rise for nothing."""
    rng = np.random.default_rng(seed)
    failures = sorted(
        ((int(rng.integers(20)), at, at + rng.uniform(4, 30)) for at in rng.uniform(20, 290, 14)),
        key=lambda failure: failure[1],
    )
    world = World(20, 50, failures)
    rises = [(node, at) for node, at, _ in failures[::2]]
    rises += [(int(rng.integers(20)), float(at)) for at in rng.uniform(20, 290, 6)]
    for node, at in rises:
        last = int(at // 6)
        world.risk[max(last - 4, 0) : last + 1, node] = rng.uniform(0.3, 0.9, last + 1 - max(last - 4, 0))
    rows = []
    for node in range(20):
        at = -rng.uniform(0, 9)
        while at < 300:
            ends = at + rng.uniform(3, 30)
            rows.append((node, at, ends, float(rng.choice([0, 1, 2.5]))))
            at = ends + 0.01
    return world, jobs(*rows)


@pytest.mark.parametrize("diagnostic", ["none", "blind", "perfect"])
@pytest.mark.parametrize(("seed", "on_request"), [(101, True), (102, False)])
def test_the_replay_marks_the_nodes_that_the_controller_marks_at_the_same_decisions(seed, on_request, diagnostic):
    world, load = random_world(seed)
    load = replace(load, on_request=on_request)
    fleet = world.fleet()
    given = (fleet, world.scores(), world.events(), load, fleet.stage(POLICY, "hard"))
    marks = Controlled(*given, reach=REACH, diagnostic=diagnostic).marks()
    assert len(marks.node) >= 4
    assert marks.refused, "budgets were put to the test"
    assert differing(ControllerOracle(*given, diagnostic=diagnostic, reach=REACH).marks(), marks, STEP) == []


class Exhaustive(Controlled):
    """The oracle: each round decides about all nodes, and each release is followed by a round."""

    skipped, woken = 0, False

    def __post_init__(self):
        policy = self.policy
        super().__post_init__()
        self.policy, self._shows_jobs = policy, True

    def _reports(self, *args):
        self.reported = super()._reports(*args)
        return self.reported

    def _units(self, place, newest, reports, passed):
        return super()._units(place, newest, self.reported, passed)

    def _low_risk_nodes(self, *args):
        known, unknown, quiet = super()._low_risk_nodes(*args)
        self.skipped += int(quiet.sum())
        return known, unknown, np.zeros_like(quiet)

    def _follow(self, place, plan):
        marked = place in self._open
        super()._follow(place, plan)
        if marked and place not in self._open:
            self.woken = True
            self._wake(self._now + 60_000)


@pytest.mark.parametrize("seed", range(201, 209))
def test_nodes_and_rounds_that_are_left_out_change_no_decision(seed):
    rng = np.random.default_rng(seed)
    world, load = random_world(seed)
    world.risk *= rng.uniform(0.5, 5.2, world.risk.shape)  # near the threshold of watch, so that nodes come and go
    world.risk = np.minimum(world.risk, 0.95)
    world.planned = [(int(rng.integers(20)), T0 + 100 * HOUR, T0 + 130 * HOUR)]
    world.removed = {int(rng.integers(20)): 150.0}
    world.moved = [(node, int(rng.integers(20)), int(at + rng.integers(1, 30))) for node, at, _ in world.failures[:8]]
    fleet, scores = world.fleet(), world.scores()
    policy = fleet.stage(replace(POLICY, rungs=RUNGS), "soft" if seed % 2 else "hard")
    risks, passed, found = node_risks(fleet, scores), node_risks(fleet, scores, 0.5), rng.random(len(fleet.at)) < 0.5

    def played(kind):
        probing = ProbeReplay(fleet, load, scores.at, risks, passed, found, REACH, policy) if seed % 3 else None
        least = Level.AVOID if seed % 2 else Level.SWAP
        given = (fleet, scores, world.events(), load, policy, REACH, "stated", least, found, probing)
        replayed = kind(*given)
        marks = replayed.marks()
        return replayed, {name: getattr(marks, name) for name in ReplayMarks.__slots__}

    (_, marks), (oracle, expected) = played(Controlled), played(Exhaustive)
    assert oracle.skipped > 100, "some nodes are only counted"
    assert oracle.woken, "some nodes are released"
    assert len(marks["node"]) >= 4
    assert {name: np.asarray(value).tolist() for name, value in marks.items()} == {
        name: np.asarray(value).tolist() for name, value in expected.items()
    }


@cache
def agreed(repairs_name_gpus: bool, *planned: tuple[int, datetime, datetime]) -> ReplayMarks:
    """The marks of one world, by replay and controller alike."""
    world, load = random_world(101)
    world.repairs_name_gpus, world.planned = repairs_name_gpus, list(planned)
    fleet = world.fleet()
    given = (fleet, world.scores(), world.events(), load, fleet.stage(POLICY, "hard"))
    marks = Controlled(*given, reach=REACH).marks()
    assert differing(ControllerOracle(*given, diagnostic="none", reach=REACH).marks(), marks, STEP) == []
    return marks


def test_repairs_that_name_no_gpu_change_no_mark():
    assert len(agreed(True).node) >= 4
    assert differing(agreed(True), agreed(False), STEP) == []


def test_the_replay_leaves_a_node_alone_that_the_events_say_is_in_maintenance():
    alone = min(agreed(True).node.tolist())
    assert alone not in agreed(True, (alone, T0, T0 + 400 * HOUR)).node


@pytest.mark.parametrize(("size", "pays"), [(2, False), (512, True)])
def test_drains_that_cost_more_than_they_save_with_small_jobs_pay_with_gangs(size, pays):
    world = World(40, 60, [(node, 25.0 + 24 * node, 33.0 + 24 * node) for node in range(12)])
    for node in range(12):
        world.risk[4 * node + 1 : 4 * node + 5, node] = 0.9
        world.risk[4 * node + 1 : 4 * node + 4, node + 20] = 0.9 if node < 3 else 0.01  # for nothing
    fleet, load = world.fleet(), jobs(*((node, -node / 7, 359, 3) for node in range(40)))
    load = replace(load, size=np.full(40, float(size)))
    costs = CostBenefitConfig(planned_repair=24 * HOUR, checkpoint_every=3 * HOUR, always=True)
    policy = fleet.stage(replace(POLICY, cost_benefit=costs), "hard")
    marks = Controlled(fleet, world.scores(), world.events(), load, policy, REACH, "perfect").marks()
    no_action, acted = (count_outcome(fleet, [load], act, costs, reach=REACH) for act in (NO_ACTION, marks))
    net, bounds = net_interval(net_of(no_action, acted), replicates=400, seed=1)
    assert acted.right >= 10
    assert (bounds.low > 0, net > 0) == (pays, pays)


FAILS = (3, 20.0, 30.0)
BUSY = jobs((3, -1, 20, 3), (3, 32, 40, 0), (5, -1, 47, 0))
"""A job that writes a checkpoint each three hours until n03 fails under it, one after the repair, and one elsewhere."""


def foretold(*failures: tuple[int, float, float], nodes: int = 10) -> World:
    """n03 is at high risk from the second decision up to its failure."""
    world = World(nodes, 8, [FAILS, *failures])
    world.risk[1:4, 3] = 0.9
    return world


def marked(world: World, **how):
    policy = replace(POLICY, cost_benefit=CostBenefitConfig(always=True))
    fleet = world.fleet()
    policy = fleet.stage(policy, how.pop("stage", "hard"))
    marks = Controlled(fleet, world.scores(), world.events(), BUSY, policy, REACH, **how).marks()
    return marks, count_outcome(fleet, [BUSY], marks, policy.cost_benefit, reach=REACH)


def test_in_stage_shadow_nothing_is_marked_and_the_failure_costs_a_job_its_work_and_a_restart():
    marks, count = marked(foretold(), stage="shadow")
    assert len(marks.node) == 0
    assert (count.hits, count.hit.sum()) == (1, pytest.approx(2 * 0.25)), "its last checkpoint was as it failed"
    assert count_outcome(foretold().fleet(), [BUSY], NO_ACTION, POLICY.cost_benefit, reach=REACH).hits == 1


def test_a_node_is_drained_at_the_second_decision_that_says_so_and_its_job_is_spared():
    marks, count = marked(foretold())
    assert ((marks.at - BEGIN) / H).tolist() == pytest.approx([12 + 1 / 6])
    assert (count.hits, count.moved, count.drains, count.right, count.caught) == (0, 1, 1, 1, 1)
    assert count.spent.sum() == pytest.approx(2 * 20 / 60)


def test_a_drained_node_whose_gpus_are_removed_ends_no_replay():
    world = foretold()
    world.removed[3] = 16.0
    marks, count = marked(world)
    assert marks.node.tolist() == [3]
    assert count.drains == 1


def test_a_stage_below_hard_only_keeps_new_jobs_off():
    marks, count = marked(foretold(), stage="soft", least=Level.AVOID)
    assert (count.hits, count.moved) == (1, 0)
    high = marks.high_at(3, (np.arange(48) * H + BEGIN))
    assert np.flatnonzero(high).tolist() == list(range(13, 31)), "until its repair"
    assert (marks.drained == NEVER).all()


def test_a_node_in_repair_uses_up_the_budget_of_a_small_fleet():
    marks, count = marked(foretold((7, 2.0, 26.0)))
    assert (len(marks.node), marks.refused, count.hits) == (0, 2, 1), "one node of ten may be out of service"
    assert len(marked(foretold((7, 2.0, 26.0), nodes=20))[0].node) > 0


def test_where_a_drain_is_worth_less_than_it_costs_the_jobs_run_on():
    world = foretold()
    fleet, costs = world.fleet(), CostBenefitConfig(planned_repair=24 * HOUR, may_wait=False)
    policy = fleet.stage(replace(POLICY, cost_benefit=costs), "hard")
    marks = Controlled(fleet, world.scores(), world.events(), jobs((5, -1, 47, 0)), policy, REACH).marks()
    assert len(marks.node) == 0


def test_a_gang_that_is_not_asked_for_a_checkpoint_is_drained_a_minute_after_its_next_one():
    world = foretold()
    fleet, load = world.fleet(), replace(BUSY, size=BUSY.size * 64, on_request=False)
    given = (fleet, world.scores(), world.events(), load, fleet.stage(POLICY, "hard"))
    marks = Controlled(*given, REACH).marks()
    begun, drained = (marks.at - BEGIN)[0] / H, (marks.drained - BEGIN)[0] / H
    assert (begun, drained) == (pytest.approx(12 + 1 / 6), pytest.approx(14 + 1 / 60)), "it wrote one at 11 h"
    assert differing(ControllerOracle(*given, reach=REACH).marks(), marks, timedelta(minutes=1)) == []
    count = count_outcome(fleet, [load], marks, POLICY.cost_benefit, reach=REACH)
    assert (count.hits, count.spent.sum()) == (0, pytest.approx(128 * 16 / 60)), "a restart and a minute's work"


def test_a_diagnostic_gives_a_sound_node_back_and_a_perfect_one_turns_the_failure_into_a_planned_repair():
    blind, perfect = marked(foretold(), diagnostic="blind"), marked(foretold(), diagnostic="perfect")
    assert (blind[0].until - blind[0].at)[0] / H == pytest.approx(2 + 7 / 60)
    tested = perfect[0].drained + (2 * 60 + 6) * H // 60
    assert perfect[0].found.tolist() == tested.tolist()
    assert perfect[1].repaired.sum() == 2 * 12
    assert perfect[1].hits == 0


def test_a_drain_by_a_rule_lasts_as_long_as_its_remedy_and_a_node_that_was_repaired_is_not_drained():
    world = World(10, 8, [])
    seen = T0 + 20 * HOUR
    reported = (seen, world.names[3], f"{world.names[3]}-0", "xid", "79", "", "", seen)
    times = dict.fromkeys(("timestamp", "known_at"), "datetime64[ms, UTC]")
    events = rule_events(pd.DataFrame([reported], columns=EVENTS.names).astype(times))
    fleet = world.fleet()
    given = (world.scores(), events, BUSY, fleet.stage(POLICY, "hard"), REACH)
    marks = Controlled(fleet, *given).marks()
    assert (marks.until - marks.at).tolist() == [31 * H // 60], "a reboot, and the next round"
    repaired = ReplayedFleet.of(
        pd.DataFrame({"node": world.names, "gpu": world.names, "group": "g"}).assign(
            installed_at=pd.Timestamp(T0 - HOUR), removed_at=pd.Series(pd.NaT, dtype="datetime64[ms, UTC]")
        ),
        pd.DataFrame({"gpu": [None], "node": [world.names[3]], "start": [seen], "end": [seen + HOUR]}),
        BEGIN, fleet.end,
    )  # fmt: skip
    late = [row | {"known_at": seen + 2 * HOUR} for row in events]
    returned = sorted([*late, *repaired.boots()], key=lambda row: row["known_at"])
    assert len(Controlled(fleet, given[0], late, *given[2:]).marks().node) == 1
    assert len(Controlled(fleet, given[0], returned, *given[2:]).marks().node) == 0


def test_with_swap_as_the_highest_rung_a_node_leaves_when_its_jobs_end_and_none_is_moved():
    world = foretold()
    world.risk[:, 3] = 0.9
    fleet = world.fleet()
    policy = replace(POLICY, rungs=RUNGS[:-1], cost_benefit=CostBenefitConfig(always=True))
    load = jobs((3, -1, 15, 3), (5, -1, 47, 0))
    given = (fleet, world.scores(), world.events(), load, fleet.stage(policy, "hard"))
    marks = Controlled(*given, reach=REACH, diagnostic="perfect").marks()
    begun, emptied = (marks.at - BEGIN)[0] / H, (marks.drained - BEGIN)[0] / H
    assert (begun, emptied) == (pytest.approx(6 + 1 / 6), pytest.approx(15 + 1 / 60))
    count = count_outcome(fleet, [load], marks, policy.cost_benefit, reach=REACH)
    assert (count.moved, count.hits) == (0, 0)
