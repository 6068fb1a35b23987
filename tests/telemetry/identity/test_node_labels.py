import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.identity.node_labels import NodeLabels

POD = "nvidia-dcgm-exporter-"


def fleet(*label_sets: dict[str, str], gpus: int = 2) -> list[tuple[dict[str, str], str, str]]:
    """Series of GPUs: the labels of a node, the GPU and its address; ``node_id`` tells whose GPUs they are."""
    return [
        (
            {name: value for name, value in labels.items() if name != "node_id"},
            f"GPU-{labels['node_id']}-{gpu}",
            f"00000000:{gpu:02x}:00",
        )
        for labels in label_sets
        for gpu in range(gpus)
    ]


def nodes_of(series: list[tuple[dict[str, str], str, str]], decider: NodeLabels | None = None) -> list[str | None]:
    decider = decider or NodeLabels()
    for labels, device, place in series:
        decider.observe(labels, device, place)
    return [decider.node_of(labels, device) for labels, device, _ in series]


def labels_of(number: int, **others: str) -> dict[str, str]:
    return {"node_id": str(number), **others}


CASES = {
    "pods on a cluster network, node by relabelling": (
        [
            labels_of(n, Hostname=POD + pod, node=f"gpu-{n}", instance=f"10.0.{n}.7:9400")
            for n, pod in enumerate(("7x2kd", "h4m5t"))
        ],
        ["gpu-0", "gpu-1"],
    ),
    "pods of another exporter, known by the label pod": (
        [labels_of(n, Hostname=f"metrics-{n}", pod=f"metrics-{n}", kubernetes_node=f"w{n}") for n in range(2)],
        ["w0", "w1"],
    ),
    "a suffix outside the alphabet of Kubernetes": (
        [labels_of(n, Hostname=f"dcgm-exporter-abcd{n}", node=f"w{n}") for n in range(2)],
        ["w0", "w1"],
    ),
    "host network": ([labels_of(n, Hostname=f"n{n}", instance=f"10.0.0.{n}:9400") for n in range(2)], ["n0", "n1"]),
    "the exporter's own label renamed by the scrape": (
        [labels_of(n, exported_node=f"n{n}", node="monitoring-0", instance="gateway:9091") for n in range(4)],
        ["n0", "n1", "n2", "n3"],
    ),
    "container ids": (
        [
            labels_of(n, Hostname=name, instance=f"gpu{n}.example.com:9400")
            for n, name in enumerate(("3f2a9c81d0be", "a01b7c3d9e42"))
        ],
        ["gpu0.example.com", "gpu1.example.com"],
    ),
    "one name for all": (
        [labels_of(n, Hostname="gpu-monitor", host=f"n{n}") for n in range(3)],
        ["n0", "n1", "n2"],
    ),
    "the local host": (
        [labels_of(n, hostname="localhost", instance=f"n{n}:{('9400', 'metrics')[n]}") for n in range(2)],
        ["n0", "n1"],
    ),
    "a service": (
        [labels_of(n, instance="dcgm-exporter.gpu-operator.svc:9400", nodename=f"n{n}") for n in range(2)],
        ["n0", "n1"],
    ),
    "machines of the Cluster API, whose names look like pods": (
        [
            labels_of(n, Hostname=name, node=name)
            for n, name in enumerate(("md-0-6f9b8c7d4f-x2kdf", "md-0-6f9b8c7d4f-b7w9z"))
        ],
        ["md-0-6f9b8c7d4f-x2kdf", "md-0-6f9b8c7d4f-b7w9z"],
    ),
    "addresses only": ([labels_of(n, instance=f"10.0.0.{n}:9400") for n in range(2)], ["10.0.0.0", "10.0.0.1"]),
    "tags of an agent": (
        [labels_of(n, host=f"n{n}", kube_node=f"n{n}", agent_hostname="agent") for n in range(2)],
        ["n0", "n1"],
    ),
    "pods and their addresses": (
        [labels_of(n, Hostname=f"{POD}h4m5{n}", instance=f"10.0.0.{n}:9400") for n in (2, 4)],
        [None, None],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_node_is_the_label_that_evidence_leaves(case: str):
    label_sets, nodes = CASES[case]
    assert nodes_of(fleet(*label_sets)) == [node for node in nodes for _ in range(2)]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), case=st.sampled_from(sorted(CASES)))
def test_the_order_of_series_and_labels_does_not_matter(seed: int, case: str):
    label_sets, nodes = CASES[case]
    series = fleet(*label_sets)
    expected = dict(zip([device for _, device, _ in series], [node for node in nodes for _ in range(2)], strict=True))
    shuffler = random.Random(seed)
    shuffler.shuffle(series)
    shuffled = [
        (dict(shuffler.sample(list(labels.items()), len(labels))), device, place) for labels, device, place in series
    ]
    assert nodes_of(shuffled) == [expected[device] for _, device, _ in shuffled]


def test_a_rollout_does_not_rename_nodes():
    before = fleet(*[labels_of(n, Hostname=f"host-{n}a", host=f"n{n}") for n in range(4)])
    after = fleet(*[labels_of(n, Hostname=f"host-{n}b", host=f"n{n}") for n in range(4)])
    assert nodes_of([*before, *after]) == [f"n{n}" for _ in range(2) for n in range(4) for _ in range(2)]


def test_a_gpu_that_moves_keeps_the_label():
    series = fleet(*[labels_of(n, node=f"n{n}", Hostname=f"n{n}") for n in range(3)])
    moved = ({"node": "n2", "Hostname": "n2"}, series[0][1], "00000000:07:00")
    assert nodes_of([*series, moved])[-1] == "n2"


def test_a_decision_holds_until_evidence_rejects_it():
    both = fleet(*[labels_of(n, node=f"k{n}", host=f"h{n}") for n in range(2)])
    decider = NodeLabels()
    decider.prefer("host")
    assert nodes_of(both, decider) == ["h0", "h0", "h1", "h1"]
    pods = fleet(*[labels_of(n, node=f"k{n}", host=f"{POD}7x2k{n}") for n in range(2, 9)])
    assert nodes_of(pods, decider)[0] == "k2"


def test_the_decision_names_values_and_reasons():
    decider = NodeLabels()
    nodes_of(fleet(*CASES["pods on a cluster network, node by relabelling"][0]), decider)
    decision = decider.decision()
    assert (decision.label, decision.values, decision.examples) == ("node", 2, ("gpu-0", "gpu-1"))
    assert decision.rejected == {"Hostname": "values are pods", "instance": "values are addresses of pods"}
    assert not decision.doubt


def test_addresses_are_accepted_with_doubt():
    decider = NodeLabels()
    nodes_of(fleet(*CASES["addresses only"][0]), decider)
    assert decider.decision().label == "instance"
    assert decider.decision().doubt
