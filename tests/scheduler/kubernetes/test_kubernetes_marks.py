"""Each action as one patch: what is ours comes and goes, what is not stays, and whoever writes in between wins."""

import copy
import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policy.fleet import Level
from scheduler.kubernetes.nodes import patch_of, snapshot_of
from scheduler.kubernetes.settings import KubernetesSettings
from scheduler.ports.clock import ManualClock
from scheduler.ports.node_object import Keys, after
from scheduler.ports.readings import Precondition, Switches
from tests.scheduler.kubernetes.api_world import Raw, World, merge
from tests.scheduler.kubernetes.objects import LEVELS, SETTINGS, T0, Hand, add, node, pod

KUBELET = {"key": "node.kubernetes.io/out-of-disk", "effect": "NoExecute", "timeAdded": "2026-11-20T00:00:00Z"}
TEAM = {"key": "team.example/reserved", "value": "yes", "effect": "NoSchedule"}


def condition(raw: Raw) -> tuple[str, str] | None:
    result = [item for item in raw["status"]["conditions"] if item["type"] == "GPUFailurePredicted"]
    return (result[0]["status"], result[0]["reason"]) if result else None


def test_each_action_leaves_its_mark_and_a_release_leaves_nothing(world: World, hand: Hand) -> None:
    world.edit("/api/v1/nodes/n1", lambda raw: raw["spec"].update(taints=[KUBELET, TEAM]))
    before = copy.deepcopy(hand.raw())
    for verb in ("publish", "avoid", "swap", "drain"):
        answer = hand.do(verb)
        assert (answer.kind, answer.version) == ("done", hand.raw()["metadata"]["resourceVersion"])
        assert hand.level() is LEVELS[verb]
        assert answer.writes
        assert hand.do(verb).kind == "already"
    ours = [{"key": "predrain.io/at-risk", "value": value, "effect": effect}
            for value, effect in (("elevated", "PreferNoSchedule"), ("high", "NoSchedule"))]  # fmt: skip
    assert hand.raw()["spec"]["taints"] == [KUBELET, TEAM, *ours]
    assert condition(hand.raw()) == ("True", "RiskHigh")
    assert hand.do("release", tier="clear").kind == "done"
    assert hand.announce() == ()
    after_all = hand.raw()
    assert after_all["spec"] == before["spec"]
    assert after_all["status"] == before["status"]
    assert after_all["metadata"]["labels"] == before["metadata"]["labels"]
    assert after_all["metadata"]["annotations"] == {}


def test_the_risk_has_its_horizon_and_a_label_that_jobs_avoid_goes_with_it(world, cluster):
    hand = Hand(world, cluster, replace(SETTINGS, avoid_label="gke.example/large-training=False"))
    hand.scheduler.keys.horizon = timedelta(hours=24)

    def published(verb: Any, tier: str) -> tuple[str | None, Any]:
        hand.do(verb, tier=tier)
        metadata = hand.raw()["metadata"]
        text = metadata["annotations"].get("predrain.io/prediction", "{}")
        return metadata["labels"].get("gke.example/large-training"), json.loads(text)

    assert published("publish", "watch")[0] is None
    label, prediction = published("publish", "elevated")
    assert label == "False"
    assert prediction == {
        "tier": "elevated", "risk": 0.9, "horizon_seconds": 86400, "expires_at": "2026-11-21T18:00:00+00:00",
        "reasons": ["its errors rise"], "avoid_label": "gke.example/large-training=False",
    }  # fmt: skip
    assert published("publish", "watch")[0] is None
    assert published("publish", "high")[0] == "False"
    hand.scheduler.keys.avoid = None  # switched off meanwhile: its record still removes it
    assert published("release", "clear") == (None, {})
    assert {path for method, path in world.asked if method == "PATCH"} == {"/api/v1/nodes/n1/status"}


@pytest.mark.parametrize("theirs", ["True", "False"])
def test_a_label_of_another_or_one_that_was_changed_since_is_left_alone(world, cluster, theirs):
    hand = Hand(world, cluster, replace(SETTINGS, avoid_label="team=False"))

    def set_label(value: str | None) -> None:
        world.edit("/api/v1/nodes/n1", lambda raw: raw["metadata"]["labels"].update(team=value))

    set_label(theirs)
    for verb in ("publish", "release"):
        hand.do(verb)
        assert hand.raw()["metadata"]["labels"]["team"] == theirs
    world.edit("/api/v1/nodes/n1", lambda raw: raw["metadata"]["labels"].pop("team"))
    hand.do("publish")
    set_label("True")
    for verb in ("publish", "release"):
        hand.do(verb)
        assert hand.raw()["metadata"]["labels"]["team"] == "True"


def test_publishing_needs_no_right_but_that_of_a_nodes_status(world: World, hand: Hand) -> None:
    hand.do("publish", tier="watch")
    hand.do("release", tier="clear")
    assert {path for method, path in world.asked if method == "PATCH"} == {"/api/v1/nodes/n1/status"}


def test_who_writes_between_reading_and_patching_wins(world: World, hand: Hand) -> None:
    reading = hand.scheduler.revalidate("n1")
    world.edit("/api/v1/nodes/n1", lambda raw: raw["spec"].update(taints=[TEAM]))
    expected = Precondition(reading.version, reading.boot_id, "me", T0 + timedelta(seconds=9))
    answer = hand.scheduler.apply(hand.action("swap"), expected)
    assert (answer.kind, answer.writes) == ("conflict", ())
    assert hand.raw()["spec"]["taints"] == [TEAM]
    assert hand.do("swap").kind == "done", "on the node as it is now"
    assert hand.raw()["spec"]["taints"][0] == TEAM


@pytest.mark.parametrize(
    ("status", "kind"), [(403, "refused"), (404, "gone"), (409, "conflict"), (422, "refused"), (503, "timeout")]
)
def test_each_refusal_has_its_kind(world: World, hand: Hand, status: int, kind: str) -> None:
    world.fail("PATCH", "nodes/n1", status, content={"message": "no"}, times=99)
    answer = hand.do("swap")
    assert (answer.kind, answer.writes) == (kind, ())
    assert "no" in answer.message


def test_a_write_whose_answer_was_lost_is_not_done_twice(world: World, hand: Hand) -> None:
    world.fail("PATCH", "nodes/n1", after=True)  # carried out, then cut
    answer = hand.do("swap")
    assert answer.kind == "conflict", "the second try finds another version; the controller reads the node again"
    assert hand.do("swap").kind == "already"
    assert len(hand.raw()["spec"]["taints"]) == 1


def test_without_the_lease_nothing_is_sent(world: World, hand: Hand) -> None:
    sent = len(world.asked)
    hand.clock.move(-timedelta(hours=1))  # the machine's clock is set back, and the lease looks long
    hand.elapsed.move(seconds=31)
    answer = hand.do("swap")
    assert (answer.kind, answer.message) == ("refused", "the lease of me has expired")
    assert not [request for request in world.asked[sent:] if request[0] == "PATCH"]
    hand.scheduler.drop_lease("me")
    assert hand.do("swap").message == "me does not hold the lease"


def test_a_condition_that_cannot_be_written_is_reported_and_fails_nothing(world: World, hand: Hand) -> None:
    world.fail("PATCH", "nodes/n1/status", 403, content={"message": "no condition"})
    add(world, node("n3"))
    answer = hand.do("publish")
    assert (answer.kind, answer.message) == ("done", "the condition was not written: HTTP 403: no condition")
    assert hand.level() is Level.PUBLISH
    assert hand.announce() == ()
    for name in ("n1", "n2", "n3"):
        assert hand.do("swap", name, tier="elevated").message == ""
    world.fail("PATCH", "nodes/n1/status", 403, content={"message": "no condition"})
    world.fail("PATCH", "nodes/n2/status", times=99)
    refused, unanswered = hand.announce()
    assert refused == "n1: the condition was not written: HTTP 403: no condition"
    assert unanswered.startswith("n2 and 1 more: the condition was not written: PATCH /api")
    assert hand.announce() == ()
    assert {hand.level(name) for name in ("n1", "n2", "n3")} == {Level.SWAP}


def test_a_condition_left_behind_is_corrected_by_whoever_holds_the_lease(world: World, hand: Hand) -> None:
    hand.do("publish")
    world.edit("/api/v1/nodes/n1", lambda raw: raw["metadata"].update(labels={}, annotations={}))
    assert condition(hand.raw()) == ("True", "RiskHigh")
    hand.scheduler.read_fleet()
    assert condition(hand.raw()) == ("Unknown", "PredictionExpired")
    hand.scheduler.read_fleet()
    hand.later(timedelta(days=2))
    hand.scheduler.read_fleet()
    assert condition(hand.raw()) is None


def test_a_prediction_that_expired_is_unknown_and_one_that_holds_is_left_alone(world: World, hand: Hand) -> None:
    hand.do("publish")
    version = hand.raw()["metadata"]["resourceVersion"]
    hand.scheduler.read_fleet()
    assert hand.raw()["metadata"]["resourceVersion"] == version
    hand.later(timedelta(hours=7))
    hand.scheduler.read_fleet()
    assert condition(hand.raw()) == ("Unknown", "PredictionExpired")
    hand.do("release", tier="unknown")
    assert condition(hand.raw()) == ("Unknown", "PredictionExpired")


def test_a_preview_reports_exactly_what_is_written(hand: Hand) -> None:
    reading = hand.scheduler.revalidate("n1")
    (previewed,) = hand.scheduler.preview((hand.action("swap"),), reading)
    assert [write.message.split(": ")[1] for write in previewed] == [
        "metadata.labels[predrain.io/risk-tier]", "metadata.annotations[predrain.io/applied-taints]",
        "metadata.annotations[predrain.io/prediction]", "spec.taints", "status.conditions[GPUFailurePredicted]",
    ]  # fmt: skip
    assert hand.do("swap").writes == previewed[:4], "the condition comes after the marks of all nodes"
    hand.announce()
    assert hand.raw()["status"]["conditions"][1]["message"] == hand_message(hand)
    reading = hand.scheduler.revalidate("n1")
    assert hand.scheduler.preview((hand.action("publish"),), reading) == ((),), "the taint published it"
    reading = hand.scheduler.revalidate("n2")
    (previewed,) = hand.scheduler.preview((hand.action("publish", "n2"),), reading)
    assert [(write.path, write.before) for write in previewed] == [
        ("metadata.labels[predrain.io/risk-tier]", None), ("metadata.annotations[predrain.io/applied-taints]", None),
        ("metadata.annotations[predrain.io/prediction]", None),
        ("status.conditions[GPUFailurePredicted]", None),
    ]  # fmt: skip
    assert previewed[3].after == "True (RiskHigh): " + hand_message(hand)
    assert hand.do("publish", "n2").writes == previewed, "a condition goes with what is a matter of status alone"
    assert hand.raw("n2")["status"]["conditions"][1]["message"] == hand_message(hand)


def hand_message(hand: Hand) -> str:
    """What the condition says of an action of the hand."""
    end = (hand.clock.now() + timedelta(hours=6)).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"tier high (risk 0.9), valid until {end}: its errors rise"


def test_switches_are_annotations_that_people_may_set_too(world: World, hand: Hand) -> None:
    scheduler = hand.scheduler
    assert scheduler.read_switches() == Switches()
    wanted = Switches(kill=True, release_all=True, reset_breaker_at=T0)
    assert scheduler.set_switches(wanted).kind == "done"
    assert scheduler.set_switches(wanted).kind == "already"
    assert scheduler.read_switches() == scheduler.read_fleet().switches == wanted
    assert scheduler.set_switches(Switches()).kind == "done"
    path = "/api/v1/namespaces/predrain/configmaps/predrain-state"
    world.edit(path, lambda raw: raw["metadata"].update(annotations={"predrain.io/kill": "yes please", "a": "b"}))
    fleet = scheduler.read_fleet()
    assert fleet.switches == Switches(kill=True), "somebody meant something"
    assert fleet.error == "switches that cannot be parsed: predrain.io/kill='yes please'"
    assert scheduler.set_switches(Switches()).kind == "done"
    assert world.objects[path]["metadata"]["annotations"] == {"a": "b"}
    for kept in ({}, {"predrain.io/kill": "false"}):  # what a webhook makes of it
        answer = {**world.objects[path], "metadata": {**world.objects[path]["metadata"], "annotations": kept}}
        world.fail("PUT", "configmaps", 200, content=answer)
        assert scheduler.set_switches(Switches(kill=True)).kind == "refused", "the operator must learn of it"


def test_switches_are_read_at_most_every_100_ms_and_at_once_after_they_were_set_here(world: World, hand: Hand) -> None:
    scheduler, path = hand.scheduler, "/api/v1/namespaces/predrain/configmaps/predrain-state"
    assert scheduler.set_switches(Switches(kill=True)).kind == "done"
    assert scheduler.read_switches() == Switches(kill=True)
    world.edit(path, lambda raw: raw["metadata"].update(annotations={}))
    hand.elapsed.move(seconds=0.09)
    assert scheduler.read_switches() == Switches(kill=True)
    hand.elapsed.move(seconds=0.02)
    assert scheduler.read_switches() == Switches()
    assert scheduler.set_switches(Switches(release_all=True)).kind == "done"
    assert scheduler.read_switches() == Switches(release_all=True)


def test_a_node_is_known_for_10_s_after_it_was_listed_or_written_and_no_longer_than_a_write(world, hand):
    scheduler = hand.scheduler
    assert scheduler.as_known("n1") is None, "not before it was listed"
    scheduler.read_fleet()
    add(world, pod("late", "n1", gpus=2))
    known = scheduler.as_known("n1")
    assert [job.gpus for job in known.view.jobs] == [2], "its jobs are as they are now"
    world.edit("/api/v1/nodes/n1", lambda raw: raw["spec"].update(taints=[TEAM]))
    expected = Precondition(known.version, known.boot_id, "me", T0 + timedelta(seconds=9))
    assert scheduler.apply(hand.action("swap"), expected).kind == "conflict"
    assert scheduler.as_known("n1") is None
    assert hand.do("swap").kind == "done"
    again = scheduler.as_known("n1")
    assert (again.version, again.view.marks.tainted) == (hand.raw()["metadata"]["resourceVersion"], True)
    world.fail("PATCH", "nodes/n1", 409, skip=1)
    assert hand.do("release").kind == "conflict", "the second of its two patches"
    assert scheduler.as_known("n1") is None
    assert hand.do("swap").kind == "done"
    hand.elapsed.move(seconds=11)
    assert (scheduler.as_known("n1"), scheduler.as_known("n2")) == (None, None)


TEXTS = st.text("abz/~. ", max_size=4)
TAINTS = st.lists(
    st.fixed_dictionaries(
        {"key": st.sampled_from(["predrain.io/at-risk", "predrain.io/other", "x~y/z"]), "value": TEXTS},
        optional={"timeAdded": st.just("2026-11-20T00:00:00Z")},
    ),
    max_size=4,
)


@pytest.mark.parametrize("version", ["", None])
def test_a_node_without_a_version_is_not_readable(version: str | None) -> None:
    raw = node("n1")
    raw["metadata"]["resourceVersion"] = version
    seen = snapshot_of(raw, KubernetesSettings(), KubernetesSettings().rules, Keys(), T0)
    assert not seen.reading.view.readable


@given(
    TAINTS,
    st.one_of(st.none(), st.dictionaries(st.sampled_from(["a/b~c", "predrain.io/prediction", "note"]), TEXTS)),
    st.one_of(st.none(), st.dictionaries(st.sampled_from(["zone", "predrain.io/risk-tier"]), TEXTS)),
    st.lists(st.sampled_from(["publish", "avoid", "swap", "drain", "release"]), min_size=1, max_size=4),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_stood_there_only_what_is_ours_changes(taints: Any, notes: Any, labels: Any, verbs: Any) -> None:
    keys, rules, clock = Keys(), KubernetesSettings().rules, ManualClock(T0)
    raw = node("n1")
    effects = ("NoSchedule", "PreferNoSchedule", "NoExecute")
    unique = {(taint["key"], effects[at % 3]): {**taint, "effect": effects[at % 3]} for at, taint in enumerate(taints)}
    raw["spec"]["taints"] = list(unique.values())
    raw["metadata"] |= {"resourceVersion": "7", "annotations": notes, "labels": labels}
    if notes is None:
        del raw["metadata"]["annotations"]
    foreign = [taint for taint in raw["spec"]["taints"] if not _ours(taint)]
    for verb in verbs:
        seen = snapshot_of(raw, KubernetesSettings(), rules, keys, clock.now())
        then = after(Hand.action(_At(clock), verb), seen.node_object, keys, clock.now())
        merge(raw, patch_of(seen, then))
        again = snapshot_of(raw, KubernetesSettings(), rules, keys, clock.now())
        assert again.node_object == then
    assert [item for item in raw["spec"].get("taints") or [] if not _ours(item)] == foreign
    for part, before in (("annotations", notes), ("labels", labels)):
        kept = {key: value for key, value in (before or {}).items() if not key.startswith("predrain.io/")}
        left = raw["metadata"].get(part) or {}
        assert {key: value for key, value in left.items() if not key.startswith("predrain.io/")} == kept


class _At:
    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock


def _ours(taint: Raw) -> bool:
    return taint["key"] == "predrain.io/at-risk" and taint["effect"] != "NoExecute"
