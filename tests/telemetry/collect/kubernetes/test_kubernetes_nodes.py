"""What two looks at a node show."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from telemetry.collect.kubernetes.nodes import NodeTracker, ObservedKubernetesNode, node_changes, view_of
from telemetry.collect.kubernetes.rules import KubernetesRules, default_rules, load_rules
from tests.telemetry.collect.kubernetes.objects import EARLIER, NOW, condition, node, saved_and_read, taint

ELEVEN = datetime(2026, 3, 1, 11, tzinfo=UTC)
QUARTER, HALF_PAST = "2026-03-01T11:15:00Z", "2026-03-01T11:30:00Z"
RULES = default_rules()
Summary = list[tuple[str, str, str, datetime]]


def between(before: dict[str, Any] | None, after: dict[str, Any], rules: KubernetesRules = RULES) -> Summary:
    old = None if before is None else view_of(before, rules)
    events = node_changes(old, view_of(after, rules), NOW)
    assert all(event.known_at >= NOW and event.gpu is None for event in events)
    return [(event.type, event.code, event.source, event.timestamp) for event in events]


def at(minutes: int | None) -> datetime:
    return NOW if minutes is None else ELEVEN + timedelta(minutes=minutes)


def cordoned(by: str | None = None, when: str = HALF_PAST, **more: Any) -> dict[str, Any]:
    fields = {"f:spec": {"f:unschedulable": {}}}
    return node(cordoned=True, managed=[{"manager": by, "time": when, "fieldsV1": fields}] if by else [], **more)


HARD, SOFT = taint("predrain.io/at-risk", value="high"), taint("predrain.io/at-risk", "PreferNoSchedule")
MEDIK8S = taint("medik8s.io/drain", added=EARLIER)
CORDON = taint("node.kubernetes.io/unschedulable", added=EARLIER)
USUAL = [taint("nvidia.com/gpu", value="present"), taint("node.kubernetes.io/not-ready"), taint("team/only-us")]
LOST, BACK = node(ready=("Unknown", EARLIER)), node(ready=("True", QUARTER))
SICK, WELL = condition("GpuNvlinkWatch", "True"), condition("GpuNvlinkWatch", "False", QUARTER)

MAINTENANCE = "predrain.io/maintenance"
PLANNED = node() | {"metadata": node()["metadata"] | {"annotations": {MAINTENANCE: "until noon"}}}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param(node(), cordoned(), [("drain", "cordon", "kubernetes", None)], id="cordon"),
        pytest.param(node(), cordoned("kubectl-cordon"), [("drain", "cordon", "kubernetes", 30)], id="cordon by"),
        pytest.param(node(), cordoned("x", taints=[CORDON]), [("drain", "cordon", "kubernetes", 0)], id="its taint"),
        pytest.param(cordoned(), cordoned("x", taints=[CORDON]), [], id="the taint follows the cordon: one drain"),
        pytest.param(cordoned("x"), node(), [("drain", "uncordon", "kubernetes", None)], id="uncordon"),
        pytest.param(node(), cordoned("predrain"), [("drain", "cordon", "predrain", 30)], id="our own cordon"),
        pytest.param(node(), node(taints=[HARD]), [("drain", "at-risk", "predrain", None)], id="our own taint"),
        pytest.param(node(taints=[HARD]), node(), [("drain", "undrain", "predrain", None)], id="our own taint goes"),
        pytest.param(node(), node(taints=[SOFT]), [("other", "at-risk", "predrain", None)], id="soft taint"),
        pytest.param(node(taints=[SOFT]), node(), [("other", "at-risk_ended", "predrain", None)], id="soft taint goes"),
        pytest.param(None, node(taints=USUAL), [], id="taints of every GPU node"),
        pytest.param(node(), PLANNED, [("maintenance", "begin", "kubernetes", None)], id="maintenance"),
        pytest.param(PLANNED, node(), [("maintenance", "end", "kubernetes", None)], id="maintenance ends"),
        pytest.param(node(), node(labels={MAINTENANCE: "false"}), [], id="a label that says there is no maintenance"),
        pytest.param(
            cordoned(taints=[MEDIK8S]), node(taints=[MEDIK8S]), [("other", "cordon_ended", "kubernetes", None)],
            id="one of two reasons goes",
        ),
        pytest.param(
            node(taints=[MEDIK8S]), node(), [("drain", "undrain", "kubernetes", None)], id="the last reason goes"
        ),
        pytest.param(
            cordoned(taints=[MEDIK8S]), node(), [("drain", "uncordon", "kubernetes", None)], id="both reasons go"
        ),
        pytest.param(
            cordoned(taints=[HARD]), node(taints=[HARD]), [("drain", "uncordon", "kubernetes", None)],
            id="predrain's does not hold up the release of others'",
        ),
        pytest.param(
            cordoned(taints=[HARD]), cordoned(), [("other", "at-risk_ended", "predrain", None)],
            id="the end of predrain's is no release of others'",
        ),
        pytest.param(node(), LOST, [("other", "node_not_ready", "kubernetes", 0)], id="not ready"),
        pytest.param(None, LOST, [("other", "node_not_ready", "kubernetes", 0)], id="first seen not ready"),
        pytest.param(LOST, BACK, [("other", "node_ready", "kubernetes", 15)], id="ready again"),
        pytest.param(
            LOST, node(ready=("False", HALF_PAST)), [("other", "node_not_ready", "kubernetes", 30)],
            id="lost twice between two looks",
        ),
        pytest.param(node(), node(conditions=[condition("GPUFailurePredicted", "True")]), [], id="our own condition"),
        pytest.param(
            node(), node(conditions=[SICK]), [("other", "GpuNvlinkWatch", "kubernetes", 0)], id="a monitor's condition"
        ),
        pytest.param(
            node(conditions=[SICK]), node(conditions=[WELL]), [("other", "GpuNvlinkWatch_ended", "kubernetes", 15)],
            id="a monitor's condition ends",
        ),
        pytest.param(
            node(), node(conditions=[condition("AcceleratedHardwareReady", "False")]),
            [("other", "AcceleratedHardwareReady", "kubernetes", 0)], id="a condition that is bad when false",
        ),
        pytest.param(
            node(), node(boot="b2", ready=("True", QUARTER)), [("other", "boot", "kubernetes", 15)], id="boot"
        ),
        pytest.param(node(), node(boot="b2"), [("other", "boot", "kubernetes", None)], id="boot without its time"),
        pytest.param(
            node(), node(machine="CD-2", boot="b2"), [("replacement", "node_replaced", "kubernetes", None)],
            id="another machine",
        ),
        pytest.param(node(), node(machine="ab-1"), [], id="the same machine in other letters"),
    ],
)  # fmt: skip
def test_what_happened_between_two_looks(before, after, expected):
    assert between(before, after) == [(*event, at(minutes)) for *event, minutes in expected]


def test_a_node_that_went_and_came_back_is_compared_with_what_went() -> None:
    tracker = NodeTracker()
    tracker.update(view_of(node(), RULES), NOW)
    assert [event.code for event in tracker.remove("n1", NOW)] == ["node_removed"]
    assert len(tracker) == 0
    assert tracker.remove("n1", NOW) == []
    assert tracker.update(view_of(node(gpus=0, machine="", boot=""), RULES), NOW) == []
    other = view_of(node(machine="CD"), RULES)
    assert [event.code for event in tracker.update(other, NOW)] == ["node_replaced"]
    tracker.remove("n1", NOW)
    tracker.update(view_of(node("n2"), RULES), NOW)
    tracker.remove("n2", NOW + timedelta(days=91))
    assert set(tracker.known) == {"n2"}, "and forgotten after a season"


def test_nodes_without_gpus_are_left_out_unless_asked_for() -> None:
    plain = view_of(node("cpu", gpus=0, cordoned=True), RULES)
    assert NodeTracker().update(plain, NOW) == []
    assert len(NodeTracker(all_nodes=True).update(plain, NOW)) == 1
    broken = view_of(node("g", gpus=0, labels={"nvidia.com/gpu.present": "true"}, cordoned=True), RULES)
    assert len(NodeTracker().update(broken, NOW)) == 1


def test_a_place_is_staged_when_it_changes_and_once_an_hour() -> None:
    labels = {"topology.kubernetes.io/zone": "z1", "topology.kubernetes.io/rack": "r7"}
    tracker = NodeTracker(cluster="east")
    tracker.update(view_of(node(labels=labels), RULES), NOW)
    (row,) = tracker.observations(NOW)
    assert (row["node"], row["cluster"], row["group"], row["rack"]) == ("n1", "east", "z1", "r7")
    assert tracker.observations(NOW + timedelta(minutes=59)) == []
    assert len(tracker.observations(NOW + timedelta(minutes=60))) == 1
    tracker.update(view_of(node(labels=labels | {"topology.kubernetes.io/rack": "r8"}), RULES), NOW)
    assert [row["rack"] for row in tracker.observations(NOW + timedelta(minutes=61))] == ["r8"]


TAINTS = [taint("medik8s.io/drain"), taint("predrain.io/at-risk"), taint("karpenter.sh/disrupted", added=EARLIER)]


@given(
    st.lists(
        st.tuples(st.booleans(), st.sets(st.sampled_from(range(len(TAINTS)))), st.booleans()), min_size=1, max_size=8
    )
)
def test_drains_and_releases_always_say_whether_the_node_is_drained(looks: list[tuple[bool, set[int], bool]]) -> None:
    view: ObservedKubernetesNode | None = None
    drained = False
    for is_cordoned, taints, saved in looks:
        after = view_of(node(cordoned=is_cordoned, taints=[TAINTS[i] for i in sorted(taints)]), RULES)
        drains = [event for event in node_changes(view, after, NOW) if event.type == "drain"]
        releases = [event for event in drains if event.code in ("uncordon", "undrain")]
        # As features do: what is not predrain's drains, any release ends it.
        drained = drained and not releases
        drained = drained or any(event.source != "predrain" for event in drains if event not in releases)
        assert drained == (is_cordoned or bool(taints - {1}))
        view = saved_and_read(ObservedKubernetesNode, after) if saved else after
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
    rma = node(taints=[taint("example.com/rma")], conditions=[SICK])
    assert [event[:2] for event in between(None, rma, rules)] == [("failure", "RMA")]
    assert [event[:2] for event in between(rma, node(), rules)] == [("repair", "RMA_ended")]
    managed = node(taints=[taint("gpus.example.com/at-risk"), taint("medik8s.io/drain")])
    assert [event[1:3] for event in between(None, managed, rules)] == [
        ("at-risk", "predrain"),
        ("medik8s.io/drain", "kubernetes"),
    ]
    place = view_of(node(labels={"example.com/rack": "r1", "topology.kubernetes.io/zone": "z"}), rules).place
    assert place == {"rack": "r1", "group": "z"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: [{taint: x, condition: y, type: drain}]", "exactly one of taint, condition and reason"),
        ("rules: [{tain: x, type: drain}]", r"rules\.0\.tain\)\. Did you mean 'taint'\?"),
        ("rules: [{reason: '(', type: other}]", "should be a valid regular expression"),
        ("rules: [{taint: x, type: drained}]", r"rules\.0\.type"),
        ("a: [", "the rules file is not valid YAML"),
    ],
)
def test_rules_that_cannot_be_used_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        load_rules(file)


def test_every_default_rule_can_match() -> None:
    for rule in RULES.rules:
        if rule.condition is not None:
            assert RULES.for_condition(rule.condition.replace("*", "Any")) == rule
