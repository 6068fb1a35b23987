"""The OpenAPI document: what each route takes and answers, kept by hand and checked against the routes by tests."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from serving.http.query_routes import ARROW, SORTS
from serving.http.request import JSON
from serving.http.settings import ServiceSettings
from serving.pages.paths import page_paths
from serving.scores.fleet import ALL_TIERS

_PROBLEM = "application/problem+json"
_WORDS = {
    "400": "The request cannot be read.",
    "401": "There is no token, or it is none of the service's.",
    "403": "The token lacks the scope.",
    "404": "There is no such node.",
    "408": "The body came too slowly.",
    "409": "It does not fit what the service has: newer scores, or no model.",
    "413": "The body is too large, or holds too many rows.",
    "415": "The media type or the encoding is not taken.",
    "421": "The request names another host than this service, which asks for no token.",
    "422": "The body can be read, and what it holds does not fit.",
    "429": "Too many requests of this token or address in a short time.",
    "500": "A fault of the service.",
    "503": "Not now: no scores, no model yet, or too much to do.",
}
_NUMBER_OR_NULL = {"type": ["number", "null"]}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_TIME = {"type": "string", "format": "date-time"}
_TIER = {"enum": list(ALL_TIERS)}
_RISK = {"type": ["number", "null"], "minimum": 0, "maximum": 1}
_MODEL = {
    "type": "object",
    "properties": {
        "digest": {"type": "string"},
        "profile": {"type": "string"},
        "version": {"type": ["string", "integer", "null"]},
    },
}
_FRAME = {
    "decision": {"type": "string"},
    "decision_time": _TIME,
    "issued_at": _TIME,
    "expires_at": {"type": ["string", "null"], "format": "date-time"},
    "expired": {"type": "boolean"},
    "age_s": {"type": "number"},
    "horizon_s": _NUMBER_OR_NULL,
    "model": _MODEL,
}
_UNIT = {
    "unit": {"type": "string"},
    "gpu": _TEXT_OR_NULL,
    "node": {"type": "string"},
    "slot": _TEXT_OR_NULL,
    "status": {"enum": ["ok", "unknown", "expired"]},
    "why_unknown": _TEXT_OR_NULL,
    "risk": _RISK,
    "risks": {"type": "object", "additionalProperties": {"type": "number"}},
    "score": _NUMBER_OR_NULL,
    "rank": {"type": ["integer", "null"]},
    "alert": {"type": "boolean"},
    "tier": _TIER,
    "decision_time": _TIME,
    "issued_at": _TIME,
    "expires_at": _TIME,
    "horizon_s": {"type": "number"},
    "model": _MODEL,
    "sample_age_s": _NUMBER_OR_NULL,
    "completeness": {"type": "number", "minimum": 0, "maximum": 1},
    "reasons": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "group": {"type": "string"},
                "share": {"type": "number"},
            },
        },
    },
    "last_known": {"type": "object", "properties": {"risk": _RISK, "tier": _TIER}},
    "scored": {"type": "boolean"},
}
_NODE = {
    "node": {"type": "string"},
    "tier": _TIER,
    "risk": _RISK,
    "counts": {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in ("known", "unknown", "expired")},
    },
}
_NODE_DETAIL = _NODE | {
    "expires_at": {"type": ["string", "null"], "format": "date-time"},
    "sample_age_s": _NUMBER_OR_NULL,
    "units": {"type": "array", "items": {"$ref": "#/components/schemas/Unit"}},
}
_VALUE = {"type": ["number", "string", "null"]}
_RECORDS = {"type": "array", "minItems": 1, "items": {"type": "object", "additionalProperties": _VALUE}}
_NAMES = {"type": "array", "minItems": 1, "items": {"type": "string"}}


def document(settings: ServiceSettings) -> dict[str, Any]:
    """Return the document of the API's port (the extender's protocol is Kubernetes' own)."""
    try:
        number = version("predrain")
    except PackageNotFoundError:  # run from a checkout that is not installed
        number = "0"
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "predrain",
            "version": number,
            "description": "Which GPUs are about to fail: risks by node, with reasons and until when they hold.",
        },
        "security": [{"token": []}, {}],
        "components": {
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": "predrain"},
            },
            "schemas": {
                "Unit": _object(_UNIT, "unit", "status", "risk", "tier"),
                "Node": _object(_NODE, *_NODE),
                "NodeDetail": _object(_NODE_DETAIL | {"scored": {"type": "boolean"}}, *_NODE_DETAIL),
                "Problem": _object(
                    {
                        "type": {"type": "string"},
                        "title": {"type": "string"},
                        "status": {"type": "integer"},
                        "detail": {"type": "string"},
                    },
                    "type",
                    "title",
                    "status",
                    "detail",
                ),
                "Prediction": _object(
                    {
                        "unit": {"type": "string"},
                        "risk": {"type": "number", "minimum": 0, "maximum": 1},
                        "score": {"type": "number"},
                        "rank": {"type": "integer", "minimum": 1},
                        "alert": {"type": "boolean"},
                        "reasons": _UNIT["reasons"],
                    },
                    "unit",
                    "risk",
                    "score",
                    "rank",
                    "alert",
                ),
            },
        },
        "paths": _paths(settings) | page_paths(),
    }


def _paths(settings: ServiceSettings) -> dict[str, Any]:
    text = {"text/plain": {"schema": {"type": "string"}}}
    return {
        "/healthz": {"get": _open("Tell whether the process lives.", text)},
        "/readyz": {
            "get": _open(
                "Tell whether it can be asked: scores that hold, and the model if there is to be one.",
                _json(
                    _object(
                        {"status": {"const": "ready"}, "warnings": {"type": "array", "items": {"type": "string"}}},
                        "status",
                        "warnings",
                    )
                ),
                "503",
            )
        },
        "/metrics": {"get": _operation("Give the service's numbers to Prometheus.", text)},
        "/openapi.json": {"get": _open("Give this document.", _json({"type": "object"}), "429", "503")},
        "/v1/nodes": {
            "get": _operation(
                "List nodes, the riskiest first unless asked otherwise.",
                _json(
                    _object(
                        _FRAME
                        | {
                            "total": {"type": "integer"},
                            "offset": {"type": "integer"},
                            "next": _TEXT_OR_NULL,
                            "nodes": {"type": "array", "items": {"$ref": "#/components/schemas/Node"}},
                        },
                        "decision",
                        "total",
                        "nodes",
                        "next",
                    )
                ),
                "400",
                "409",
                "503",
                parameters=_page_parameters(settings),
            )
        },
        "/v1/nodes/{node}": {
            "get": _operation(
                "Tell a node's risk, its GPUs and why.",
                _json({"allOf": [_object(_FRAME), {"$ref": "#/components/schemas/NodeDetail"}]}),
                "400",
                "404",
                "503",
                parameters=[
                    {
                        "name": "node",
                        "in": "path",
                        "required": True,
                        "schema": {"type": "string", "minLength": 1},
                    }
                ],
            )
        },
        "/v1/predict": {
            "post": _operation(
                "Tell the risk of nodes or GPUs by name, or of feature rows.",
                _json(
                    _object(
                        _FRAME
                        | {
                            "nodes": {"type": "array", "items": {"$ref": "#/components/schemas/NodeDetail"}},
                            "gpus": {"type": "array", "items": {"$ref": "#/components/schemas/Unit"}},
                            "predictions": {"type": "array", "items": {"$ref": "#/components/schemas/Prediction"}},
                        },
                        "model",
                        "issued_at",
                    )
                ),
                *("400", "408", "409", "413", "415", "422", "503"),
                parameters=[_query("reasons", {"type": "integer", "minimum": 0, "maximum": 10, "default": 0})],
                body=_json(
                    {
                        "oneOf": [
                            _object({"nodes": _NAMES | {"maxItems": settings.rows}}, "nodes", closed=True),
                            _object({"gpus": _NAMES | {"maxItems": settings.rows}}, "gpus", closed=True),
                            _object({"rows": _RECORDS | {"maxItems": settings.rows}}, "rows", closed=True),
                        ]
                    }
                )
                | {ARROW: {"schema": {"type": "string", "format": "binary"}}},
            )
        },
        "/ping": {"get": _open("Tell whether the model is there (MLflow's protocol).", text, "409", "503")},
        "/invocations": {
            "post": _operation(
                "Score feature rows in MLflow's protocol.",
                _json(
                    _object(
                        {
                            "predictions": {
                                "type": "array",
                                "items": {"$ref": "#/components/schemas/Prediction"},
                            }
                        },
                        "predictions",
                    )
                ),
                *("400", "408", "409", "413", "415", "422", "503"),
                body=_json(
                    {
                        "oneOf": [
                            _object({"dataframe_split": _split(settings)}, "dataframe_split"),
                            _object({"dataframe_records": _RECORDS}, "dataframe_records"),
                            _object({"instances": _RECORDS}, "instances"),
                            _object(
                                {
                                    "inputs": {
                                        "oneOf": [
                                            _RECORDS,
                                            {
                                                "type": "object",
                                                "additionalProperties": {"type": "array", "items": _VALUE},
                                            },
                                        ]
                                    }
                                },
                                "inputs",
                            ),
                        ]
                    }
                ),
            )
        },
    }


def _page_parameters(settings: ServiceSettings) -> list[dict[str, Any]]:
    return [
        _query("sort", {"enum": list(SORTS), "default": SORTS[0]}),
        _query("tier", {"type": "array", "items": _TIER}),
        _query("offset", {"type": "integer", "minimum": 0, "maximum": 10**9, "default": 0}),
        _query("limit", {"type": "integer", "minimum": 1, "maximum": settings.page, "default": 100}),
        _query("decision", {"type": "string"}),
    ]


def _split(settings: ServiceSettings) -> dict[str, Any]:
    data = {"type": "array", "minItems": 1, "maxItems": settings.rows, "items": {"type": "array", "items": _VALUE}}
    columns = {"type": "array", "items": {"type": "string"}}
    return _object({"columns": columns, "data": data, "index": {"type": "array"}}, "columns", "data", closed=True)


def _object(properties: Mapping[str, Any], *required: str, closed: bool = False) -> dict[str, Any]:
    shape: dict[str, Any] = {"type": "object", "properties": dict(properties)}
    if required:
        shape["required"] = list(required)
    return shape | {"additionalProperties": False} if closed else shape


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {JSON: {"schema": schema}}


def _query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _open(summary: str, content: dict[str, Any], *refusals: str) -> dict[str, Any]:
    return _answers(summary, content, *refusals) | {"security": []}


def _operation(
    summary: str,
    content: dict[str, Any],
    *refusals: str,
    parameters: list[dict[str, Any]] | None = None,
    body: dict[str, Any] | None = None,
) -> dict[str, Any]:
    operation = _answers(summary, content, *sorted({*refusals, "401", "403", "429", "503"}))
    if parameters is not None:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {"required": True, "content": body}
    return operation


def _answers(summary: str, content: dict[str, Any], *refusals: str) -> dict[str, Any]:
    problem = {_PROBLEM: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    refused = {status: {"description": _WORDS[status], "content": problem} for status in (*refusals, "421", "500")}
    return {"summary": summary, "responses": {"200": {"description": "Done.", "content": content}, **refused}}
