"""Answers: samples as plain JSON gives them, however it is written, and what is no answer."""

import json
import time
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.collect.prometheus.client import RawSamples, read_matrix, split_samples

label = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(['"values":[[1,"2"]]', "]]", "[["])
number = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers(0, 10**25).map(str),
    st.sampled_from(["NaN", "+Inf", "-Inf", "0", "-0", "1e-320", "1.7976931348623157e+308", "9223372036854775794"]),
)
instant = st.integers(0, 4_000_000_000_000).map(lambda ms: ms // 1000 if ms % 1000 == 0 else round(ms / 1000, 3))
series = st.fixed_dictionaries(
    {
        "metric": st.dictionaries(label, label, max_size=3),
        "values": st.lists(st.tuples(instant, number).map(list), max_size=5),
    }
)
SPELLINGS: list[dict[str, Any]] = [{}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}]


def read(text: str) -> RawSamples:
    rest, arrays = split_samples(text.encode())
    return read_matrix(orjson.loads(rest)["data"], arrays)


@given(st.lists(series | st.just({"metric": {"a": "b"}, "histograms": [[1, {"count": "3"}]]}), max_size=4), st.data())
def test_samples_are_those_of_plain_json(result: list[Any], data: st.DataObject) -> None:
    spelling = data.draw(st.sampled_from(SPELLINGS))
    matrix = read(json.dumps({"data": {"resultType": "matrix", "result": result}}, **spelling))
    assert matrix.labels == [entry["metric"] for entry in result]
    expected = [(n, round(t * 1000), float(v)) for n, entry in enumerate(result) for t, v in entry.get("values", [])]
    assert list(zip(matrix.index.tolist(), matrix.ms.tolist(), strict=True)) == [row[:2] for row in expected]
    assert np.array_equal(matrix.values, np.array([row[2] for row in expected]), equal_nan=True)


def test_an_instant_beyond_all_time_costs_no_other_sample() -> None:
    entry = {"metric": {}, "values": [[1e300, "2"], [1767225600.5, "3"], [-1e17, "4"]]}
    matrix = read(json.dumps({"data": {"resultType": "matrix", "result": [entry]}}))
    assert [(ms, value) for ms, value in zip(matrix.ms, matrix.values, strict=True) if 0 < ms < 2**52] == [
        (1_767_225_600_500, 3.0)
    ]


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {"resultType": "vector", "result": []},
        {"resultType": "matrix"},
        {"resultType": "matrix", "result": {"metric": {}}},
        {"resultType": "matrix", "result": [[]]},
        {"resultType": "matrix", "values": [[1, "2"]], "result": []},
        *(
            {"resultType": "matrix", "result": [entry]}
            for entry in (
                {"metric": {}, "values": [[1, "x"]]},
                {"metric": {}, "values": [["2"]]},
                {"metric": {}, "values": [[]]},
                {"metric": {}, "values": [[1, "2"], ["3"]]},
                {"metric": {}, "values": [[1, "2", "3"]]},
                {"metric": {}, "values": [[1, {"a": "2"}]]},
                {"metric": {}, "values": [[1, [2]]]},
                {"metric": {}, "values": [1, "2"]},
                {"metric": {}, "values": 0},
                {"metric": {}, "values": [0]},
                {"metric": {}, "values": "values"},
                {"metric": 5, "values": [[1, "2"]]},
                {"metric": {"a": 5}, "values": [[1, "2"]]},
                {"metric": {"a": ["b"]}, "values": [[1, "2"]]},
                {"values": [[1, "2"]]},
            )
        ),
    ],
)
def test_what_is_no_matrix_is_refused(data: Any) -> None:
    with pytest.raises((ValueError, KeyError)):
        read(json.dumps({"data": data}))


@pytest.mark.parametrize(
    "piece", ['"values":[[', '"values":[[1,"2"]', '"values":[[{', '"values":[['.replace("[[", "[ [")]
)
def test_a_hostile_answer_takes_no_more_than_linear_time(piece: str) -> None:
    began = time.perf_counter()
    with pytest.raises((ValueError, KeyError)):
        read('{"data":' + piece * 200_000 + "]]}")
    assert time.perf_counter() - began < 5
