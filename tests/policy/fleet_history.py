"""A fleet, all that may befall it, and what must hold at every step."""

import json
from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from random import Random

from policy.breaker import BreakerConfig
from policy.budget import BudgetConfig, RateLimit
from policy.budget import DisruptionBudget as Budget
from policy.decide import carried_out, decide
from policy.fleet import Fact, JobView, Level, Marks, NodeView, Published, Signals, UnitView
from policy.ladder.cost_benefit import CostBenefitConfig
from policy.ladder.probes import ProbeConfig
from policy.ladder.rungs import RUNGS
from policy.node_tier.hysteresis import NodeRiskConfig, changed
from policy.plan import Plan, PolicyState
from policy.stages import ALLOWED_LEVELS
from scheduler.ports.stored_state import state_from_json, state_json
from tests.histories import History, Steps
from tests.policy.decide_world import HOUR, STEP, T0, carry_out, config, score

PROBES = ProbeConfig(max_concurrent=2)
JOB = JobView("j", 16, can_checkpoint=True)
DISRUPTION_BUDGETS = (
    Budget("cluster", max_unavailable_share=0.4, min_available=2), Budget("group", max_unavailable=2),
    Budget("rack", max_unavailable_share=0.5, min_scope_size=2),
    Budget("job", max_unavailable=1),
)  # fmt: skip
CHEAP_CHECKPOINTS = CostBenefitConfig(may_wait=False, checkpoint=timedelta(minutes=1))
RATE_LIMITS = (RateLimit("group", 1, timedelta(hours=24)),)


class FleetHistory(History):
    """A fleet of a few nodes, the state kept of it, and all that may befall it.

    It begins with whatever marks and risks. What takes a further decision to check is checked now and then.
    """

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.stage, basis, nodes = self.one_of("shadow", "soft", "hard", "hard"), self.one_of("any", "worst"), 3
        self.config = config(
            "g0", "g1", stage=self.stage, rise_after=self.one_of(1, 2),
            budget=BudgetConfig(DISRUPTION_BUDGETS, RATE_LIMITS), node_risk=NodeRiskConfig(basis),
            cost_benefit=CHEAP_CHECKPOINTS, rungs=RUNGS, probes=PROBES,
            breaker=BreakerConfig(
                max_risky=1.0, max_missing=1.0, max_down=0.8, max_unreadable=0.8, max_changed=0.9
            ),
        )  # fmt: skip
        self.now = T0
        self.state = PolicyState()
        job: dict[str, object] = {}
        if self.happens(0.5):  # then a drain may wait for the end of its jobs
            self.config = replace(self.config, cost_benefit=CostBenefitConfig())
            job = {"gpus": 64, "ends_at": T0 + random.random() * 24 * HOUR}
        if self.happens(0.5):  # then some checkpoints pay from the beginning
            job["checkpointed_at"] = T0 - random.random() * 12 * HOUR
        marked = self.one_of(0.0, 0.0, 0.5)
        self.nodes = [self._begun(i, job, marked) for i in range(random.randint(nodes, 2 * nodes))]
        self.flags: dict[str, bool] = {}
        self.probing: set[str] = set()
        self.probed: dict[str, tuple[datetime, float]] = {}
        self.asked: dict[str, tuple[datetime, float]] = {}
        begun = [(node.marks.hard_since, node.name) for node in self.nodes]
        self.starts = [(since.timestamp(), name) for since, name in begun if since is not None]
        self.check()  # a person may take the marks of the beginning off once they were seen

    def _begun(self, i: int, job: dict[str, object], marked: float) -> NodeView:
        marks, first = Marks(), self.random.random() ** 3
        if self.happens(marked):
            tainted = self.happens(0.5)
            since = T0 - self.random.random() * 48 * HOUR if tainted else None
            marks = Marks(Published("high", T0 + HOUR), not tainted, tainted, tainted and self.happens(0.5), since)
        return NodeView(
            f"n{i}", "c", f"g{i % 2}", f"r{i // 3}",
            units=tuple(UnitView(f"n{i}-{k}", score(risk, T0, STEP)) for k, risk in enumerate((first, 0.01))),
            jobs=(replace(JobView(f"j{i // 2}", 4, can_checkpoint=i % 2 == 0), **job),), software="550", marks=marks,
        )  # fmt: skip

    @classmethod
    def drawn(cls, random: Random) -> Steps:
        """Draw few steps mostly, and many at times."""
        count = 1 + min(int(random.expovariate(1 / 7)), 58)
        return [(random.choice(EVENTS), random.random()) for _ in range(count)]

    def happen(self, name: str) -> None:
        for kind in ("score",) * self.random.randrange(3) + (name,):
            self._befall(kind)

    def check(self) -> None:
        plan = check(self)
        decided = [reason for decision in plan.nodes.values() for reason in decision.reasons]
        decided += [reason for request in plan.requests for reason in request.reasons]
        reasons = "; ".join((*plan.reasons, *plan.over_budget.values(), *decided))
        self.met.update([words for words in REACHED if words in reasons])

    def end(self) -> None:
        assert state_from_json(json.loads(json.dumps(state_json(self.state)))) == self.state

    def _befall(self, kind: str) -> None:
        i, amount = self.random.randrange(len(self.nodes)), self.random.random()
        if kind == "repair":  # of what we marked, if there is anything
            i = next((place for place, node in enumerate(self.nodes) if node.marks.level), i)
        one = self.nodes[i]
        if kind in ("kill", "drift"):
            self.flags[kind] = not self.flags.get(kind, False)
        elif kind == "time":
            self.now += amount * 8 * HOUR
        elif kind == "lose_state":
            self.state, self.probed, self.asked = PolicyState(), {}, {}
            # Of nodes that were released since, nothing tells any more when they were taken out.
            hard = {node.name for node in self.nodes if node.marks.level.hard}
            self.starts = [start for start in self.starts if start[1] in hard]
        elif kind == "fleet":
            fresh = [replace(unit, score=score(0.01, self.now, STEP)) for node in self.nodes for unit in node.units]
            self.nodes = [replace(node, units=tuple(fresh[2 * k : 2 * k + 2])) for k, node in enumerate(self.nodes)]
        elif kind == "all_well":
            self.flags.clear()
            well = {
                "down": False, "readable": True, "cordoned_by": None, "maintenance": None, "resting": None,
                "unwritable": None,
            }  # fmt: skip
            self.nodes = [changed(node, **well) for node in self.nodes]
        else:
            self.nodes[i] = self._changed(kind, one, amount)

    def _changed(self, kind: str, one: NodeView, amount: float) -> NodeView:
        if kind in ("passed", "failed", "preempted") and one.name in self.probing:
            self.probing.discard(one.name)
            facts = (Fact("diagnostic_failed", self.now),) if kind == "failed" else ()
            passed = {"probed_at": self.now} if kind == "passed" else {}
            return replace(one, units=tuple(replace(unit, facts=facts, **passed) for unit in one.units))
        if kind in ("score", "fact", "repair"):
            units, slot = list(one.units), int(amount * 100) % 2
            if kind == "score":
                risk = None if amount > 0.95 else min(amount * 1.4, 0.99)
                units[slot] = replace(units[slot], score=score(risk, self.now, STEP))
            elif kind == "fact":
                units[slot] = replace(units[slot], facts=(Fact("xid 79", self.now),))
            else:
                units[slot] = replace(units[slot], valid_from=self.now)
            return replace(one, units=tuple(units))
        fields: dict[str, dict[str, object]] = {
            "human": {"cordoned_by": None if one.cordoned_by else "ann"},
            "undo": {"marks": Marks(one.marks.published)},
            "opt_out": {"opt_out": None if one.opt_out else "managed=false"},
            "owner": {"owner": None if one.owner else "NVSentinel"},
            "down": {"down": not one.down},
            "unreadable": {"readable": not one.readable},
            "maintenance": {"maintenance": None if one.maintenance else "maintenance"},
            "rest": {"resting": None if one.resting else "power saving", "down": not one.resting},
            "reboot": {"unwritable": None if one.unwritable else "a reboot"},
            # somebody edits a mark, copies one, or takes it over: it is theirs, and the adapter reports it
            "edit": {
                "marks": Marks(one.marks.published), "opt_out": "edited", "notice": "edited",
                "cordoned_by": "ann",
            },
            "clean": {"opt_out": None, "notice": None, "cordoned_by": None},
            "jobs": {"jobs": () if one.jobs else (replace(JOB, name=f"j{one.name}", checkpointed_at=self.now - HOUR),)},
            "driver": {"software": "560" if one.software == "550" else "550"},
        }  # fmt: skip
        return replace(one, **fields.get(kind, {}))

    def signals(self) -> Signals:
        return Signals(
            read_at=self.now, model_fitted_at=T0, kill=self.flags.get("kill", False),
            missing_channels=("fleet",) if self.flags.get("drift") else (), probes=tuple(sorted(self.probing)),
            checkpoints=True,
        )  # fmt: skip

    def evidence(self, node: NodeView) -> bool:
        """Whether anything at all that is valid now speaks against the node, at least the risk that keeps a watch."""
        return any(
            (
                unit.score is not None and unit.score.risk is not None and unit.score.decided_at <= self.now
                and self.now < unit.score.expires_at
                and (unit.valid_from is None or unit.score.decided_at >= unit.valid_from)
            )
            or any(
                self.now < fact.seen_at + timedelta(days=2)
                and (unit.valid_from is None or fact.seen_at >= unit.valid_from)
                for fact in unit.facts
            )
            or any(
                old.unit == unit.name and old.expires_at > self.now
                and (unit.valid_from is None or old.decided_at >= unit.valid_from)
                for kept in [self.state.nodes.get(node.name)] if kept
                for old in kept.tier.support
            )
            for unit in node.units
        )  # fmt: skip


def is_out(node: NodeView) -> bool:
    """Whether a node is out of service, by whoever's hand; one that rests is so only by ours."""
    if node.marks.tainted or node.marks.drained or not node.readable:
        return True
    return not node.resting and bool(node.down or node.cordoned_by or node.owner)


def lost(nodes: list[NodeView]) -> Counter[tuple[str, str]]:
    """How many nodes of each scope are out of service, by whoever's hand."""
    out = [node for node in nodes if is_out(node)]
    return Counter(scope for node in out for scope in node.scopes)


def rests_on_something(world: FleetHistory, node: NodeView, state: PolicyState) -> bool:
    """Whether all risks that hold its tier up are valid, of devices that are there, and newer than their repair."""
    units = {unit.name: unit for unit in node.units}
    support = state.nodes[node.name].tier.support
    return bool(support) and all(
        one.decided_at <= world.now < one.expires_at
        and one.unit in units
        and (units[one.unit].valid_from is None or one.decided_at >= units[one.unit].valid_from)
        for one in support
    )


def decide_again(world: FleetHistory, plan: Plan, after: list[NodeView], noted: PolicyState) -> None:
    """Check that asked again, in whatever order, the same comes out, and once it is carried out, nothing."""
    signals = world.signals()
    if world.happens(0.1):
        again = decide(list(reversed(world.nodes)), plan.state, signals, world.config, world.now)
        assert (again.actions, again.requests, again.stopped) == (plan.actions, plan.requests, plan.stopped)
        assert again.state == plan.state
    if world.happens(0.1):
        then = decide(after, plan.state, signals, world.config, world.now)
        assert then.actions == (), "asked once more, something else is done"
        assert {name: node.seen for name, node in noted.nodes.items()} == {
            name: node.seen for name, node in then.state.nodes.items()
        }
    if world.happens(0.1):
        assert decide(after, noted, signals, world.config, world.now).actions == ()


def check(world: FleetHistory) -> Plan:
    """Decide, check, and carry it out."""
    before = world.nodes
    plan = decide(before, world.state, world.signals(), world.config, world.now)
    after = carry_out(before, plan.actions, world.now)
    marks = {node.name: node.marks for node in before}
    for action in plan.actions:
        marks[action.node] = action.after(marks[action.node], world.now)
    assert [node.marks for node in after] == [marks[node.name] for node in after]
    noted = carried_out(plan.state, plan.actions)
    decide_again(world, plan, after, noted)

    total = Counter(scope for node in after if not node.resting or is_out(node) for scope in node.scopes)
    held, now_lost = lost(before), lost(after)
    newly = [b for a, b in zip(before, after, strict=True) if b.marks.level.hard and not a.marks.level.hard]
    # a job that does not go on without a node stops once, whether it loses one of its nodes or all
    gangs = {("job", f"{node.cluster}/{job.name}") for node in before for job in node.jobs if not job.can_shrink}
    for floor in DISRUPTION_BUDGETS:
        for scope in {scope for node in newly for scope in node.scopes if scope[0] == floor.scope} - gangs:
            assert now_lost[scope] <= max(floor.allowed(total[scope]), held[scope]), (scope, plan.uses)
    # A node that is taken out, taken back and taken out again within the window counts once.
    began = (world.now - RATE_LIMITS[0].window).timestamp()
    counted = {name for at, name in world.starts if at > began}
    world.starts += [(world.now.timestamp(), node.name) for node in newly if node.name not in counted]
    recent = Counter(int(name[1:]) % 2 for at, name in world.starts if at > began)
    assert all(recent[int(node.name[1:]) % 2] <= RATE_LIMITS[0].allowed(len(before)) for node in newly)
    assert all(f"{node.name}: {node.notice}" in plan.reasons for node in before if node.notice)

    for old, new in zip(before, after, strict=True):
        mine = [action for action in plan.actions if action.node == old.name]
        forward = {action.verb for action in mine} - {"release", "publish"}
        if old.unwritable or not old.readable:
            assert not mine
            continue
        if old.opt_out or old.owner or old.cordoned_by or old.maintenance:
            assert not forward
        if old.opt_out:
            assert new.marks.level is Level.NONE
        assert new.marks.level <= ALLOWED_LEVELS[world.stage]
        if new.marks.level:
            assert world.evidence(old), "a mark stands on nothing"
            assert plan.nodes[old.name].rules or rests_on_something(world, new, plan.state)
        if world.flags.get("kill"):
            assert {action.verb for action in mine} <= {"release"}
        if world.flags.get("drift") and not world.flags.get("kill"):
            assert not forward & {"swap", "drain"}
        for action in mine:
            assert action.reasons
            assert action.verb == "release" or action.expires_at > world.now
    check_requests(world, plan, {node.name: node for node in after})
    world.nodes, world.state = after, noted
    return plan


def check_requests(world: FleetHistory, plan: Plan, after: dict[str, NodeView]) -> None:
    """Check the probes and checkpoints of a decision, and let the probes run."""
    probes = [request.node for request in plan.requests if request.rung == "probe"]
    assert not world.probing & set(probes), "probed twice at once"
    assert not probes or len(world.probing) + len(probes) <= PROBES.max_concurrent
    world.probing -= plan.stopped.keys()
    for name in [*world.probing, *probes]:
        node = after[name]
        assert not node.jobs, "a job waits for a probe"
        assert not node.down
        assert not node.resting
        assert not node.marks.level.hard
    for request in plan.requests:
        assert request.reasons
        assert request.expires_at > world.now
        assert request.saves > 0
        for job in request.jobs:
            last = world.asked.get(job)
            due = last is None or last[0] == world.now or world.now >= last[0] + world.config.horizon
            assert due or request.risk >= 2 * last[1]
            world.asked[job] = world.now, request.risk
        assert {job.name for job in after[request.node].jobs if job.can_checkpoint} >= set(request.jobs)
        assert (request.rung == "checkpoint") == bool(request.jobs)
    for name in {*world.probing, *(request.node for request in plan.requests)}:
        node = after[name]
        assert world.stage != "shadow"
        assert not world.flags.get("kill")
        assert node.foreign is None
        assert node.unwritable is None
        assert any(
            unit.score and unit.score.risk is not None and world.now < unit.score.expires_at for unit in node.units
        )
    for request in plan.requests:
        if request.rung == "probe":
            last = world.probed.get(request.node)
            # a decision that is made again at the same instant is the same
            rested = last is None or last[0] == world.now or world.now - last[0] >= PROBES.every
            assert rested or request.risk >= 2 * last[1]
            world.probed[request.node] = world.now, request.risk
    world.probing |= set(probes)


EVENTS = (
    ["score"] * 14 + ["time"] * 4 + ["fleet"] + ["all_well"] * 3
    + ["repair"] * 5 + ["fact", "human", "undo", "opt_out", "owner", "down", "unreadable", "driver", "lose_state"]
    + ["kill", "drift", "maintenance", "rest", "reboot", "edit", "clean"]
    + ["jobs", "jobs", "passed", "failed", "preempted"]
)  # fmt: skip
REACHED = (
    "nodes are out of service", "nodes taken out in", "the breaker is open", "expired at", "was repaired",
    "took it out of service", "owns it", "it opted out", "no other state", "drain postponed",
    "not re-applied during this episode", "the kill switch is set", "XID 79", "stays high", "releases included",
    "edited", "idle at a risk of", "exceeds the cost of a checkpoint",
)  # fmt: skip
