"""Names that hosts, prologs and people ask for, in another spelling than the scores."""

import pytest

from serving.http.extender import kept_nodes
from serving.scores.reading import ScoredFleet, Scores
from tests.serving.http.world import NOW, record

UUID = "GPU-0a1b2c3d-0000-4000-8000-00000000000b"


def fleet(*nodes: str) -> ScoredFleet:
    return ScoredFleet(
        Scores.of(
            [
                record(UUID if not place else f"GPU-{place}", node, 0.9, "high", decided=NOW)
                for place, node in enumerate(nodes)
            ],
            {},
        )
    )


@pytest.mark.parametrize(
    "name", ["aks-vmss00000b", "aks-vmss00000B", "AKS-VMSS00000B.internal.cloudapp.net", "aks-vmss00000b."]
)
def test_a_node_is_found_in_each_spelling(name: str):
    assert fleet("aks-vmss00000b", "n1").state(name, NOW).node == "aks-vmss00000b"
    assert kept_nodes([name, "other"], fleet("aks-vmss00000b"), NOW)[0] == ["other"]


def test_of_nodes_that_differ_by_letter_case_only_the_exact_name_is_found():
    both = fleet("rack", "Rack")
    assert [both.names.find(name) for name in ("rack", "Rack", "RACK")] == ["rack", "Rack", None]


@pytest.mark.parametrize("name", [UUID, UUID.upper(), UUID.removeprefix("GPU-")])
def test_a_gpu_is_found_in_each_spelling(name: str):
    assert fleet("n0").unit(name).unit == UUID
