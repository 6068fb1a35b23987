"""Rows of nodes: as a comparison of all names finds them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from features.fleet import NodeRows

_NAMES = st.lists(st.sampled_from(["n1", "n2", "n10", "ü", "", "n1 "]), max_size=30)


@given(_NAMES, _NAMES)
def test_rows_are_those_whose_names_compare_equal(nodes: list[str], asked: list[str]) -> None:
    plain = np.flatnonzero(np.isin(np.array(nodes, dtype=object), sorted(set(asked)))) if nodes and asked else []
    found = NodeRows(nodes).of(asked)
    assert found.dtype == np.int64
    assert found.tolist() == list(plain)
