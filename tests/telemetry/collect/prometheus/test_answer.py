"""Answers: samples as plain JSON gives them, and what is no answer."""

import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from telemetry.collect.prometheus.client import read_matrix

label = st.text(st.characters(codec="utf-8"), max_size=12)
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


@given(st.lists(series, max_size=4))
def test_samples_are_those_of_plain_json(result: list[Any]) -> None:
    matrix = read_matrix(orjson.loads(json.dumps({"resultType": "matrix", "result": result})))
    assert matrix.labels == [entry["metric"] for entry in result]
    expected = [(n, round(t * 1000), float(v)) for n, entry in enumerate(result) for t, v in entry["values"]]
    assert list(zip(matrix.index.tolist(), matrix.ms.tolist(), strict=True)) == [row[:2] for row in expected]
    assert np.array_equal(matrix.values, np.array([row[2] for row in expected]), equal_nan=True)


@pytest.mark.parametrize(
    "data",
    [
        None,
        {"resultType": "vector", "result": []},
        *(
            {"resultType": "matrix", "result": [entry]}
            for entry in (
                {"metric": {}, "values": [[1, "x"]]},
                {"metric": {}, "values": [[1e300, "2"]]},
                {"metric": 5, "values": [[1, "2"]]},
            )
        ),
    ],
)
def test_what_is_no_matrix_is_refused(data: Any) -> None:
    with pytest.raises(ValidationError):
        read_matrix(data)
