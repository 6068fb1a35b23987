import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.identity.nodes import NodeNames, are_one_node

NODES = ["n0.example.com", "n1", "n2.west", "n2.east", "aks-vmss00000b", "Rack", "rack", "10.0.0.1", "n9."]


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("n0", "n0.example.com"),
        ("N0", "n0.example.com"),
        ("n0.example", "n0.example.com"),
        ("N0.Example.Com.", "n0.example.com"),
        ("n1.example.com", "n1"),
        ("n1.localdomain", "n1"),
        (" n1 ", "n1"),
        ("aks-vmss00000B", "aks-vmss00000b"),
        ("n2.west.example.com", "n2.west"),
        ("n9", "n9."),
        ("Rack", "Rack"),
        ("rack", "rack"),
    ],
)
def test_letter_case_and_domain_do_not_hide_a_node(name: str, written: str):
    assert NodeNames(NODES).find(name) == written


@pytest.mark.parametrize("name", ["n0.example.org", "n2", "RACK", "10", "10.0.0.2", "10.0.0.1.example", "", ".", "n"])
def test_a_name_that_is_unknown_or_ambiguous_is_left_as_it_is(name: str):
    names = NodeNames(NODES)
    assert names.find(name) is None
    assert names.written(name) == name


def test_only_a_name_with_several_nodes_is_ambiguous():
    names = NodeNames(NODES)
    assert [name for name in ("n2", "RACK", "n0", "other", "rack") if names.is_ambiguous(name)] == ["n2", "RACK"]


def test_an_alias_wins_in_any_letter_case_and_leads_to_a_known_spelling():
    names = NodeNames(NODES, {"old-0": "n0", "n1": "n2.west"})
    assert [names.find(name) for name in ("OLD-0", "old-0", "n1")] == ["n0.example.com", "n0.example.com", "n2.west"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0", "10.0.0.2", False),
        ("rack1.n0", "rack1.n1", False),
        ("n1", "n10.example", False),
        ("n0", "n0.example.com", True),
        ("N0.EXAMPLE.com", "n0.example", True),
        ("n0", "n0", True),
        ("n0", "N0", True),
    ],
)
def test_names_that_only_begin_alike_are_two_nodes(one: str, other: str, same: bool):
    assert are_one_node(one, other) is same
    assert NodeNames([one]).written(other) == (one if same else other)


@settings(max_examples=60, deadline=None)
@given(
    nodes=st.lists(st.from_regex(r"[a-c][0-9](\.[xy]){0,2}", fullmatch=True), min_size=1, max_size=6, unique=True),
    name=st.from_regex(r"[a-cA-C][0-9](\.[xyX]){0,2}", fullmatch=True),
)
def test_names_resolve_as_plain_comparison_of_every_pair_does(nodes: list[str], name: str):
    key = name.lower()
    tiers = (
        [node for node in nodes if node == name],
        [node for node in nodes if node.lower() == key],
        [node for node in nodes if node.startswith(key + ".") or key.startswith(node + ".")],
    )
    best = next((tier for tier in tiers if tier), [])
    assert sorted(NodeNames(nodes).candidates(name)) == sorted(best)
