"""JSON in and out."""

import json
import math

from serving.http.bodies import read_json, write_json


def test_a_byte_order_mark_is_passed_over() -> None:
    assert read_json(b"\xef\xbb\xbf[1]") == [1]


def test_half_a_surrogate_pair_is_written() -> None:
    assert json.loads(write_json({"error": "no file \udcff.json"})) == {"error": "no file \udcff.json"}


def test_nan_and_infinity_are_written_as_null() -> None:
    assert write_json([math.nan, math.inf, -math.inf]) == b"[null,null,null]"
