from __future__ import annotations

import pytest

from telemetry.xids.node_names import NodeNames, are_one_node


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("n0", "n0.example.com"),
        ("n0.example", "n0.example.com"),
        ("n1.example.com", "n1"),
        ("n0.example.org", "n0.example.org"),
        ("n2", "n2"),
        ("n2.west.example.com", "n2.west"),
        ("", ""),
    ],
)
def test_a_node_is_found_under_more_or_less_of_its_domain_where_only_one_fits(name: str, written: str):
    assert NodeNames(["n0.example.com", "n1", "n2.west", "n2.east"]).written(name) == written


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("rack1.n0", "rack1.n1", False),
        ("n1", "n10.example", False),
        ("n0", "n0.example.com", True),
        ("n0.example.com", "n0.example", True),
        ("n0", "n0", True),
    ],
)
def test_names_that_only_begin_alike_are_two_nodes(one: str, other: str, same: bool):
    assert are_one_node(one, other) is same
    assert NodeNames([one]).written(other) == (one if same else other)
