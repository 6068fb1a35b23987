"""Feature rows over HTTP: the bundle's own scores, whatever the form they come in; everything else is refused."""

import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from serving.http.rows import rows_of_arrow
from tests.models.small_models import fitted_models, rows
from tests.serving.http.model_world import ARROW, NAMES, scoring, stream_of
from tests.serving.http.world import NOW, Client, Running, running, small_fleet
from tests.serving.score_folder import write_scores
from tests.waiting import wait


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = {"rows": 500, "body_bytes": 2_000_000, "decoded_bytes": 2_000_000}
    with scoring(tmp_path_factory.mktemp("world"), **limits) as started:
        yield started


def some_rows(count: int = 90) -> tuple[Any, list[str], list[str]]:
    """Values, units, and three decision times."""
    values, _ = rows(count, seed=5)
    times = [datetime(2026, 2, 1, tzinfo=UTC) + timedelta(hours=6 * (number * 3 // count)) for number in range(count)]
    return values, [f"g{number % 30:02d}" for number in range(count)], [time.isoformat() for time in times]


def records(values: Any, units: list[str], times: list[str]) -> list[dict[str, Any]]:
    """The rows as JSON has them: a missing value is left out or null."""
    listed = []
    for place, (row, unit, time) in enumerate(zip(values.tolist(), units, times, strict=True)):
        features = dict(zip(NAMES, row, strict=True))
        if place % 2:
            features = {name: None if math.isnan(value) else value for name, value in features.items()}
        else:
            features = {name: value for name, value in features.items() if not math.isnan(value)}
        listed.append({"unit": unit, "decision_time": time} | features)
    return listed


def expected(values: Any, units: list[str], times: list[str]) -> list[dict[str, Any]]:
    """What the bundle says, asked directly."""
    scored = fitted_models().score(values, pd.Series(pd.to_datetime(times, utc=True)), units)
    of_profile = scored[scored["model"] == "cascade"].astype({"risk": float, "score": float})
    table = of_profile[["unit", "risk", "score", "rank", "alert"]].itertuples(index=False)
    return [row._asdict() for row in table]


def arrow(columns: dict[str, Any]) -> bytes:
    return stream_of(pa.table(columns))


def test_rows_get_the_scores_that_the_bundle_gives(client: Client, service: Running) -> None:
    given_rows = some_rows()
    response = client.post("/v1/predict", {"rows": records(*given_rows)})
    assert response["predictions"] == expected(*given_rows)
    model = service.service.holder.model
    assert response["model"] == {"digest": model.bundle.digest, "profile": "cascade", "version": None}
    assert response["horizon_seconds"] == 86400
    assert response["issued_at"] == "2026-01-01T07:00:00Z"
    assert response["expires_at"] is None


def test_arrow_rows_get_the_same_scores_in_any_order_of_columns_and_any_numeric_type(client: Client) -> None:
    values, units, times = some_rows()
    columns: dict[str, Any] = {
        name: values[:, place].astype(kind)
        for place, (name, kind) in enumerate(zip(NAMES, ["f4", "f8"] * 3, strict=True))
    }
    columns["unit"] = pa.array(units).dictionary_encode()
    columns["decision_time"] = pa.array([datetime.fromisoformat(time) for time in times], pa.timestamp("us", "UTC"))
    status, response, _ = client.send("POST", "/v1/predict", arrow(dict(reversed(columns.items()))), media=ARROW)
    assert status == 200
    assert response["predictions"] == expected(values, units, times)
    columns["decision_time"] = times
    assert client.send("POST", "/v1/predict", arrow(columns), media=ARROW)[1]["predictions"] == response["predictions"]


def test_a_row_without_name_and_time_is_scored_alone(client: Client) -> None:
    values, _, _ = some_rows()
    response = client.post("/v1/predict", {"rows": [{NAMES[0]: float(values[3, 0])}]})
    row = np.full((1, len(NAMES)), np.nan, dtype=np.float32)
    row[0, 0] = values[3, 0]
    (only,) = expected(row, ["0"], ["1970-01-01T00:00:00Z"])
    assert response["predictions"] == [only]
    assert only["unit"] == "0"


@pytest.mark.parametrize("form", ["dataframe_split", "dataframe_records", "instances", "inputs", "inputs of columns"])
def test_every_form_of_mlflows_protocol_gets_the_same_scores(client: Client, form: str) -> None:
    values, units, times = some_rows()
    plain = [[None if math.isnan(value) else value for value in row] for row in values.tolist()]
    columns = [*NAMES, "unit", "decision_time"]
    data = [[*row, unit, time] for row, unit, time in zip(plain, units, times, strict=True)]
    of_columns = dict(zip(columns, map(list, zip(*data, strict=True)), strict=True))
    body = {
        "dataframe_split": {"dataframe_split": {"columns": columns, "data": data, "index": list(range(90))}},
        "dataframe_records": {"dataframe_records": records(values, units, times), "params": {}},
        "instances": {"instances": records(values, units, times)},
        "inputs": {"inputs": records(values, units, times)},
        "inputs of columns": {"inputs": of_columns},
    }[form]
    assert client.post("/invocations", body) == {"predictions": expected(values, units, times)}


def test_ping_answers_once_the_model_is_there(client: Client) -> None:
    assert client.send("GET", "/ping")[:2] == (200, b"\n")
    assert client.get("/readyz")["status"] == "ready"
    page = client.get("/metrics").decode()
    assert "predrain_model_loaded 1.0" in page
    age_s = (NOW - fitted_models().refit_at).total_seconds()
    assert f"predrain_model_age_seconds {age_s!r}" in page


ROW = {NAMES[0]: 60.0}
TIMED = ROW | {"decision_time": "2026-01-01T06:00:00Z"}
SPLIT = "dataframe_split"


@pytest.mark.parametrize(
    ("path", "body", "status", "detail"),
    [
        ("/v1/predict", {"rows": [{NAMES[0][:-1]: 1}]}, 422, f"did you mean '{NAMES[0]}'?"),
        ("/v1/predict", {"rows": []}, 422, "rows has no rows"),
        ("/v1/predict", {"rows": [1]}, 422, "rows is not a list of objects with feature names and numbers"),
        ("/v1/predict", {"rows": [ROW] * 501}, 413, "rows holds 501 rows: send at most 500"),
        ("/v1/predict", {"rows": [{"unit": "a"}]}, 422, "the rows have no feature of the model"),
        ("/v1/predict", {"rows": [ROW, {NAMES[0]: "60"}]}, 422, f"rows: row 1, {NAMES[0]}: '60' is not a number"),
        ("/v1/predict", {"rows": [{NAMES[1]: 1e39}]}, 422, f"rows: row 0, {NAMES[1]}: 1e+39 exceeds"),
        ("/v1/predict", {"rows": [ROW | {"unit": 3}]}, 422, "rows: row 0, unit: 3 is not a valid name"),
        ("/v1/predict", {"rows": [ROW | {"decision_time": "2026-01-01"}]}, 422, "not a time with a zone"),
        ("/v1/predict", {"rows": [TIMED, ROW | {"decision_time": None}]}, 422, "rows: row 1 has no decision_time"),
        ("/invocations", {SPLIT: {"columns": [NAMES[0]], "data": [[1, 2]]}}, 422, "row 0 has 2 values for 1 columns"),
        ("/invocations", {SPLIT: {"columns": [NAMES[0]] * 2, "data": [[1, 2]]}}, 422, f"'{NAMES[0]}' is duplicated"),
        ("/invocations", {SPLIT: [1]}, 422, "dataframe_split is not an object with columns and data"),
        ("/invocations", {"inputs": [[1.0]]}, 422, "inputs is not a list of objects with feature names and numbers"),
        ("/invocations", {"inputs": {NAMES[0]: [1], NAMES[1]: []}}, 422, "inputs: the columns have different lengths"),
        ("/invocations", {"dataframe_record": [ROW]}, 422, "did you mean 'dataframe_records'?"),
        ("/invocations", {"instances": [ROW], "params": {"a": 1}}, 422, "this model has no params: leave them out"),
    ],
)
def test_rows_that_do_not_fit_are_refused(client: Client, path: str, body: Any, status: int, detail: str) -> None:
    got, problem, _ = client.send("POST", path, body)
    assert (got, detail in problem["detail"]) == (status, True), problem


def of_time(times: list[int | None], *kind: str) -> dict[str, Any]:
    return {NAMES[0]: [1.0] * len(times), "decision_time": pa.array(times, pa.timestamp(*kind))}


@pytest.mark.parametrize(
    ("columns", "status", "detail"),
    [
        ({"nonsense": [1.0]}, 422, "feature 'nonsense' is not known: choose from telemetry__"),
        ({NAMES[0]: ["60"]}, 422, f"column '{NAMES[0]}' has the type string: send numbers"),
        ({NAMES[0]: [math.inf]}, 422, f"the table: row 0, {NAMES[0]}: inf exceeds the range of float32"),
        ({NAMES[0]: pa.array([], pa.float64())}, 422, "the table has no rows"),
        ({NAMES[0]: np.zeros(501)}, 413, "the body has more than 500 rows: send smaller requests"),
        ({NAMES[0]: [[1.0]]}, 400, f"column '{NAMES[0]}' has the type list<item: double>: send numbers, strings"),
        (of_time([0], "ms"), 422, "decision_time: timestamp[ms] has no time zone"),
        (of_time([0, None], "ms", "UTC"), 422, "the table: row 1 has no decision_time"),
        (of_time([2**62], "s", "UTC"), 422, "decision_time: a time lies outside the years 1 to 9999 (UTC)"),
        ({NAMES[0]: [1.0], "unit": [7]}, 422, "the table: row 0, unit: 7 is not a valid name"),
    ],
)
def test_tables_that_do_not_fit_are_refused(client: Client, columns: dict[str, Any], status: int, detail: str) -> None:
    got, problem, _ = client.send("POST", "/v1/predict", arrow(columns), media=ARROW)
    assert got == status
    assert problem["detail"].startswith(detail)


def test_a_column_of_nulls_is_missing(client: Client) -> None:
    body = arrow({NAMES[0]: [61.0, 55.0], NAMES[1]: pa.nulls(2), NAMES[2]: pa.array([None, 3], pa.int64())})
    status, response, _ = client.send("POST", "/v1/predict", body, media=ARROW)
    assert status == 200
    values = np.full((2, len(NAMES)), np.nan, dtype=np.float32)
    values[:, 0], values[1, 2] = (61, 55), 3
    assert response["predictions"] == expected(values, ["0", "1"], ["1970-01-01T00:00:00Z"] * 2)


def test_a_bundle_that_cannot_be_loaded_is_reported_and_the_rest_is_served(tmp_path: Path) -> None:
    write_scores(tmp_path / "scores", small_fleet())
    with running(tmp_path / "scores", model=tmp_path / "none") as service:
        client = service.client()
        wait(lambda: "no bundle" in str(service.service.holder.why_not_loaded), 60)
        status, problem, _ = client.send("GET", "/readyz")
        assert status == 503
        assert f"the model cannot be served: no bundle in {tmp_path / 'none'} (" in str(problem["reasons"])
        assert client.send("GET", "/ping")[0] == 503
        assert client.send("POST", "/v1/predict", {"rows": [ROW]})[0] == 503
        assert client.send("POST", "/v1/predict", {"nodes": ["n1"]})[0] == 200


@pytest.mark.parametrize("rows_a_batch", [None, 2])
def test_an_arrow_table_of_mixed_numbers_is_read_as_its_columns_are(rows_a_batch: int | None) -> None:
    table = pa.table(
        {
            "b": pa.array([1, 2, None, 4, 5], pa.int64()),
            "a": pa.array([1.5, None, math.nan, 4, 5], pa.float32()),
            "half": pa.array(np.arange(5), pa.float16()),
            "none": pa.nulls(5),
            "large": pa.array([2**63 + 5] * 5, pa.uint64()),
            "unit": list("vwxyz"),
        }
    )
    columns = ("none", "a", "absent", "b", "half", "large")
    read = rows_of_arrow(stream_of(table, rows_a_batch), columns, 10, 2**20)
    assert read.units == list("vwxyz")
    for i, name in enumerate(columns):
        values = table.column(name).to_pylist() if name in table.column_names else [None] * 5
        expected = np.array([math.nan if value is None else float(value) for value in values], dtype=np.float32)
        np.testing.assert_array_equal(read.values[:, i], expected, err_msg=name)
