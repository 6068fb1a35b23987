"""Random histories of the controller on an API server: people, tools, pods, faults and restarts; what always holds."""

import copy
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from random import Random

import pytest

from policy.fleet import Level
from scheduler.evacuation.progress import stored_progress
from tests.histories import COUNT, History, play_all, step
from tests.scheduler.evacuation.emptying_cluster import FAST, silent_waits
from tests.scheduler.kubernetes.api_world import MEANWHILE, Raw, World, managed, served
from tests.scheduler.kubernetes.fleet import JOBS, MOST_OUT, NAMES, OURS, Fleet
from tests.scheduler.kubernetes.objects import SETTINGS, add, node, pod

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


class ServedHistory(History):
    """A controller on an API server over HTTP."""

    settings, longest = SETTINGS, 8

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.stack, self.world = ExitStack(), World()
        add(self.world, *(node(name) for name in NAMES), *(pod(f"p{i}", name) for i, name in enumerate(NAMES)))
        for name, tries in (("indexed", 6), ("last-try", 0)):
            self.world.put(f"{JOBS}/{name}", {"spec": {"backoffLimit": tries}})
        self.fleet = Fleet(self.stack.enter_context(served(self.world)), self.world, self.settings)

    def close(self) -> None:
        self.stack.close()

    @step(3)
    def a_node_is_scored(self) -> None:
        self.fleet.scored(**{self._node(): self.one_of(0.01, 0.2, 0.45, 0.9)})

    @step(2)
    def time_passes(self) -> None:
        self.fleet.later(timedelta(hours=self.one_of(1, 7)))

    @step()
    def another_process_takes_over(self) -> None:
        self.fleet.restart()

    def end(self) -> None:
        self.world.faults.clear()
        self.fleet.scored(**dict.fromkeys(NAMES, 0.01))
        self.fleet.later(timedelta(hours=7))
        for _ in range(3):
            self.fleet.scored()
            self.fleet.round()
        assert {name for name in NAMES if self.fleet.named_ours(name)} <= self.fleet.claimed.keys()

    def _node(self) -> str:
        return self.one_of(*NAMES)

    def _raw(self, name: str) -> Raw:
        return self.world.objects[f"/api/v1/nodes/{name}"]


class KubernetesHistory(ServedHistory):
    """Pods, faults, and others who write to nodes."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.fleet.evacuation = FAST
        self.fleet.restart()

    def check(self) -> None:
        fleet = self.fleet
        fleet.theirs = fleet.foreign()
        report = fleet.round()
        assert fleet.foreign() == fleet.theirs
        if not report.failed and report.active and not self.world.faults:
            levels = {name: Level.DRAIN for name in NAMES if "NoSchedule" in fleet.ours(name)}
            assert silent_waits(report, fleet.workloads, levels, fleet.clock.now()) == []
        for name, claimed in fleet.claimed.items():
            assert claimed <= fleet.named_ours(name), "what somebody edited or copied stands"
        out = [name for name in NAMES if "NoSchedule" in fleet.ours(name) and name not in fleet.claimed]
        assert len(out) <= MOST_OUT

    def end(self) -> None:
        super().end()
        progress = stored_progress(self.fleet.workloads)
        assert progress.load() is None
        assert not progress.value.nodes.keys() - self.fleet.claimed.keys()
        quiet = len(self.world.asked)
        assert self.fleet.round().steps == []
        writes = [path for method, path in self.world.asked[quiet:] if method != "GET"]
        assert not [path for path in writes if "leases" not in path and "configmaps" not in path]

    @step(3)
    def a_request_fails(self) -> None:
        self.world.fail(
            self.one_of("GET", "PATCH", "PUT", "POST"), self.one_of("nodes", "leases", "configmaps", "pods", "events"),
            self.one_of(0, 409, 422, 403, 429, 500, 503), content={"message": "told to"}, after=self.happens(0.5),
            skip=self.one_of(0, 1, 3),
        )  # fmt: skip
        self.fleet.scored(**{self._node(): 0.9})

    @step(2)
    def a_tool_writes_to_a_node(self) -> None:
        path, what = f"/api/v1/nodes/{self._node()}", self.one_of("taint", "cordon", "label")
        changes = {
            "taint": self._tainted,
            "cordon": lambda raw: raw["spec"].update(unschedulable=not raw["spec"].get("unschedulable")),
            "label": lambda raw: raw["metadata"].setdefault("labels", {}).update(team=str(self.world.version)),
        }
        self.world.edit(path, changes[what])

    @step(2)
    def a_tool_writes_between_our_reading_and_our_writing(self) -> None:
        name = self._node()

        def race() -> None:
            read = (asked for method, asked in reversed(self.world.asked) if method == "GET" and "/nodes/" in asked)
            self.world.edit(next(read, f"/api/v1/nodes/{name}"), self._tainted)
            self.fleet.theirs = self.fleet.foreign()

        # a node's pods are listed after the node was read; the first listing is that of the whole fleet
        self.world.fail("GET", "pods$", MEANWHILE, then=race, after=True, skip=1 + NAMES.index(name))
        self.fleet.scored(**{name: 0.9})

    def _tainted(self, raw: Raw) -> None:
        new = {"key": "team.example/x", "value": str(self.world.version), "effect": "PreferNoSchedule"}
        raw["spec"].setdefault("taints", []).append(new)

    @step(3)
    def somebody_edits_or_copies_our_marks(self) -> None:
        fleet, name, what = self.fleet, self._node(), self.one_of("value", "record", "copy")
        if name not in fleet.claimed and not fleet.ours(name):
            fleet.scored(**{name: 0.9})
            self.check()
        before, target = fleet.named_ours(name), name
        if not fleet.ours(name) or name in fleet.claimed:
            return
        if what == "copy":
            target = next((other for other in NAMES if not fleet.named_ours(other)), name)
            if target == name:
                return
        source = copy.deepcopy(self._raw(name))

        def change(raw: Raw) -> None:
            if what == "value":
                for taint in raw["spec"]["taints"]:
                    taint.update(value="rma-4711" if taint["key"].startswith(OURS) else taint.get("value"))
            elif what == "record":
                notes, key = raw["metadata"]["annotations"], f"{OURS}applied-taints"
                notes[key] = notes[key].replace('"level"', '"note": "RMA 4711", "level"')
            else:
                raw["spec"]["taints"] = source["spec"]["taints"]
                raw["metadata"]["annotations"] = source["metadata"]["annotations"]

        self.world.edit(f"/api/v1/nodes/{target}", change)
        now = fleet.named_ours(target)
        fleet.claimed[target] = now if what in ("record", "copy") else now - before
        self.met[what] += 1

    @step(4)
    def pods_run_on_a_node_at_risk(self) -> None:
        name = self._node()
        self._run(name, self.random.sample([*PODS], self.random.randint(1, 3)))
        self.check()
        if "NoSchedule" in self.fleet.ours(name):
            labels = [raw["metadata"].get("labels", {}) for path, raw in self.world.objects.items() if "/pods/" in path]
            self.met.update({label["kind"] for label in labels if "kind" in label})

    def _run(self, name: str, kinds: list[str]) -> None:
        """Let pods run on a node at risk; tasks of an indexed job run on other nodes too."""
        for kind in kinds:
            spec = dict(PODS[kind])
            if "nodeSelector" in spec:
                spec["nodeSelector"] = {"kubernetes.io/hostname": name}
            owner = {"apiVersion": "batch/v1", "kind": "Job", "name": kind, "uid": f"u-{kind}", "controller": True}
            for place in (name, *(other for other in NAMES if other != name and kind == "indexed")):
                made = pod(f"{kind}-{self.world.version}", place, **spec)
                made["metadata"]["labels"] = {"kind": kind}
                if spec.get("owner") == "Job":
                    made["metadata"]["ownerReferences"] = [owner]
                add(self.world, made)
        self.fleet.scored(**{name: 0.9})

    @step(3)
    def what_was_evicted_ends_comes_back_or_hangs(self) -> None:
        what = self.one_of("gone", "back", "hangs")
        for path, raw in [(path, raw) for path, raw in self.world.objects.items() if "/pods/" in path]:
            if raw["metadata"].get("deletionTimestamp"):
                self.met[what] += 1
                if what != "hangs":
                    del self.world.objects[path]
                if what == "back":  # it tolerates every taint
                    self._run(raw["spec"]["nodeName"], [raw["metadata"].get("labels", {}).get("kind", "free")])


class CordonHistory(ServedHistory):
    """Nodes that we cordon, and people who cordon and uncordon them: the server keeps who did.

    No uncordon is overruled at once where our taint stands.
    """

    settings = replace(SETTINGS, cordon=True)

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.theirs: set[str] = set()
        self.freed: str | None = None
        for name in NAMES:
            self._put(name, None)

    def end(self) -> None:
        super().end()
        assert self._cordoned() == self.theirs
        for name in NAMES:
            left = self._raw(name)["metadata"].get("annotations") or {}
            assert not [key for key in left if key.startswith(OURS)]

    def check(self) -> None:
        before = self._cordoned()
        self.fleet.round()
        assert self.theirs <= self._cordoned(), "a person's cordon stands"
        assert self.freed not in self._cordoned(), "and so does his uncordon"
        self.freed = None
        for name in self._cordoned() - before:
            assert "NoSchedule" in self.fleet.ours(name), "none of ours without the taint"
            self.met["cordoned"] += 1

    @step(4)
    def a_person_cordons_or_uncordons(self) -> None:
        name = self.one_of(*NAMES[:2])
        for _ in range(self.one_of(1, 2)):  # and perhaps at once the other way round
            out = name in self._cordoned()
            self.met["uncordoned"] += out
            self._put(name, None if out else "kubectl-cordon")
            self.theirs = self.theirs - {name} if out else self.theirs | {name}
            self.freed = name if out and self.fleet.ours(name) else None

    def _node(self) -> str:
        return self.one_of(*NAMES[:2])

    def _cordoned(self) -> set[str]:
        return {name for name in NAMES if self._raw(name)["spec"].get("unschedulable")}

    def _put(self, name: str, manager: str | None) -> None:
        def change(raw: Raw) -> None:
            raw["metadata"]["managedFields"] = managed(manager)
            raw["spec"]["unschedulable"] = manager is not None

        self.world.edit(f"/api/v1/nodes/{name}", change)


MET = {
    KubernetesHistory: ("value", "record", "copy", "gone", "back", "hangs", *PODS),
    CordonHistory: ("cordoned", "uncordoned"),
}


@pytest.mark.parametrize(("kind", "share"), [(KubernetesHistory, 320), (CordonHistory, 800)])
def test_through_any_history_floors_hold_others_things_stay_and_all_is_given_back(
    kind: type[ServedHistory], share: int
) -> None:
    play_all(kind, range(COUNT // share), MET[kind])
