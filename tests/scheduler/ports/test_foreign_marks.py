"""Marks of other tools: who has a node, whether it rests, and what keeps predrain's cordon."""

import pytest

from foundation.kubernetes.foreign_marks import ForeignMark
from policy.fleet import NodeView
from scheduler.ports.codec import object_of
from scheduler.ports.node_object import Keys, NodeObject, Taint, view_of
from tests.policy.decide_world import T0

BASE = NodeView("n", "c", "g", down=True)


KEYS = Keys()


def view(node: NodeObject, keys: Keys = KEYS) -> NodeView:
    return view_of(node, BASE, keys, T0)


def tainted(key: str, effect: str = "NoSchedule") -> NodeObject:
    return NodeObject("n", taints=(Taint(key, "", effect),))


AT_REST = [
    tainted("ToBeDeletedByClusterAutoscaler"),
    tainted("karpenter.sh/disrupted"),
    tainted("medik8s.io/drain"),
    tainted("kubevirt.io/drain"),
    tainted("aws-node-termination-handler/scheduled-maintenance"),
    tainted("aws-node-termination-handler/spot-itn"),
    tainted("cloud.google.com/impending-node-termination"),
    tainted("node.cloudprovider.kubernetes.io/shutdown"),
    NodeObject("n", annotations={"weave.works/kured-reboot-in-progress": "2026-11-21T12:05:00Z"}),
    NodeObject("n", annotations={"kured.dev/kured-reboot-in-progress": "x"}),
    NodeObject("n", annotations={"talos.dev/cordoned": "true"}),
    NodeObject("n", annotations={"harvesterhci.io/maintain-status": "running"}),
    NodeObject("n", annotations={"machineconfiguration.openshift.io/state": "Working"}),
    NodeObject("n", {"nvidia.com/gpu-driver-upgrade-state": "drain-required"}),
    NodeObject("n", {"cloud.google.com/active-node-maintenance": "ONGOING"}),
    NodeObject("n", {"sagemaker.amazonaws.com/deep-health-check-status": "InProgress"}),
    NodeObject("n", {"autopilot.ibm.com/gpuhealth": "TESTING"}),
    NodeObject("n", conditions={"VMEventScheduled": "True"}),
    NodeObject("n", conditions={"NebiusMaintenanceScheduled": "True", "SlurmNodeDrain": "True"}),
    NodeObject("n", conditions={"DrainScheduled": "True"}),
    tainted("karpenter.sh/unregistered", "NoExecute"),
    tainted("node.cloudprovider.kubernetes.io/uninitialized"),
    tainted("node.cilium.io/agent-not-ready", "NoExecute"),
    tainted("ebs.csi.aws.com/agent-not-ready"),
    tainted("autoscaling.cast.ai/draining"),
]
IN_REPAIR = [
    tainted("AggregatedNodeHealth"),
    tainted("medik8s.io/remediation", "NoExecute"),
    tainted("node.kubernetes.io/out-of-service", "NoExecute"),
    tainted("nvidia.com/gpu-error"),
    NodeObject("n", {"dgxc.nvidia.com/nvsentinel-state": "quarantined"}),
    NodeObject("n", {"nvidia.com/gpu-driver-upgrade-state": "upgrade-failed"}),
    NodeObject("n", {"sagemaker.amazonaws.com/node-health-status": "UnschedulablePendingReplacement"}),
    NodeObject("n", {"autopilot.ibm.com/gpuhealth": "EVICT"}),
    NodeObject("n", conditions={"HardwareIssuesSuspected": "True"}),
    tainted("node.coreweave.cloud/evict"),
]
NOBODYS = [
    tainted("nvidia.com/gpu"),
    tainted("ToBeDeletedByClusterAutoscaler", "PreferNoSchedule"),
    NodeObject("n", annotations={"weave.works/kured-most-recent-reboot-needed": "2026-11-21T12:05:00Z"}),
    NodeObject("n", annotations={"machineconfiguration.openshift.io/state": "Done"}),
    NodeObject("n", {"nvidia.com/gpu-driver-upgrade-state": "upgrade-done"}),
    NodeObject("n", {"nvidia.com/gpu-driver-upgrade-state": "upgrade-required"}),
    NodeObject("n", {"nvidia.com/mig.config.state": "success"}),
    NodeObject("n", {"cloud.google.com/perform-maintenance": "false"}),
    NodeObject("n", {"sagemaker.amazonaws.com/node-health-status": "Schedulable"}),
    NodeObject("n", {"autopilot.ibm.com/gpuhealth": "PASS"}),
    NodeObject("n", conditions={"VMEventScheduled": "False", "SlurmNodeReboot": "Unknown", "Ready": "True"}),
]


@pytest.mark.parametrize("node", AT_REST, ids=str)
def test_planned_maintenance_and_removal_are_capacity_at_rest(node):
    seen = view(node)
    assert seen.owner is not None
    assert (seen.down, seen.lost, seen.counted) == (False, None, False)


@pytest.mark.parametrize("node", IN_REPAIR, ids=str)
def test_a_node_in_repair_is_out_of_service(node):
    seen = view(node)
    assert (seen.owner is not None, seen.counted, seen.lost) == (True, True, "down")


@pytest.mark.parametrize("node", NOBODYS, ids=str)
def test_what_is_over_or_takes_no_node_away_is_nobodys(node):
    assert (view(node).owner, view(node).opt_out, view(node).resting) == (None, None, None)


OPT_OUTS = [
    *[("predrain.io/managed", value) for value in ("false", "False", "FALSE", "no", "off", "0", "disabled", " false ")],
    *[("predrain.io/managed", value) for value in ("", "until friday", "tru")],
    *[("nvsentinel.dgxc.nvidia.com/managed", value) for value in ("false", "False", "no")],
    ("karpenter.sh/do-not-disrupt", "true"),
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
