"""What two looks at a node tell."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.collect.kubernetes.node_tracker import NodeTracker, node_changes
from telemetry.collect.kubernetes.node_view import NodeView, view_of
from telemetry.collect.kubernetes.rules import KubernetesRules, Rule, default_rules, load_rules
from tests.telemetry.collect.kubernetes.objects import EARLIER, NOW, condition, node, saved_and_read, taint

ELEVEN = datetime(2026, 3, 1, 11, tzinfo=UTC)
RULES = default_rules()


def between(
    before: dict[str, Any] | None, after: dict[str, Any], rules: KubernetesRules = RULES
) -> list[tuple[Any, ...]]:
    old = None if before is None else view_of(before, rules)
    events = node_changes(old, view_of(after, rules), rules, NOW)
    assert all(event.known_at >= NOW and event.gpu is None for event in events)
    return [(event.type, event.code, event.source, event.timestamp) for event in events]


def test_a_cordon_has_the_time_of_its_taint_or_of_who_set_it() -> None:
    fields = {"f:spec": {"f:unschedulable": {}}}
    managed = [{"manager": "kubectl-cordon", "time": "2026-03-01T11:30:00Z", "fieldsV1": fields}]
    cordon = taint("node.kubernetes.io/unschedulable", added=EARLIER)
    assert between(node(), node(cordoned=True)) == [("drain", "cordon", "kubernetes", NOW)]
    half_past = ELEVEN + timedelta(minutes=30)
    assert between(node(), node(cordoned=True, managed=managed)) == [("drain", "cordon", "kubernetes", half_past)]
    both = node(cordoned=True, managed=managed, taints=[cordon])
    assert between(node(), both) == [("drain", "cordon", "kubernetes", ELEVEN)]
    assert between(node(cordoned=True), both) == []  # the taint follows the cordon: one drain
    assert between(both, node()) == [("drain", "uncordon", "kubernetes", NOW)]


def test_our_own_cordon_and_taint_say_so() -> None:
    fields = {"f:spec": {"f:unschedulable": {}}}
    managed = [{"manager": "predrain", "time": EARLIER, "fieldsV1": fields}]
    assert between(node(), node(cordoned=True, managed=managed)) == [("drain", "cordon", "predrain", ELEVEN)]
    hard = taint("predrain.io/at-risk", value="high")
    assert between(node(), node(taints=[hard])) == [("drain", "at-risk", "predrain", NOW)]
    assert between(node(taints=[hard]), node()) == [("drain", "undrain", "predrain", NOW)]


def test_a_soft_taint_drains_nothing() -> None:
    soft = taint("predrain.io/at-risk", "PreferNoSchedule", value="elevated")
    assert between(node(), node(taints=[soft])) == [("other", "at-risk", "predrain", NOW)]
    assert between(node(taints=[soft]), node()) == [("other", "at-risk_ended", "predrain", NOW)]


def test_the_taints_that_every_gpu_node_has_are_no_drains() -> None:
    usual = [taint("nvidia.com/gpu", value="present"), taint("node.kubernetes.io/not-ready"), taint("team/only-us")]
    assert between(None, node(taints=usual)) == []


def test_a_drain_is_taken_back_with_its_last_reason() -> None:
    medik8s = taint("medik8s.io/drain", added=EARLIER)
    both, one = node(cordoned=True, taints=[medik8s]), node(taints=[medik8s])
    assert between(both, one) == [("other", "cordon_ended", "kubernetes", NOW)]
    assert between(one, node()) == [("drain", "undrain", "kubernetes", NOW)]
    assert between(both, node()) == [("drain", "uncordon", "kubernetes", NOW)]


def test_our_own_drain_does_not_hold_up_the_release_of_another() -> None:
    own = taint("predrain.io/at-risk", value="high")
    assert between(node(cordoned=True, taints=[own]), node(taints=[own])) == [("drain", "uncordon", "kubernetes", NOW)]
    # The other way round, the node stays drained: an end of ours must not look like its release.
    ended = between(node(cordoned=True, taints=[own]), node(cordoned=True))
    assert ended == [("other", "at-risk_ended", "predrain", NOW)]


def test_ready_comes_and_goes_with_its_own_times() -> None:
    lost, back = ("Unknown", EARLIER), ("True", "2026-03-01T11:20:00Z")
    assert between(node(), node(ready=lost)) == [("other", "node_not_ready", "kubernetes", ELEVEN)]
    twenty_past = ELEVEN + timedelta(minutes=20)
    assert between(node(ready=lost), node(ready=back)) == [("other", "node_ready", "kubernetes", twenty_past)]
    assert between(None, node()) == []
    assert between(None, node(ready=lost)) == [("other", "node_not_ready", "kubernetes", ELEVEN)]


def test_what_was_lost_twice_while_nobody_looked_is_told_again() -> None:
    first, second = node(ready=("False", EARLIER)), node(ready=("False", "2026-03-01T11:40:00Z"))
    again = ELEVEN + timedelta(minutes=40)
    assert between(first, second) == [("other", "node_not_ready", "kubernetes", again)]


def test_conditions_of_monitors_are_told_and_our_own_is_not() -> None:
    ours, theirs = condition("GPUFailurePredicted", "True"), condition("GpuNvlinkWatch", "True")
    assert between(node(), node(conditions=[ours])) == []
    assert between(node(), node(conditions=[theirs])) == [("other", "GpuNvlinkWatch", "kubernetes", ELEVEN)]
    good = condition("GpuNvlinkWatch", "False", "2026-03-01T11:15:00Z")
    quarter = ELEVEN + timedelta(minutes=15)
    assert between(node(conditions=[theirs]), node(conditions=[good])) == [
        ("other", "GpuNvlinkWatch_ended", "kubernetes", quarter)
    ]
    eks = condition("AcceleratedHardwareReady", "False")
    assert between(node(), node(conditions=[eks])) == [("other", "AcceleratedHardwareReady", "kubernetes", ELEVEN)]


def test_a_boot_is_told_when_the_node_is_ready_again() -> None:
    after = node(boot="b2", ready=("True", "2026-03-01T11:05:00Z"))
    assert between(node(), after) == [("other", "boot", "kubernetes", ELEVEN + timedelta(minutes=5))]
    assert between(node(), node(boot="b2")) == [("other", "boot", "kubernetes", NOW)]


def test_another_machine_is_a_replacement_and_the_same_one_in_other_letters_is_not() -> None:
    other = node(machine="CD-2", boot="b2", uid="u2")
    assert [event[:2] for event in between(node(), other)] == [("replacement", "node_replaced")]
    assert between(node(), node(machine="ab-1")) == []
    assert [event[:2] for event in between(node(), node(uid="u2"))] == [("other", "node_recreated")]


def test_a_node_that_went_and_came_back_is_compared_with_what_went() -> None:
    book = NodeTracker(RULES)
    book.update(view_of(node(), RULES), NOW)
    assert [event.code for event in book.remove("n1", NOW)] == ["node_removed"]
    assert book.remove("n1", NOW) == []
    bare = node(uid="u2", gpus=0, machine="", boot="")
    assert [event.code for event in book.update(view_of(bare, RULES), NOW)] == ["node_recreated"]
    assert [event.code for event in book.update(view_of(node(uid="u2", machine="CD"), RULES), NOW)] == ["node_replaced"]


def test_nodes_without_gpus_are_left_out_unless_asked_for() -> None:
    plain = view_of(node("cpu", gpus=0, cordoned=True), RULES)
    assert NodeTracker(RULES).update(plain, NOW) == []
    assert len(NodeTracker(RULES, all_nodes=True).update(plain, NOW)) == 1
    broken = view_of(node("g", gpus=0, labels={"nvidia.com/gpu.present": "true"}, cordoned=True), RULES)
    assert len(NodeTracker(RULES).update(broken, NOW)) == 1


def test_a_place_is_landed_when_it_changes_and_once_an_hour() -> None:
    labels = {"topology.kubernetes.io/zone": "z1", "topology.kubernetes.io/rack": "r7"}
    book = NodeTracker(RULES, cluster="east")
    book.update(view_of(node(labels=labels), RULES), NOW)
    (row,) = book.observations(NOW)
    assert (row["node"], row["cluster"], row["group"], row["rack"]) == ("n1", "east", "z1", "r7")
    assert book.observations(NOW + timedelta(minutes=59)) == []
    assert len(book.observations(NOW + timedelta(minutes=60))) == 1
    book.update(view_of(node(labels=labels | {"topology.kubernetes.io/rack": "r8"}), RULES), NOW)
    assert [row["rack"] for row in book.observations(NOW + timedelta(minutes=61))] == ["r8"]


TAINTS = [taint("medik8s.io/drain"), taint("predrain.io/at-risk"), taint("karpenter.sh/disrupted", added=EARLIER)]


@given(
    st.lists(
        st.tuples(st.booleans(), st.sets(st.sampled_from(range(len(TAINTS)))), st.booleans()), min_size=1, max_size=8
    )
)
def test_drains_and_releases_always_say_whether_the_node_is_drained(looks: list[tuple[bool, set[int], bool]]) -> None:
    view: NodeView | None = None
    drained = False
    for cordoned, taints, saved in looks:
        after = view_of(node(cordoned=cordoned, taints=[TAINTS[i] for i in sorted(taints)]), RULES)
        for event in node_changes(view, after, RULES, NOW):
            # As features do: what is not ours drains, any release ends it.
            if event.type == "drain" and event.code in ("uncordon", "undrain"):
                drained = False
        for event in node_changes(view, after, RULES, NOW):
            if event.type == "drain" and event.source != "predrain" and event.code not in ("uncordon", "undrain"):
                drained = True
        assert drained == (cordoned or bool(taints - {1}))
        view = saved_and_read(NodeView, after) if saved else after
        assert view == after


def test_own_rules_go_before_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(
        """
prefix: gpus.example.com
rules:
  - {taint: example.com/rma, type: failure, code: RMA, ended: repair}
  - {condition: GpuNvlinkWatch, type: ignore}
labels: {rack: [example.com/rack]}
"""
    )
    rules = load_rules(file)
    rma = node(taints=[taint("example.com/rma")], conditions=[condition("GpuNvlinkWatch", "True")])
    assert [event[:2] for event in between(None, rma, rules)] == [("failure", "RMA")]
    assert [event[:2] for event in between(rma, node(), rules)] == [("repair", "RMA_ended")]
    ours = node(taints=[taint("gpus.example.com/at-risk"), taint("medik8s.io/drain")])
    assert [event[1:3] for event in between(None, ours, rules)] == [
        ("at-risk", "predrain"),
        ("medik8s.io/drain", "kubernetes"),
    ]
    place = view_of(node(labels={"example.com/rack": "r1", "topology.kubernetes.io/zone": "z"}), rules).place
    assert dict(place) == {"rack": "r1", "group": "z"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: [{taint: x, condition: y, type: drain}]", "exactly one of taint, condition and reason"),
        ("rules: [{tain: x, type: drain}]", r"rules\.0\.tain\)\. Did you mean 'taint'\?"),
        ("rules: [{reason: '(', type: other}]", "is no regular expression"),
        ("rules: [{taint: x, type: drained}]", r"rules\.0\.type"),
        ("a: [", "the rules are not valid YAML"),
    ],
)
def test_rules_that_cannot_be_used_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    with pytest.raises(Exception, match=message):
        load_rules(file)


def test_every_default_rule_can_match() -> None:
    # A catch-all ends each list of the defaults; a rule after one of its kind would be dead.
    for subject in ("taint", "condition", "reason"):
        own = [rule for rule in RULES.rules if getattr(rule, subject) is not None]
        catch_all = [rule for rule in own if getattr(rule, subject) in ("*", ".*") and rule.message is None]
        assert catch_all == [own[-1]]
    assert isinstance(RULES.rules[0], Rule)
