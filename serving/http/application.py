"""A FastAPI application as both ports have it: the same refusals, the same guard around it, a document of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Final

from fastapi import FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import APIKeyCookie, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.routing import Match

from serving.http.bodies import PROBLEM, shown, unknown_name
from serving.http.middleware import GRANT, Access
from serving.http.schemas import Problem
from serving.http.tokens import Grant
from telemetry.collect.remote_write.problems import Refused

MEANINGS: Final = {
    303: "The browser is sent elsewhere.",
    400: "The request cannot be read.",
    401: "There is no token, or it is none of the service's.",
    403: "The token lacks the scope, or another site sent the form.",
    404: "There is no such thing.",
    408: "The body came too slowly.",
    409: "It does not fit what the service has: newer scores, or no model.",
    413: "The body is too large, or holds too many rows.",
    415: "The media type or the encoding is not taken.",
    421: "The request names another host than this service, which asks for no token.",
    422: "The body can be read, and what it holds does not fit.",
    429: "Too many requests of this token or address in a short time.",
    500: "A fault of the service.",
    503: "Not now: no scores, no model yet, or too much to do.",
}
_BODY: Final = (400, 408, 409, 413, 415, 422, 503)
_READ: Final = (401, 403, 429, 503)

BEARER: Final = HTTPBearer(auto_error=False, scheme_name="token")
COOKIE: Final = APIKeyCookie(name="predrain", auto_error=False, scheme_name="session")


def problems(*statuses: int, media: str = PROBLEM) -> dict[int | str, dict[str, Any]]:
    """Describe refusals of a route; each may be 421 and 500 as well."""
    schema = {"$ref": "#/components/schemas/Problem"} if media == PROBLEM else {"type": "string"}
    return {
        status: {"description": MEANINGS[status]} | ({} if status == 303 else {"content": {media: {"schema": schema}}})
        for status in sorted({*statuses, 421, 500})
    }


def read_problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe refusals of a route that asks for a token."""
    return problems(*_READ, *statuses)


def body_problems() -> dict[int | str, dict[str, Any]]:
    """Describe refusals of a route that asks for a token and takes a large body."""
    return problems(*_READ, *_BODY)


async def may_read(request: Request, _: Annotated[Any, Security(BEARER)]) -> None:
    """Let a caller of the API in whose token has the scope ``read``."""
    _check(request)


async def may_read_page(
    request: Request, _: Annotated[Any, Security(BEARER)], __: Annotated[Any, Security(COOKIE)]
) -> None:
    """Let somebody with a browser in, by token or by cookie."""
    _check(request)


def _check(request: Request) -> None:
    if not request.app.state.access.guarded:
        return
    grant: Grant | None = request.scope[GRANT]
    if grant is None:
        raise Refused(401, "send one of the service's tokens: `Authorization: Bearer TOKEN`", "token")
    if not grant.covers("read"):
        raise Refused(403, "this token lacks the scope read", "scope")


def make_application(access: Access) -> FastAPI:
    """Make an application without routes, whose refusals ``access`` writes.

    Its document is :func:`describe`'s, which a route of the service serves; FastAPI's own pages load from elsewhere.
    """
    app = FastAPI(title="predrain", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.access = access

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return access.refusal(request, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return access.refusal(request, _of_validation(request, error.errors()[0]))

    @app.exception_handler(HTTPException)
    async def unmatched(request: Request, error: HTTPException) -> Response:
        if error.status_code != 405:
            detail = "there is nothing here: /openapi.json lists what there is"
            return access.refusal(request, Refused(404, detail, "path"))
        methods = _methods(app, request)
        response = access.refusal(request, Refused(405, f"send {' or '.join(methods)}", "method"))
        response.headers["Allow"] = ", ".join(methods)
        return response

    return app


def problem_response(_: Request, refused: Refused) -> Response:
    """Write a refusal as a problem body (RFC 9457)."""
    headers = refused.headers()
    return Response(refused.body(), refused.status, media_type=headers.pop("Content-Type"), headers=headers)


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an application."""
    if app.openapi_schema is None:
        try:
            app.version = version("predrain")
        except PackageNotFoundError:  # run from a checkout that is not installed
            app.version = "0"
        app.description = "Which GPUs are about to fail: risks by node, with reasons and until when they hold."
        document = app.openapi()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas["Problem"] = Problem.model_json_schema()
        for name in ("HTTPValidationError", "ValidationError"):  # refusals are problems
            schemas.pop(name, None)
        for operation in (entry for methods in document["paths"].values() for entry in methods.values()):
            content = operation["responses"].get("422", {}).get("content", {})
            if "HTTPValidationError" in str(content):
                del operation["responses"]["422"]
    schema: dict[str, Any] = app.openapi()
    return schema


def routes_of(app: FastAPI) -> Iterable[APIRoute]:
    """List an application's routes."""
    return (route for route in app.routes if isinstance(route, APIRoute))


def _methods(app: FastAPI, request: Request) -> list[str]:
    methods: set[str] = set()
    for route in routes_of(app):
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return [*(["HEAD"] if "GET" in methods else []), *sorted(methods)]


def _of_validation(request: Request, error: Any) -> Refused:
    """Say in words what a parameter should have been."""
    where, name, kind, context = error["loc"][0], str(error["loc"][1]), error["type"], error.get("ctx", {})
    if where == "path":
        return Refused(404, "there is nothing here: /openapi.json lists what there is", "path")
    value = error.get("input")
    if kind == "extra_forbidden":
        known = [
            parameter["name"]
            for route in routes_of(request.app)
            if route is request.scope.get("route")
            for parameter in _parameters(request.app, route)
        ]
        return Refused(400, unknown_name(name, known, "query parameter"), "invalid")
    if kind in ("literal_error", "enum"):
        known = [part.strip("'\" ") for part in str(context["expected"]).replace(" or ", ", ").split(",")]
        return Refused(400, unknown_name(str(value), known, name), "invalid")
    bounds = _bounds(request, name)
    if bounds is not None:
        least, most = bounds
        return Refused(400, f"{name} is {shown(value)}: give a whole number from {least} to {most}", "invalid")
    if kind == "string_too_long":
        return Refused(400, f"{name} is longer than {context['max_length']} characters", "invalid")
    return Refused(400, f"{name} is {shown(value)}: {error['msg']}", "invalid")


def _parameters(app: FastAPI, route: APIRoute) -> list[dict[str, Any]]:
    operation = describe(app)["paths"].get(route.path_format, {}).get(next(iter(route.methods or {"GET"})).lower(), {})
    return [parameter for parameter in operation.get("parameters", []) if parameter["in"] == "query"]


def _bounds(request: Request, name: str) -> tuple[int, int] | None:
    for parameter in _parameters(request.app, request.scope["route"]):
        schema = parameter["schema"]
        if parameter["name"] == name and {"minimum", "maximum"} <= schema.keys():
            return schema["minimum"], schema["maximum"]
    return None


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    ``open``: answered without a token.
    ``parameters``: Name, where, what it takes.
    ``bodies``, ``answers``: media type or status, description, and the shape as JSON.
    """

    method: str
    path: str
    summary: str
    open: bool
    parameters: list[tuple[str, str, str]]
    bodies: list[tuple[str, str]]
    answers: list[tuple[str, str, str]]

    @property
    def key(self) -> str:
        """Name within the page."""
        return f"{self.method.lower()}{self.path}".replace("/", "-").replace("{", "").replace("}", "").rstrip("-")


def operations_of(document: Mapping[str, Any]) -> list[Operation]:
    """List a document's operations in its order."""
    operations = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            bodies = operation.get("requestBody", {}).get("content", {})
            operations.append(
                Operation(
                    method.upper(),
                    path,
                    operation["summary"],
                    not operation.get("security"),
                    [(one["name"], one["in"], _short(one["schema"])) for one in operation.get("parameters", [])],
                    [(media, _shape(content)) for media, content in bodies.items()],
                    [_answer(status, one) for status, one in operation["responses"].items()],
                )
            )
    return operations


def _answer(status: str, answer: Mapping[str, Any]) -> tuple[str, str, str]:
    shapes = [_shape(content) for content in answer.get("content", {}).values()] if status == "200" else []
    return status, answer["description"], "\n".join(shape for shape in shapes if shape)


def _shape(content: Mapping[str, Any]) -> str:
    schema = content.get("schema")
    return json.dumps(schema, indent=1, ensure_ascii=False) if schema and schema != {"type": "string"} else ""


def _short(schema: Mapping[str, Any]) -> str:
    """Say in a line what a parameter takes."""
    if "enum" in schema:
        words = ", ".join(map(str, schema["enum"]))
        return f"one of {words}" + _usual(schema)
    if schema.get("type") == "array":
        return f"any number of: {_short(schema['items'])}"
    limits = [
        f"from {schema['minimum']}" if "minimum" in schema else "",
        f"to {schema['maximum']}" if "maximum" in schema else "",
    ]
    return " ".join([str(schema.get("type", "")), *filter(None, limits)]) + _usual(schema)


def _usual(schema: Mapping[str, Any]) -> str:
    return f"; default {schema['default']}" if "default" in schema else ""
