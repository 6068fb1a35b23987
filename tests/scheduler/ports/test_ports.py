"""Records and marks on a node: what is predrain's, and what is of other tools."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.kubernetes.foreign_marks import RESTING, ForeignMark, catalogue
from policy.episodes import Alert, AlertOutcome
from policy.fleet import Level, NodeView, Signals
from policy.plan import Action, PolicyState
from scheduler.ports.codec import object_of, plain_of
from scheduler.ports.node_object import Keys, NodeObject, Taint, after, view_of, writes_between
from scheduler.ports.ownership import DamagedRecordError, OwnershipRecord, foreign_marks, seal, unseal
from scheduler.ports.stored_state import pack, unpack
from tests.policy.decide_world import HOUR, T0, config, node, once

KEYS = Keys()


def action(verb, to, tier="high", ends=T0 + 12 * HOUR):
    return Action(verb, "n", tier, to, 0.9, None if verb == "release" else ends, ("why",))


LEVELS = (Level.NONE, Level.PUBLISH, Level.AVOID, Level.SWAP)
FORWARD = [action(level.name.lower(), level) for level in (*LEVELS[1:], Level.DRAIN)]
RELEASES = [action("release", level) for level in LEVELS]


def test_every_setting_and_signal_comes_back_from_json():
    alert = Alert("g", "c/g", "high", T0, timedelta(hours=24), "n", held_out=True)
    signals = Signals(T0, missing_channels=("x",), outcomes=(AlertOutcome(alert, "right", "w"),), reset_breaker_at=T0)
    given_ = config("g", rise_after=2)
    for value in (signals, given_, node("n", 0.5, None, facts=["xid 79"])):
        assert object_of(type(value), json.loads(json.dumps(plain_of(value))), "x") == value


def test_the_state_comes_back_and_a_damaged_one_is_refused():
    state = once([node("n", 0.9), node("m", 0.4)], config()).state
    text = pack("predrain-state 1", state, "the state", "forget")
    assert unpack("predrain-state 1", PolicyState, text, "the state") == state
    for damaged in (text[:-8], text[:40] + text[41:], "", "predrain-state 2 x y", text + "!"):
        with pytest.raises(ValueError, match="the state"):
            unpack("predrain-state 1", PolicyState, damaged, "the state")


@given(
    steps=st.lists(st.sampled_from([*FORWARD, *RELEASES]), max_size=8), more=st.lists(st.text("ab", min_size=1)),
)  # fmt: skip
def test_actions_change_only_what_is_ours_stand_afterwards_and_may_be_repeated(steps, more):
    theirs = NodeObject("n", dict.fromkeys(more, "x"), {"note": "y"}, (Taint("team", "a", "NoSchedule"),))
    target, level = theirs, Level.NONE
    for step in steps:
        then = after(step, target, KEYS, T0)
        level = min(level, step.to) if step.verb == "release" else max(level, step.to)
        assert after(step, then, KEYS, T0) == then
        assert writes_between(then, then) == ()
        assert (then.taints[0], then.annotations["note"]) == (theirs.taints[0], "y")
        view = view_of(then, NodeView("n", "c", "g"), KEYS, T0)
        assert view.marks.level <= level
        assert not view.marker_removed
        target = then
    assert after(RELEASES[0], target, KEYS, T0) == theirs


def test_a_mark_that_is_gone_before_its_time_was_taken_off_by_somebody_and_afterwards_nobody_knows():
    target = NodeObject("n")
    for step in FORWARD:
        target = after(step, target, KEYS, T0)
    base = NodeView("n", "c", "g")
    assert view_of(target, base, KEYS, T0).marks.hard_since == T0
    assert not view_of(target, base, KEYS, T0 + HOUR).marker_removed
    gone = replace(target, taints=())
    assert view_of(gone, base, KEYS, T0 + HOUR).marker_removed
    assert not view_of(gone, base, KEYS, T0 + 12 * HOUR).marker_removed
    assert not view_of(after(RELEASES[0], gone, KEYS, T0), base, KEYS, T0).marker_removed


OWN_KEYS = Keys(avoid="team.example/avoid=yes")
THEIRS = NodeObject("n", {"zone": "a"}, {"note": "theirs"}, (Taint("team", "a", "NoSchedule"),))
RECORD = OwnershipRecord("high", 0.5, T0 + HOUR, Level.SWAP).with_mark("reason", "a b")
Change = Callable[[NodeObject], NodeObject]


def drained() -> NodeObject:
    node = THEIRS
    for step in FORWARD:
        node = after(step, node, OWN_KEYS, T0)
    return node


def annotated(key: str, change: Callable[[str], str | None]) -> Change:
    def edit(node: NodeObject) -> NodeObject:
        text = change(node.annotations[key])
        rest = {name: value for name, value in node.annotations.items() if name != key}
        return replace(node, annotations=rest if text is None else {**rest, key: text})

    return edit


def tainted(**fields: object) -> Change:
    def edit(node: NodeObject) -> NodeObject:
        hard = next(taint for taint in node.taints if taint.effect == "NoSchedule" and taint.key == OWN_KEYS.taint)
        return replace(node, taints=tuple(replace(t, **fields) if t is hard else t for t in node.taints))

    return edit


EDITED: dict[str, Change] = {
    "another value of the taint": tainted(value="rma-4711"),
    "another case of the value": tainted(value="High"),
    "another effect of the taint": tainted(effect="NoExecute"),
    "another label": lambda node: replace(node, labels={**node.labels, OWN_KEYS.tier: "clear"}),
    "a later end": annotated(OWN_KEYS.prediction, lambda text: text.replace("2026-03-01", "2027-03-01")),
    "a note in the prediction": annotated(OWN_KEYS.prediction, lambda text: text.replace("why", "why - RMA 4711")),
    "the prediction in another layout": annotated(OWN_KEYS.prediction, lambda text: text.replace(", ", ",")),
    "an empty prediction": annotated(OWN_KEYS.prediction, lambda _: ""),
    "another start of the drain": annotated(OWN_KEYS.drain, lambda _: "2026-02-01T00:00:00+00:00"),
}
UNPROVED: dict[str, Change] = {
    "no record": annotated(OWN_KEYS.applied, lambda _: None),
    "an edited record": annotated(OWN_KEYS.applied, lambda text: text.replace('"drain"', '"avoid"')),
    "a record with more": annotated(OWN_KEYS.applied, lambda text: text.replace("{", '{"note": "RMA 4711", ', 1)),
    "a record twice": annotated(OWN_KEYS.applied, lambda text: f"[{text}, {text}]"),
    "an empty record": annotated(OWN_KEYS.applied, lambda _: ""),
    "a record that is no object": annotated(OWN_KEYS.applied, lambda _: "[1]"),
    "a copy of another node": lambda node: replace(node, name="m"),
}


def ours(node: NodeObject) -> dict[str, object]:
    return {
        **{key: value for key, value in node.labels.items() if key not in THEIRS.labels},
        **{key: value for key, value in node.annotations.items() if key not in THEIRS.annotations},
        **{taint.effect: taint for taint in node.taints if taint.key == OWN_KEYS.taint},
    }


@pytest.mark.parametrize("change", EDITED.values(), ids=EDITED.keys())
def test_a_mark_that_somebody_edited_is_theirs_and_all_else_of_ours_goes(change):
    node, base = change(drained()), NodeView("n", "c", "g")
    view = view_of(node, base, OWN_KEYS, T0)
    assert view.opt_out is not None
    assert "edited" in (view.notice or "") or "no record" in (view.notice or "")
    for step in FORWARD:
        assert after(step, node, OWN_KEYS, T0) == node, "nothing is written over"
    edited = {key: value for key, value in ours(node).items() if ours(drained()).get(key) != value}
    assert edited
    for _ in range(3):
        node = after(RELEASES[0], node, OWN_KEYS, T0)
        assert ours(node) == edited
        assert view_of(node, base, OWN_KEYS, T0).notice is not None, "reported until somebody removes it"
    assert view_of(node, base, OWN_KEYS, T0).marks.level is Level.NONE


@pytest.mark.parametrize("change", UNPROVED.values(), ids=UNPROVED.keys())
def test_without_an_intact_record_nothing_is_ours_and_nothing_changes(change):
    node = change(drained())
    view = view_of(node, NodeView("n", "c", "g"), OWN_KEYS, T0)
    assert (view.marks.level, view.opt_out is not None, view.cordoned_by is not None) == (Level.NONE, True, True)
    assert view.notice is not None
    record = {key: text for key, text in node.annotations.items() if key == OWN_KEYS.applied}
    alone = replace(THEIRS, name=node.name, annotations={**THEIRS.annotations, **record})
    for step in (*FORWARD, RELEASES[0]):
        assert after(step, node, OWN_KEYS, T0) == node
        assert not record or after(step, alone, OWN_KEYS, T0) == alone


@pytest.mark.parametrize("effect", ["NoSchedule", "PreferNoSchedule", "NoExecute"])
def test_a_taint_under_our_key_that_nobody_recorded_stays(effect):
    node = replace(THEIRS, taints=(*THEIRS.taints, Taint(OWN_KEYS.taint, "high", effect)))
    view = view_of(node, NodeView("n", "c", "g"), OWN_KEYS, T0)
    assert (view.marks.level, view.opt_out is not None) == (Level.NONE, True)
    assert all(after(step, node, OWN_KEYS, T0) == node for step in (*FORWARD, RELEASES[0]))


def test_a_mark_is_set_beside_what_a_person_removed_and_all_of_ours_goes():
    for key in (OWN_KEYS.prediction, OWN_KEYS.drain):
        node = annotated(key, lambda _: None)(drained())
        assert view_of(node, NodeView("n", "c", "g"), OWN_KEYS, T0).notice is None
        assert after(RELEASES[0], node, OWN_KEYS, T0) == THEIRS
    assert after(RELEASES[0], drained(), OWN_KEYS, T0) == THEIRS


def test_a_record_is_of_one_node_and_of_exactly_its_content():
    content = json.loads(json.dumps(seal(RECORD, "n", "a")))
    assert unseal(content, "n", "a") == RECORD
    assert unseal(dict(reversed(content.items())), "n", "a") == RECORD
    for wrong in ({**content, "level": "avoid"}, {**content, "more": 1}, {**content, "marks": {}}, {}, None, [content]):
        with pytest.raises(DamagedRecordError):
            unseal(wrong, "n", "a")
    with pytest.raises(DamagedRecordError):
        unseal(content, "m", "a")


def test_a_mark_is_ours_where_it_is_exactly_the_recorded_one():
    assert foreign_marks(RECORD, {"reason": "a b"}) == {}
    assert foreign_marks(RECORD, {}) == {}
    for content in ("a  b", "A b", "a b ", "a b - RMA"):
        assert "edited" in foreign_marks(RECORD, {"reason": content})["reason"]
    assert "no record" in foreign_marks(RECORD, {"weight": "1"})["weight"]
    assert "no record" in foreign_marks(None, {"reason": "a b"})["reason"]


def test_marks_of_another_installation_stay():
    node, other = drained(), Keys(avoid=OWN_KEYS.avoid, owner="other/lease")
    for step in (*FORWARD, RELEASES[0]):
        assert after(step, node, other, T0) == node
    view = view_of(node, NodeView("n", "c", "g"), other, T0)
    assert (view.marks.level, view.opt_out is not None, view.cordoned_by is not None) == (Level.NONE, True, True)
    assert f"another installation, {OWN_KEYS.owner}" in (view.notice or "")
    assert "by hand" not in (view.notice or "")


BASE = NodeView("n", "c", "g", down=True)


def view(node: NodeObject, keys: Keys = KEYS) -> NodeView:
    return view_of(node, BASE, keys, T0)


def with_taints(key: str, effect: str = "NoSchedule") -> NodeObject:
    return NodeObject("n", taints=(Taint(key, "", effect),))


AT_REST = [
    with_taints("maintenance"),
    NodeObject("n", taints=(Taint("key", "maintenance", "NoSchedule"),)),
    with_taints("aws-node-termination-handler/spot-itn"),
    NodeObject("n", annotations={"weave.works/kured-reboot-in-progress": "2026-11-21T12:05:00Z"}),
    NodeObject("n", annotations={"kured.dev/kured-reboot-in-progress": "x"}),
    NodeObject("n", annotations={"machineconfiguration.openshift.io/state": "Working"}),
    NodeObject("n", {"nvidia.com/gpu-driver-upgrade-state": "drain-required"}),
    NodeObject("n", conditions={"NebiusMaintenanceScheduled": "True", "SlurmNodeDrain": "True"}),
    with_taints("node.cloudprovider.kubernetes.io/uninitialized"),
    with_taints("node.deckhouse.io/uninitialized"),
    NodeObject("n", annotations={"update.node.deckhouse.io/draining": "bashible"}),
    with_taints("node.cilium.io/agent-not-ready", "NoExecute"),
    with_taints("ebs.csi.aws.com/agent-not-ready"),
    with_taints("startup-taint.cluster-autoscaler.kubernetes.io/gpu-drivers"),
    NodeObject("n", {"nvidia.com/gpu.deploy.dcgm": "paused-for-mig-change"}),
    NodeObject("n", {"nvidia.com/gpu.deploy.device-plugin": "paused-for-driver-upgrade"}),
    NodeObject("n", {"aws-node-termination-handler/action": "UncordonAfterReboot"}),
    NodeObject("n", annotations={"machineconfiguration.openshift.io/desiredDrain": "drain-rendered-worker-1"}),
    NodeObject("n", annotations={"sriovnetwork.openshift.io/current-state": "Draining"}),
    NodeObject("n", annotations={"nodewright.nvidia.com/cordon_kernel": "true"}),
    with_taints("readiness.k8s.io/NetworkReady"),
]
IN_REPAIR = [
    with_taints("medik8s.io/remediation", "NoExecute"),
    with_taints("nvidia.com/gpu-error"),
    NodeObject("n", annotations={"quarantineHealthEvent": '[{"checkName": "GpuXidError"}]'}),
    NodeObject("n", {"nvidia.com/gpu-driver-upgrade-state": "upgrade-failed"}),
    NodeObject("n", {"sagemaker.amazonaws.com/node-health-status": "UnschedulablePendingReplacement"}),
    NodeObject("n", {"node.coreweave.cloud/state": "triage"}),
    with_taints("drbd.linbit.com/lost-quorum"),
    with_taints("tenstorrent.com/accelerator-unhealthy"),
    NodeObject("n", taints=(Taint("gpu-health", "unhealthy", "NoSchedule"),)),
    with_taints("sunk.coreweave.com/zombie-quarantine"),
]
NOBODYS = [
    with_taints("nvidia.com/gpu"),
    with_taints("ToBeDeletedByClusterAutoscaler", "PreferNoSchedule"),
    NodeObject("n", annotations={"weave.works/kured-most-recent-reboot-needed": "2026-11-21T12:05:00Z"}),
    NodeObject("n", annotations={"machineconfiguration.openshift.io/state": "Done"}),
    NodeObject("n", {"nvidia.com/gpu-driver-upgrade-state": "upgrade-done"}),
    NodeObject("n", {"network.nvidia.com/operator.mofed.wait": "false"}, {"quarantineHealthEvent": "[]"}),
    NodeObject("n", {"nvidia.com/gpu-driver-upgrade-state": "upgrade-required"}),
    NodeObject("n", {"nvidia.com/mig.config.state": "success", "nvidia.com/vgpu.config.state": "success"}),
    NodeObject("n", {"node.coreweave.cloud/state": "production"}),
    with_taints("atlassian.com/escalator", "PreferNoSchedule"),
    NodeObject("n", {"nvidia.com/gpu.deploy.dcgm": "true", "k8saas.nvidia.com/cordon-by": "NVSentinel"}),
    NodeObject("n", annotations={"machineconfiguration.openshift.io/desiredDrain": "uncordon-rendered-worker-1"}),
    NodeObject("n", annotations={"sriovnetwork.openshift.io/current-state": "Idle"}),
    NodeObject("n", annotations={"cluster-autoscaler.kubernetes.io/scale-down-disabled": "true"}),
    NodeObject("n", {"cloud.google.com/perform-maintenance": "false"}),
    NodeObject("n", {"sagemaker.amazonaws.com/node-health-status": "Schedulable"}),
    NodeObject("n", {"autopilot.ibm.com/gpuhealth": "PASS"}),
    NodeObject("n", conditions={"VMEventScheduled": "False", "SlurmNodeReboot": "Unknown", "Ready": "True"}),
]


@pytest.mark.parametrize("mark", catalogue(), ids=lambda mark: " ".join((*mark.pattern, mark.value)))
def test_each_row_of_the_catalogue_gives_a_node_its_meaning(mark: ForeignMark) -> None:
    kind, key = mark.pattern
    value = {"on": "true", "off": "false"}.get(mark.value, mark.value.partition("|")[0]).replace("*", "x")
    texts = {key.replace("*", "x"): value}
    taints = tuple(Taint(key, value, "NoSchedule") for key, value in texts.items())
    seen = view(NodeObject("n", taints=taints) if kind == "taint" else NodeObject("n", **{f"{kind}s": texts}))
    assert (seen.opt_out is not None) is (mark.meaning == "opt_out")
    assert (seen.owner is not None, seen.resting is not None) == (mark.meaning != "opt_out", mark.meaning in RESTING)


@pytest.mark.parametrize("node", AT_REST, ids=str)
def test_planned_maintenance_and_removal_are_capacity_at_rest(node):
    seen = view(node)
    assert seen.owner is not None
    assert (seen.down, seen.why_out_of_service, seen.counted) == (False, None, False)


def test_a_prefix_that_another_tool_could_have_is_no_other_tool():
    keys = Keys("unhealthy.example")
    marked = after(action("swap", Level.SWAP), NodeObject("n"), keys, T0)
    assert view_of(marked, node("n"), keys, T0).owner is None


@pytest.mark.parametrize("node", IN_REPAIR, ids=str)
def test_a_node_in_repair_is_out_of_service(node):
    seen = view(node)
    assert (seen.owner is not None, seen.counted, seen.why_out_of_service) == (True, True, "down")


@pytest.mark.parametrize("node", NOBODYS, ids=str)
def test_what_is_over_or_takes_no_node_away_is_nobodys(node):
    assert (view(node).owner, view(node).opt_out, view(node).resting) == (None, None, None)


OPT_OUTS = [
    *[("predrain.io/managed", value) for value in ("false", "False", "FALSE", "no", "off", "0", "disabled", " false ")],
    *[("predrain.io/managed", value) for value in ("", "until friday", "tru")],
    *[("nvsentinel.dgxc.nvidia.com/managed", value) for value in ("false", "False", "no")],
    ("karpenter.sh/do-not-disrupt", "true"),
    ("node-lifecycle.datadoghq.com/enabled", "false"),
    *[("autoscaling.cast.ai/removal-disabled", value) for value in ("true", "1", "until friday")],
    *[("remediation.medik8s.io/exclude-from-remediation", value) for value in ("true", "True", "1", "")],
]


@pytest.mark.parametrize("where", ["labels", "annotations"])
@pytest.mark.parametrize(("key", "value"), OPT_OUTS)
def test_an_opt_out_is_read_in_any_spelling_and_an_unclear_one_holds(where, key, value):
    seen = view(NodeObject("n", **{where: {key: value}}))
    assert seen.opt_out is not None
    assert (seen.notice is not None) == (key == "predrain.io/managed" and value in ("", "until friday", "tru"))


@pytest.mark.parametrize("value", ["true", "True", "yes", "on", "1", "enabled"])
def test_a_clear_yes_is_no_opt_out(value):
    assert view(NodeObject("n", {"predrain.io/managed": value})).opt_out is None


@pytest.mark.parametrize(("value", "held"), [("", True), ("RAM swap", True), ("True", True), ("False", False),
                                             ("no", False), ("off", False)])  # fmt: skip
def test_maintenance_ends_with_a_clear_no(value, held):
    assert (view(NodeObject("n", annotations={"predrain.io/maintenance": value})).maintenance is not None) is held


def test_settings_add_marks_of_other_tools():
    content = [{"tool": "our janitor", "meaning": "planned", "label": "example.com/janitor*", "value": "wip|drain*"}]
    keys = Keys(foreign=object_of(tuple[ForeignMark, ...], content, "kubernetes.foreign_marks"))
    assert view(NodeObject("n", {"example.com/janitor-1": "drain now"}), keys).owner == "our janitor"
    assert view(NodeObject("n", {"example.com/janitor-1": "idle"}), keys).owner is None
    with pytest.raises(ValueError, match="give one of taint"):
        ForeignMark("x", "planned", label="a", taint="b")
