"""The scheduler extender: what it may never do, as properties; and the protocol on a real port."""

import http.client
import json
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.risk_record import RiskRecord
from policy.stages import StagesConfig
from policy.tiers import may_use_risk
from scheduler.ledger.reader import LedgerReader
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.readings import Switches
from serving.http.extender import (
    MAX_PRIORITY,
    ControllerDecisions,
    filter_result,
    job_of,
    kept_nodes,
    priorities,
    priority,
)
from serving.http.limits import ServiceSettings
from serving.scores.reading import ScoredFleet, Scores, state_of
from tests.policy.decide_world import config
from tests.scheduler.cluster import Cluster
from tests.serving.http.world import DECIDED, NOW, Running, record, running, small_fleet
from tests.serving.score_folder import write_scores
from tests.waiting import wait

TIERS = ("clear", "watch", "elevated", "high")
ORDER = {tier: place for place, tier in enumerate(TIERS)}


def fleet_of(records: list[RiskRecord]) -> ScoredFleet:
    nodes: dict[str, list[RiskRecord]] = {}
    for risk in records:
        nodes.setdefault(risk.node, []).append(risk)
    return ScoredFleet(
        Scores(
            "20260101T060000Z",
            {risk.unit: risk for risk in records},
            {node: tuple(units) for node, units in nodes.items()},
            DECIDED,
            DECIDED,
            max(risk.expires_at for risk in records),
            {},
            {},
        )
    )


@st.composite
def fleets(draw: st.DrawFn) -> ScoredFleet:
    units = draw(
        st.lists(
            st.tuples(
                st.sampled_from([f"n{number}" for number in range(6)]),
                st.one_of(st.none(), st.floats(0, 1)),
                st.sampled_from(TIERS),
                st.sampled_from([-1, 1, 30, 90, 600]),
            ),
            min_size=1,
            max_size=20,
        )
    )
    records = [
        record(f"g{number}", node, risk, tier, expires=timedelta(hours=1, minutes=minutes))
        for number, (node, risk, tier, minutes) in enumerate(units)
    ]
    return fleet_of(records)


asked = st.lists(st.sampled_from([f"n{number}" for number in range(8)]), unique=True)
later = st.integers(-60, 800).map(lambda minutes: NOW + timedelta(minutes=minutes))


def really_high(fleet: ScoredFleet, node: str, now: Any) -> bool:
    """Whether any of a node's GPUs is high by a score that holds: written without the code under test."""
    units = [unit for unit in fleet.scores.units.values() if unit.node == node]
    return any(unit.risk is not None and unit.tier == "high" and now < unit.expires_at for unit in units)


def plain_risk(fleet: ScoredFleet, node: str, now: Any) -> Fraction:
    left = Fraction(1)
    for unit in fleet.scores.units.values():
        if unit.node == node and unit.risk is not None and now < unit.expires_at:
            left *= 1 - Fraction(unit.risk)
    return 1 - left


@settings(max_examples=60)
@given(fleets(), asked, later)
def test_only_nodes_of_tier_high_by_scores_that_hold_are_removed_and_never_all(fleet, names, now):
    passed, removed = kept_nodes(names, fleet, now)
    assert sorted([*passed, *removed]) == sorted(names)
    assert passed == [name for name in names if name in passed]
    assert bool(passed) == bool(names)
    assert all(really_high(fleet, name, now) for name in removed)
    expected = [name for name in names if not really_high(fleet, name, now)]
    if expected:
        assert passed == expected
    elif names:
        assert len(passed) == 1
        least = min(plain_risk(fleet, name, now) for name in names)
        assert float(plain_risk(fleet, passed[0], now)) == pytest.approx(float(least), rel=1e-9, abs=1e-12)


@settings(max_examples=60)
@given(fleets(), asked, later)
def test_priorities_are_whole_numbers_in_range_and_fall_with_tier_and_risk(fleet, names, now):
    given_scores = priorities(names, fleet, now)
    assert [entry["Host"] for entry in given_scores] == names
    assert all(type(entry["Score"]) is int and 0 <= entry["Score"] <= MAX_PRIORITY for entry in given_scores)
    known = [
        (state, entry["Score"])
        for entry in given_scores
        if (state := fleet.state(entry["Host"], now)) is not None and state.risk is not None
    ]
    for one, score in known:
        for other, another in known:
            assert one.risk is not None
            assert other.risk is not None
            if ORDER[one.tier] < ORDER[other.tier]:
                assert score > another
            elif one.tier == other.tier and one.risk <= other.risk:
                assert score >= another


@settings(max_examples=60)
@given(fleets(), later)
def test_a_nodes_risk_is_that_any_of_its_known_gpus_fails(fleet: ScoredFleet, now: Any) -> None:
    for node, units in fleet.scores.nodes.items():
        state = fleet.state(node, now)
        assert state == state_of(node, units, None, now)
        if state.known:
            assert state.risk == pytest.approx(float(plain_risk(fleet, node, now)), rel=1e-9, abs=1e-15)
        else:
            assert (state.risk, state.tier) == (None, "unknown")
    assert {state.node for state in fleet.states(now)} == set(fleet.scores.nodes)


def test_a_node_of_which_nothing_is_known_is_neither_best_nor_shunned() -> None:
    fleet = fleet_of(small_fleet())
    scores = {node: priority(fleet.state(node, NOW)) for node in ("n1", "n2", "n3", "n4", "n5", "n6")}
    assert scores == {"n1": 0, "n2": 3, "n3": 7, "n4": 10, "n5": 7, "n6": 7}


def pod(gpus: Any = 8, priority: Any = 0, **marks: str) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": gpus}
    spec = {"priority": priority, "containers": [{"name": "c"}, {"resources": {"limits": limits}}]}
    return {
        "metadata": {"name": "p", "annotations": {name.replace("_", "-"): text for name, text in marks.items()}},
        "spec": spec,
    }


GANG, COUNT = {"scheduling.x-k8s.io/pod-group": "g"}, "kueue.x-k8s.io/pod-group-total-count"


@pytest.mark.parametrize(
    ("one", "may"),
    [(pod(), True), (pod("4"), True), (pod(16), False), (pod(**GANG), False), (pod(1, **GANG, **{COUNT: "8"}), True),
     (pod(8, **GANG, **{COUNT: "32"}), False), (pod(8, -10, **GANG), True), (pod(16, 10), False), (pod(0), False),
     (pod("many"), False), (pod(1, **{COUNT: "-3"}), False), ({"spec": {"priority": "low"}}, False), (None, False),
     ([], False), ({"metadata": [], "spec": 3}, False)],
)  # fmt: skip
def test_small_and_preemptible_pods_may_use_nodes_at_risk_and_what_is_not_known_may_not(one: Any, may: bool) -> None:
    gpus, preemptible = job_of({"pod": one, "NodeNames": []})
    assert may_use_risk(gpus, high=False, preemptible=preemptible) == may


def test_gangs_avoid_nodes_at_risk_and_small_jobs_leave_the_others_to_them(service: Running) -> None:
    names = ["n1", "n2", "n3", "n4", "other"]

    def scores(one: dict[str, Any]) -> list[int]:
        response = service.extender().post("/scheduler/prioritize", {"Pod": one, "NodeNames": names})
        return [score["Score"] for score in response]

    assert scores(pod(**GANG)) == [0, 3, 7, 10, 7]
    assert scores(pod(2)) == [0, 10, 10, 10, 10], "but for the node that is about to be drained, all are the same"


POD = {"metadata": {"name": "train-0", "namespace": "default"}, "spec": {"containers": []}}


def test_filter_of_names_removes_the_high_node_and_says_why(service: Running) -> None:
    response = service.extender().post("/scheduler/filter", {"Pod": POD, "NodeNames": ["n5", "n1", "n3", "other"]})
    assert response == {
        "Nodes": None,
        "NodeNames": ["n5", "n3", "other"],
        "FailedNodes": {"n1": "predrain: a GPU is at high risk of failing (node risk 0.9)"},
        "FailedAndUnresolvableNodes": {"n1": "predrain: a GPU is at high risk of failing (node risk 0.9)"},
        "Error": "",
    }
    # keys whatever their case, and the last node however risky
    client = service.extender()
    assert client.post("/scheduler/filter", {"pod": POD, "nodenames": ["n1", "n2"]})["NodeNames"] == ["n2"]
    last = client.post("/scheduler/filter", {"Pod": POD, "NodeNames": ["n1"]})
    assert (last["NodeNames"], last["FailedNodes"]) == (["n1"], {})
    assert client.post("/scheduler/filter", {"Pod": POD, "NodeNames": []})["NodeNames"] == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"Pod":{}}',
        b'{"NodeNames":[1]}',
        b'{"NodeNames":"n"}',
        b'{"Nodes":{"items":[]}}',
        b"[" * 9999,
    ],
)
def test_what_is_no_extender_request_is_refused(service: Running, body: bytes) -> None:
    for path in ("/scheduler/filter", "/scheduler/prioritize"):
        assert service.extender().send("POST", path, body)[0] == 400


def test_a_fault_inside_lets_everything_pass(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(service.service.score_cache.served.fleet, "state", broken)
    client = service.extender()
    passed = "predrain_extender_passed_through_total"
    count = service.metric(passed)
    response = client.post("/scheduler/filter", {"Pod": POD, "NodeNames": ["n1", "n2"]})
    assert response == filter_result(["n1", "n2"], {})
    assert {score["Score"] for score in client.post("/scheduler/prioritize", {"NodeNames": ["n1", "n2"]})} == {0}
    assert service.metric(passed) == count + 2


def test_the_ports_are_apart(service: Running) -> None:
    assert service.client().send("POST", "/scheduler/filter", {"NodeNames": []})[0] == 404
    assert service.extender().send("GET", "/v1/nodes")[0] == 404
    assert service.extender().get("/healthz") == b"ok\n"


def test_scores_that_are_stale_remove_nothing(tmp_path: Path) -> None:
    write_scores(tmp_path, small_fleet())
    now = [NOW]
    with running(tmp_path, clock=lambda: now[0], settings=ServiceSettings(stale_after_s=3600)) as service:
        client = service.extender()
        assert client.post("/scheduler/filter", {"NodeNames": ["n1", "n2"]})["NodeNames"] == ["n2"]
        now[0] += timedelta(seconds=1)
        assert client.post("/scheduler/filter", {"NodeNames": ["n1", "n2"]})["NodeNames"] == ["n1", "n2"]
        scores = client.post("/scheduler/prioritize", {"NodeNames": ["n1", "n4"]})
        assert [score["Score"] for score in scores] == [7, 7]


def test_the_extender_asks_for_no_token_and_outlives_damaged_scores(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"read sha256:{'0' * 64}\n")
    folder = tmp_path / "scores"
    with running(folder, wait_for_scores=False, tokens=tokens) as service:
        client = service.extender()
        assert client.post("/scheduler/filter", {"NodeNames": ["n1", "n2"]})["NodeNames"] == ["n1", "n2"]
        write_scores(folder, small_fleet())
        wait(lambda: client.post("/scheduler/filter", {"NodeNames": ["n1", "n2"]})["NodeNames"] == ["n2"])
        (folder / "latest.json").write_text("{")
        wait(lambda: service.service.score_cache.served.error)
        assert client.post("/scheduler/filter", {"NodeNames": ["n1", "n2"]})["NodeNames"] == ["n2"]
    with pytest.raises((OSError, http.client.HTTPException, json.JSONDecodeError)):
        client.post("/scheduler/filter", {"NodeNames": ["n1"]})


@settings(max_examples=60)
@given(
    fleets(), asked, later, st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]), st.sets(st.sampled_from(["n0", "n1", "n2"]))
)
def test_no_more_than_a_share_is_removed_and_only_what_the_controller_keeps_work_off(fleet, names, now, share, out):
    _, removed = kept_nodes(names, fleet, now, dict.fromkeys(out, now + timedelta(minutes=1)), share)
    assert set(removed) <= out
    assert len(removed) <= max(1, int(share * len(names)))
    every, _ = kept_nodes([f"n{number}" for number in range(8)], fleet, now, None, share)
    assert 8 - len(every) <= max(1, int(share * len(fleet.scores.nodes)))
    assert kept_nodes(names, fleet, now, {}, 1.0) == (names, {})
    assert kept_nodes(names, fleet, now, dict.fromkeys(out, now), 1.0) == (names, {}), "the prediction has expired"


def test_the_share_bounds_each_request_and_the_fleet_and_the_riskiest_go_first() -> None:
    fleet = fleet_of([record(f"g{i}", f"n{i}", (i + 1) / 10, "high", expires=timedelta(days=1)) for i in range(8)])
    assert sorted(kept_nodes([f"n{i}" for i in range(8)], fleet, NOW, None, 0.5)[1]) == ["n4", "n5", "n6", "n7"]
    assert sorted(kept_nodes(["n4", "n5", "n6", "n7"], fleet, NOW, None, 0.5)[1]) == ["n6", "n7"]
    assert kept_nodes(["n0", "n1", "n2", "n3"], fleet, NOW, None, 0.5)[1] == {}, "others use the fleet's share up"
    assert sorted(kept_nodes([f"n{i}" for i in range(8)], fleet, NOW, None, 0.0)[1]) == ["n7"]


@pytest.mark.parametrize(
    ("stages", "kill", "removed"),
    [({"pinned": {"c/g": "hard"}}, False, {"n1"}), ({"pinned": {"c/g": "soft"}}, False, set()),
     ({}, False, set()), ({"pinned": {"c/g": "hard"}}, True, set())],
)  # fmt: skip
def test_the_extender_follows_stage_breaker_and_switches_of_the_controller(tmp_path, stages, kill, removed):
    ledger = tmp_path / "ledger.db"
    cluster = Cluster(4, ledger=SqliteLedger(ledger), policy=replace(config("g"), stages=StagesConfig(**stages)))
    cluster.scheduler.set_switches(Switches(kill=kill))
    cluster.scored(n1=0.9)
    cluster.round()
    cluster.ledger.close()
    decisions = ControllerDecisions(lambda: LedgerReader(ledger))
    decisions.refresh()
    assert set(decisions.out) == removed
    now = cluster.clock.now()
    fleet = fleet_of([record(f"{name}-0", name, 0.9, "high", expires=timedelta(days=3650)) for name in cluster.names])
    assert set(kept_nodes(cluster.names, fleet, now, decisions.out, 1.0)[1]) == removed


def test_a_ledger_that_cannot_be_read_removes_no_node(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.db"
    decisions = ControllerDecisions(lambda: LedgerReader(ledger))
    decisions.refresh()
    assert decisions.out == {}
    cluster = Cluster(4, ledger=SqliteLedger(ledger))
    cluster.scored(n1=0.9)
    cluster.round()
    decisions.refresh()
    assert set(decisions.out) == {"n1"}, "it is read as soon as it is there"
    cluster.ledger.close()
    decisions._reader.close()
    decisions.refresh()
    assert decisions.out == {}
