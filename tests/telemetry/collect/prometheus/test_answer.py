"""Answers: the fast reading against plain JSON, and what is no answer."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.collect.prometheus.answer import Matrix, Unreadable, read_json
from telemetry.collect.prometheus.answer import read_matrix as matrix_of

label = st.text(st.characters(codec="utf-8"), max_size=12) | st.just('"values":[[1,"2"]]') | st.just("]]},[")
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


def document(result: list[Any], **others: Any) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": "matrix", "result": result}, **others}


def body(result: list[Any], **others: Any) -> bytes:
    return json.dumps(document(result, **others), separators=(",", ":")).encode()


def read_matrix(text: bytes) -> Matrix:
    return matrix_of(read_json(text).get("data"))


def slowly(result: list[Any]) -> list[tuple[int, int, float]]:
    return [(n, round(t * 1000), float(v)) for n, each in enumerate(result) for t, v in each.get("values", [])]


def samples(matrix: Matrix) -> list[tuple[int, int, float]]:
    return list(zip(matrix.index.tolist(), matrix.ms.tolist(), matrix.values.tolist(), strict=True))


def assert_same(got: list[tuple[int, int, float]], expected: list[tuple[int, int, float]]) -> None:
    assert [row[:2] for row in got] == [row[:2] for row in expected]
    assert np.array_equal(np.array([row[2] for row in got]), np.array([row[2] for row in expected]), equal_nan=True)


@given(st.lists(series, max_size=4))
def test_compact_and_spaced_answers_read_as_plain_json_does(result: list[Any]) -> None:
    for text in (body(result), json.dumps(document(result), indent=2, ensure_ascii=False).encode()):
        matrix = read_matrix(text)
        assert matrix.labels == [each["metric"] for each in result]
        assert_same(samples(matrix), slowly(result))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "the answer is not JSON: ''"),
        (b'{"status":"success","data":{"resultType":"matrix","result":[{"metric":{},"values":[[1,"2"],[3', "not JSON"),
        (b'{"hello":1}', "the answer is not one of the Prometheus API: '{\"hello\":1}'"),
        (b'{"status":"success","data":{"resultType":"vector","result":[]}}', "the answer holds vector"),
        (body([{"metric": {}, "values": [[1, "x"]]}]), "pairs that are no numbers"),
        (body([{"metric": {}, "values": [[1, "2", 3]]}]), "pairs that are no numbers"),
        (body([{"metric": {}, "values": [[1e300, "2"]]}]), "a time stamp that is none"),
        (body([{"metric": 5, "values": [[1, "2"]]}]), "a series of the answer has no labels"),
    ],
)
def test_what_is_no_answer_is_told(text: bytes, message: str) -> None:
    with pytest.raises(Unreadable) as caught:
        read_matrix(text)
    assert message in str(caught.value)


@given(st.lists(series, min_size=1, max_size=2), st.data())
def test_an_answer_cut_anywhere_is_never_taken_for_whole(result: list[Any], data: st.DataObject) -> None:
    text = body(result)
    with pytest.raises(Unreadable):
        read_matrix(text[: data.draw(st.integers(0, len(text) - 1))])
