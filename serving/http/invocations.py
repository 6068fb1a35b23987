"""MLflow's scoring protocol: ``/ping`` and ``/invocations``, for what speaks to ``mlflow models serve``.

The bodies that MLflow 2 and 3 define and that name their columns are taken: ``dataframe_split``,
``dataframe_records``, and ``instances`` and ``inputs`` with records, ``inputs`` with one list a column. Tensors without
names are refused, for nothing says which feature is which.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from foundation.server.problems import RequestRefused
from serving.champion.model import LoadedModel
from serving.http.application import TOKEN
from serving.http.bodies import JSON, media_of, one_of, read_json, unknown_name
from serving.http.query_routes import QueryRoutes
from serving.http.schemas import INVOCATIONS, Predictions, request_body

if TYPE_CHECKING:
    from serving.champion.model import FeatureRows

FORMS: Final = ("dataframe_split", "dataframe_records", "instances", "inputs")
_SPLIT: Final = ("columns", "data", "index")
_CONTAINERS: Final = 1024  # in addition to the rows: a list a column
_OWN_COLUMNS: Final = 3  # unit, decision_time and the index


def add_invocations(app: FastAPI, queries: QueryRoutes, max_rows: int) -> None:
    """Add the two routes."""

    async def ping() -> Response:
        queries.model()
        return PlainTextResponse("\n")

    async def invoke(request: Request) -> Response:
        if media_of(request) != JSON:
            raise RequestRefused(415, f"send {JSON}", "media_type")
        read = partial(_read, limit=max_rows)
        return await queries.score(request, read, lambda _, predictions: {"predictions": predictions})

    app.add_api_route(
        "/ping",
        ping,
        summary="Return whether the model is loaded (MLflow's protocol).",
        response_class=PlainTextResponse,
    )
    app.add_api_route(
        "/invocations",
        invoke,
        methods=["POST"],
        summary="Score feature rows in MLflow's protocol.",
        response_model=Predictions,
        dependencies=[TOKEN],
        openapi_extra={"requestBody": request_body(INVOCATIONS)},
    )


def _read(body: bytes, model: LoadedModel, limit: int) -> FeatureRows:
    from serving.http.rows import rows_of_records, rows_of_table

    values = (limit + 1) * (len(model.columns) + _OWN_COLUMNS)
    content = read_json(body, containers=limit + _CONTAINERS, values=values)
    if isinstance(content, dict) and content.pop("params", None):
        raise RequestRefused(422, "this model has no params: leave them out", "invalid")
    form, value = one_of(content, FORMS)
    if form == "dataframe_split":
        return rows_of_table(*_split(value), model.columns, limit)
    if form == "inputs" and isinstance(value, dict):
        return rows_of_table(*_turned(value), model.columns, limit, form)
    return rows_of_records(value, model.columns, limit, form)


def _split(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, dict) or not {"columns", "data"} <= value.keys():
        raise RequestRefused(422, "dataframe_split is no object with columns and data", "invalid")
    for key in value:
        if key not in _SPLIT:
            raise RequestRefused(422, unknown_name(key, _SPLIT, "key of dataframe_split"), "invalid")
    return value["columns"], value["data"]


def _turned(value: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    if not value or not all(isinstance(column, list) for column in value.values()):
        raise RequestRefused(422, "inputs is neither a list of records nor one list of values a column", "invalid")
    lengths = {len(column) for column in value.values()}
    if len(lengths) > 1:
        raise RequestRefused(422, "inputs: the columns have different lengths", "invalid")
    return list(value), [list(row) for row in zip(*value.values(), strict=True)]
