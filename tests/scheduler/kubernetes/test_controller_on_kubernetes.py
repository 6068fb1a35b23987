"""The controller on an API server through random histories: faults, races, restarts, people; what holds throughout."""

import copy
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policy.fleet import Level
from scheduler.evacuation.progress import stored_progress
from scheduler.ports.readings import Switches
from tests.scheduler.evacuation.emptying_cluster import FAST, silent_waits
from tests.scheduler.kubernetes.api_world import MEANWHILE, Raw, World, managed, served
from tests.scheduler.kubernetes.fleet import JOBS, MOST_OUT, NAMES, OURS, Fleet
from tests.scheduler.kubernetes.objects import SETTINGS, add, node, pod

CLAIMS = ("value", "record", "copy")
PODS: dict[str, dict[str, object]] = {
    "free": {},
    "pinned": {"nodeSelector": {"kubernetes.io/hostname": "here"}},
    "opted-out": {"annotations": {"karpenter.sh/do-not-disrupt": "24h"}},
    "unmanaged": {"owner": None},
    "local": {"volumes": [{"name": "scratch", "emptyDir": {}}]},
    "undecided": {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "nowhere"}}]},
    "indexed": {"owner": "Job"},
    "last-try": {"owner": "Job"},
}
"""Pods by what may be done with them: those of ``MOVABLE`` may be evicted."""
FAULTS = st.tuples(
    st.sampled_from(["GET", "PATCH", "PUT", "POST"]),
    st.sampled_from(["nodes", "leases", "configmaps", "pods", "events"]),
    st.sampled_from([0, 409, 422, 403, 429, 500, 503]),
    st.booleans(),
    st.integers(0, 3),
)
STEPS = st.one_of(
    st.tuples(st.just("score"), st.sampled_from(NAMES), st.sampled_from([0.01, 0.2, 0.45, 0.9])),
    st.tuples(st.just("fault"), FAULTS),
    st.tuples(st.just("edit"), st.sampled_from(NAMES), st.sampled_from(["taint", "cordon", "label", "race", *CLAIMS])),
    st.tuples(st.just("later"), st.sampled_from([1, 7])),
    st.tuples(st.just("restart")),
    st.tuples(st.just("drain"), st.sampled_from(NAMES), st.lists(st.sampled_from([*PODS]), min_size=1, max_size=3)),
    st.tuples(st.just("ended"), st.sampled_from(["gone", "back", "hangs"])),
)


def run_pods(fleet: Fleet, name: str, kinds: list[str]) -> None:
    """Let pods run on a node at risk; tasks of an indexed job run on other nodes too."""
    for kind in kinds:
        spec = dict(PODS[kind])
        if "nodeSelector" in spec:
            spec["nodeSelector"] = {"kubernetes.io/hostname": name}
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": kind, "uid": f"u-{kind}", "controller": True}
        for place in (name, *(other for other in NAMES if other != name and kind == "indexed")):
            made = pod(f"{kind}-{fleet.world.version}", place, **spec)
            made["metadata"]["labels"] = {"kind": kind}
            made["metadata"]["ownerReferences"] = (
                [owner] if spec.get("owner") == "Job" else (made["metadata"]["ownerReferences"])
            )
            add(fleet.world, made)
    fleet.scored(**{name: 0.9})


def end_pods(fleet: Fleet, what: str) -> None:
    """What was evicted ends, and perhaps another one comes to its node, which tolerates every taint; or it hangs."""
    world = fleet.world
    for path, raw in [(path, raw) for path, raw in world.objects.items() if "/pods/" in path]:
        if raw["metadata"].get("deletionTimestamp") and what != "hangs":
            del world.objects[path]
            kind = raw["metadata"].get("labels", {}).get("kind", "free")
            if what == "back":
                run_pods(fleet, raw["spec"]["nodeName"], [kind])


def edit(fleet: Fleet, name: str, what: str) -> None:
    """A person or a tool writes to a node: now, or in the moment between our reading and our writing."""

    def taint(path: str) -> None:
        new = {"key": "team.example/x", "value": str(fleet.world.version), "effect": "PreferNoSchedule"}
        fleet.world.edit(path, lambda raw: raw["spec"].setdefault("taints", []).append(new))
        fleet.theirs = fleet.foreign()

    def race() -> None:
        read = (asked for method, asked in reversed(fleet.world.asked) if method == "GET" and "/nodes/" in asked)
        taint(next(read, path))

    path = f"/api/v1/nodes/{name}"
    changes = {
        "cordon": lambda raw: raw["spec"].update(unschedulable=not raw["spec"].get("unschedulable")),
        "label": lambda raw: raw["metadata"].setdefault("labels", {}).update(team=str(fleet.world.version)),
    }
    if what == "race":
        # a node's pods are listed after the node was read; the first listing is that of the whole fleet
        fleet.world.fail("GET", "pods$", MEANWHILE, then=race, after=True, skip=1 + NAMES.index(name))
    elif what in CLAIMS:
        claim(fleet, name, what)
    elif what == "taint":
        taint(path)
    else:
        fleet.world.edit(path, changes[what])


def claim(fleet: Fleet, name: str, what: str) -> None:
    """A person edits our taint or our record, or a tool copies our marks and record to another node."""
    if name not in fleet.claimed and not fleet.ours(name):
        fleet.scored(**{name: 0.9})
        fleet.round()
    before, target = fleet.named_ours(name), name
    if not fleet.ours(name) or name in fleet.claimed:
        return

    def change(raw: Raw) -> None:
        if what == "value":
            for taint in raw["spec"]["taints"]:
                taint.update(value="rma-4711" if taint["key"].startswith(OURS) else taint.get("value"))
        elif what == "record":
            notes, key = raw["metadata"]["annotations"], f"{OURS}applied-taints"
            notes[key] = notes[key].replace('"level"', '"note": "RMA 4711", "level"')
        else:
            source = fleet.world.objects[f"/api/v1/nodes/{name}"]
            raw["spec"]["taints"] = copy.deepcopy(source["spec"]["taints"])
            raw["metadata"]["annotations"] = copy.deepcopy(source["metadata"]["annotations"])

    if what == "copy":
        target = next((other for other in NAMES if not fleet.named_ours(other)), name)
        if target == name:
            return
    fleet.world.edit(f"/api/v1/nodes/{target}", change)
    now = fleet.named_ours(target)
    fleet.claimed[target] = now if what in ("record", "copy") else now - before


@given(st.lists(STEPS, min_size=3, max_size=9))
@example([("edit", "n1", "value"), ("edit", "n2", "record"), ("later", 7)])
@example([("edit", "n1", "copy"), ("edit", "n1", "cordon"), ("later", 7)])
@example([("drain", "n1", sorted(PODS)), ("later", 1), ("edit", "n1", "race"), ("ended", "hangs"), ("later", 1)])
@settings(max_examples=12, deadline=None)
def test_through_any_history_floors_hold_others_things_stay_and_all_is_given_back(steps: list[tuple]) -> None:
    world = World()
    add(world, *(node(name) for name in NAMES), *(pod(f"p{i}", name) for i, name in enumerate(NAMES)))
    with served(world) as cluster:
        fleet = Fleet(cluster, world)
        fleet.evacuation = FAST
        fleet.restart()
        for name, tries in (("indexed", 6), ("last-try", 0)):
            world.put(f"{JOBS}/{name}", {"spec": {"backoffLimit": tries}})
        for kind, *how in steps:
            if kind == "score":
                fleet.scored(**{how[0]: how[1]})
            elif kind == "fault":
                method, path, status, after, skip = how[0]
                world.fail(method, path, status, content={"message": "told to"}, after=after, skip=skip)
            elif kind == "edit":
                edit(fleet, how[0], how[1])
            elif kind == "later":
                fleet.later(timedelta(hours=how[0]))
            elif kind == "drain":
                run_pods(fleet, how[0], how[1])
            elif kind == "ended":
                end_pods(fleet, how[0])
            else:
                fleet.restart()
            fleet.theirs = fleet.foreign()
            report = fleet.round()
            assert fleet.foreign() == fleet.theirs
            if not report.failed and report.active and not world.faults:
                levels = {name: Level.DRAIN for name in NAMES if "NoSchedule" in fleet.ours(name)}
                assert silent_waits(report, fleet.workloads, levels, fleet.clock.now()) == []
            for name, claimed in fleet.claimed.items():
                assert claimed <= fleet.named_ours(name), "what somebody edited or copied stands"
            out = [name for name in NAMES if "NoSchedule" in fleet.ours(name) and name not in fleet.claimed]
            assert len(out) <= MOST_OUT
        world.faults.clear()
        fleet.scored(**dict.fromkeys(NAMES, 0.01))
        fleet.later(timedelta(hours=1))
        for _ in range(3):
            fleet.round()
            fleet.scored()
        progress = stored_progress(fleet.workloads)
        assert progress.load() is None
        assert not progress.value.nodes.keys() - fleet.claimed.keys()
        assert {name for name in NAMES if fleet.named_ours(name)} <= fleet.claimed.keys()
        quiet = len(world.asked)
        assert fleet.round().steps == []
        assert not [path for method, path in world.asked[quiet:] if method != "GET" and "leases" not in path
                    and "configmaps" not in path]  # fmt: skip


CORDON_STEPS = st.one_of(
    st.tuples(st.just("score"), st.sampled_from(NAMES[:2]), st.sampled_from([0.01, 0.45, 0.9])),
    st.tuples(st.just("toggle"), st.sampled_from(NAMES[:2]), st.sampled_from([1, 2])),
    st.tuples(st.just("later"), st.just(""), st.sampled_from([1, 7])),
    st.tuples(st.just("restart"), st.just(""), st.just(0)),
)


@given(st.lists(CORDON_STEPS, min_size=3, max_size=9))
@example([("toggle", "n1", 1), ("score", "n1", 0.9), ("toggle", "n1", 1)])
@example([("score", "n1", 0.9), ("toggle", "n1", 2), ("later", "", 1)])
@settings(max_examples=8, deadline=None)
def test_through_any_history_no_cordon_of_a_person_is_undone_and_none_of_ours_is_left(steps: list[tuple]) -> None:
    """Who cordoned a node is kept as the server keeps it; no uncordon is overruled at once where our taint stands.

    A node that we left alone because a person had cordoned is assessed again as soon as the cordon is gone.
    """
    world = World()
    add(world, *(node(name) for name in NAMES))
    with served(world) as cluster:
        fleet = Fleet(cluster, world, replace(SETTINGS, cordon=True))
        theirs: set[str] = set()

        def cordoned() -> set[str]:
            return {name for name in NAMES if world.objects[f"/api/v1/nodes/{name}"]["spec"].get("unschedulable")}

        def put(name: str, manager: str | None) -> None:
            def change(raw: Raw) -> None:
                raw["metadata"]["managedFields"] = managed(manager)
                raw["spec"]["unschedulable"] = manager is not None

            world.edit(f"/api/v1/nodes/{name}", change)

        for item in NAMES:
            put(item, None)
        for kind, name, value in steps:
            freed = None
            if kind == "score":
                fleet.scored(**{name: value})
            elif kind == "toggle":
                for _ in range(value - 1):  # and at once the other way round
                    out = name in cordoned()
                    put(name, None if out else "kubectl-cordon")
                out = name in cordoned()
                put(name, None if out else "kubectl-cordon")
                theirs = theirs - {name} if out else theirs | {name}
                freed = name if out and fleet.ours(name) else None
            elif kind == "later":
                fleet.later(timedelta(hours=value))
            else:
                fleet.restart()
            before = cordoned()
            fleet.round()
            assert theirs <= cordoned(), "a person's cordon stands"
            assert freed not in cordoned(), "and so does his uncordon"
            for item in cordoned() - before:
                assert "NoSchedule" in fleet.ours(item), "none of ours without the taint"
        fleet.scored(**dict.fromkeys(NAMES, 0.01))
        fleet.later(timedelta(hours=7))
        for _ in range(3):
            fleet.scored()
            fleet.round()
        assert cordoned() == theirs
        for name in NAMES:
            left = world.objects[f"/api/v1/nodes/{name}"]["metadata"].get("annotations") or {}
            assert not [key for key in left if key.startswith(OURS)]


def test_another_installation_leaves_marks_and_condition_alone_and_reports_them() -> None:
    world = World()
    add(world, *(node(name) for name in NAMES))
    with served(world) as cluster:
        fleet = Fleet(cluster, world)
        other = Fleet(cluster, world, replace(SETTINGS, lease="other", state="other-state"))
        fleet.scored(n1=0.9)
        fleet.round()
        before = copy.deepcopy(world.objects["/api/v1/nodes/n1"])
        assert fleet.ours("n1") == ["NoSchedule"]
        for value in (0.9, 0.01):
            other.scored(n1=value, n2=value)
            report = other.round()
            assert world.objects["/api/v1/nodes/n1"] == before
            assert "belong to another installation, predrain/predrain-controller" in "; ".join(report.plan.reasons)
        other.controller.scheduler.set_switches(Switches(release_all=True))
        other.round()
        assert world.objects["/api/v1/nodes/n1"] == before
        fleet.later(timedelta(days=2))
        other.round()
        assert world.objects["/api/v1/nodes/n1"]["status"] == before["status"], "its owner corrects the condition"
        fleet.round()
        assert fleet.named_ours("n1") == set()


@pytest.mark.parametrize("content", [{"items": None, "metadata": {}}, {"metadata": {"name": "another"}}])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "nodes$"), ("GET", "nodes/n2"), ("GET", "pods$"), ("GET", "configmaps"), ("GET", "leases"),
        ("PUT", "leases"), ("PUT", "configmaps"), ("PATCH", "nodes/n2$"), ("PATCH", "nodes/n2/status"),
    ],
)  # fmt: skip
def test_an_answer_of_200_that_is_something_else_would_be_taken_for_done_and_reports_nothing(
    method: str, path: str, content: dict
) -> None:
    world = World()
    add(world, *(node(name) for name in NAMES), pod("p0", "n2"))
    with served(world) as cluster:
        fleet = Fleet(cluster, world)
        fleet.scored(n0=0.45)
        fleet.round()
        fleet.controller.scheduler.set_switches(Switches(kill=True))
        fleet.scored(n0=0.45, n2=0.9)
        world.fail(method, path, 200, content=content, times=99)
        fleet.round()
        assert fleet.ours("n2") == [], "whatever was answered, the kill switch is not forgotten"
        world.faults.clear()
        fleet.controller.scheduler.set_switches(Switches())
        fleet.later(timedelta(hours=1))
        fleet.scored()
        world.fail(method, path, 200, content=content, times=99)
        fleet.round()
        out = [name for name in NAMES if "NoSchedule" in fleet.ours(name)]
        assert out in ([], ["n2"])
        world.faults.clear()
        fleet.later(timedelta(minutes=5))
        fleet.round()
        assert fleet.ours("n0") == ["PreferNoSchedule"], "nothing was taken for gone, or for a person's hand"
        assert fleet.ours("n2") == ["NoSchedule"]
