"""JSON in and out."""

import json
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.http.bodies import read_json, write_json
from telemetry.collect.remote_write.problems import Refused

numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=15,
)
almost = st.text('[]{},:"0e1.-ntf \\u', max_size=12).map(str.encode)


def outcome(body: bytes) -> Any:
    try:
        return read_json(body)
    except Refused as refused:
        return (refused.status, refused.detail)


@settings(max_examples=200)
@given(values.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=30) | almost)
def test_json_is_read_as_the_standard_library_does(body: bytes) -> None:
    found = outcome(body)
    if not isinstance(found, tuple):
        assert same(found, json.loads(body.decode("utf-8-sig")))
    else:
        assert found[0] == 400


def same(one: Any, other: Any) -> bool:
    """Equal, but for whole numbers of more than 64 bits, which one of them reads as a float."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, int) and abs(other) >= 2**63:
        return one == float(other)
    return type(one) is type(other) and one == other


def test_a_byte_order_mark_is_passed_over() -> None:
    assert read_json(b"\xef\xbb\xbf[1]") == [1]


@given(values)
def test_what_is_written_is_read_again(value: Any) -> None:
    assert same(read_json(write_json(value)), value)


def test_half_a_surrogate_pair_is_written() -> None:
    assert json.loads(write_json({"error": "no file \udcff.json"})) == {"error": "no file \udcff.json"}


def test_nan_and_infinity_are_written_as_null() -> None:
    assert write_json([math.nan, math.inf, -math.inf]) == b"[null,null,null]"
