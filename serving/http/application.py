"""A FastAPI application as both ports have it: the same refusals, lean routes, a document of its own."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import request_response

from foundation.server.problems import RequestRefused
from serving.http.bodies import PROBLEM, shown, unknown_name
from serving.http.metrics import predrain_version
from serving.http.middleware import Access
from serving.http.schemas import Problem

MEANINGS: Final = {
    400: "The request cannot be read.",
    401: "There is no token, or it is none of the service's.",
    403: "The token lacks the scope.",
    404: "There is no such thing.",
    408: "The body came too slowly.",
    409: "It does not fit what the service has: newer scores, or no model.",
    413: "The body is too large, or holds too many rows.",
    415: "The media type or the encoding is not taken.",
    421: "The request names another host than this service, which asks for no token.",
    422: "The body can be read, and what it holds does not fit.",
    500: "A fault of the service.",
    503: "Not now: no scores, no model yet, or too much to do.",
}
_BODY: Final = (400, 408, 409, 413, 415, 422, 503)
_READ: Final = (401, 403, 503)

_TOKEN: Final[list[dict[str, list[str]]]] = [{"token": []}]
_TOKEN_OR_PASSWORD: Final[list[dict[str, list[str]]]] = [{"token": []}, {"password": []}]
_SCHEMES: Final = {"token": {"type": "http", "scheme": "bearer"}, "password": {"type": "http", "scheme": "basic"}}


class LeanRoute(APIRoute):
    """A route without query parameters is called directly: FastAPI's own way takes a third of a look-up."""

    def __init__(self, path: str, endpoint: Any, **more: Any) -> None:
        super().__init__(path, endpoint, **more)
        if not self.dependant.query_params:
            self.app = request_response(self._call)

    async def _call(self, request: Request) -> Response:
        if request.scope["query_string"] and request.query_params:
            raise RequestRefused(400, unknown_name(next(iter(request.query_params)), [], "query parameter"), "invalid")
        values: dict[str, Any] = dict(request.path_params)
        if not all(values.values()):
            raise RequestRefused(404, "there is nothing here: /openapi.json lists what there is", "path")
        if self.dependant.request_param_name is not None:
            values[self.dependant.request_param_name] = request
        response: Response = await self.endpoint(**values)
        return response


def problems(*statuses: int, media: str = PROBLEM) -> dict[int | str, dict[str, Any]]:
    """Describe refusals of a route; each may be 421 and 500 as well."""
    schema = {"$ref": "#/components/schemas/Problem"} if media == PROBLEM else {"type": "string"}
    return {
        status: {"description": MEANINGS[status], "content": {media: {"schema": schema}}}
        for status in sorted({*statuses, 421, 500})
    }


def guarded(*statuses: int, body: dict[str, Any] | None = None, text: bool = False) -> dict[str, Any]:
    """Describe a route that asks for a token: its refusals, its body if it takes one, whether it answers text too."""
    extra = {"security": _TOKEN} | ({} if body is None else {"requestBody": body})
    plain: dict[int | str, Any] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}} if text else {}
    return {
        "responses": problems(*_READ, *(() if body is None else _BODY), *statuses) | plain,
        "openapi_extra": extra,
    }


def guarded_page() -> dict[str, Any]:
    """Describe a page that asks for a token, which a browser sends as a password."""
    return {"openapi_extra": {"security": _TOKEN_OR_PASSWORD}}


def make_application(access: Access) -> FastAPI:
    """Make an application without routes, whose refusals ``access`` writes.

    Its document is :func:`describe`'s, which a route of the service serves; FastAPI's own pages load from elsewhere.
    """
    app = FastAPI(title="predrain", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.router.route_class = LeanRoute

    @app.exception_handler(RequestRefused)
    async def refused(request: Request, error: RequestRefused) -> Response:
        return access.refusal(request, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return access.refusal(request, _of_validation(request.scope["route"], error.errors()[0]))

    @app.exception_handler(HTTPException)
    async def unmatched(request: Request, error: HTTPException) -> Response:
        if error.status_code != 405:
            detail = "there is nothing here: /openapi.json lists what there is"
            return access.refusal(request, RequestRefused(404, detail, "path"))
        allowed = sorted((error.headers or {})["Allow"].split(", "))
        methods = [*(["HEAD"] if "GET" in allowed else []), *allowed]
        response = access.refusal(request, RequestRefused(405, f"send {' or '.join(methods)}", "method"))
        response.headers["Allow"] = ", ".join(methods)
        return response

    return app


def problem_response(_: Request, refused: RequestRefused) -> Response:
    """Write a refusal as a problem body (RFC 9457)."""
    headers = refused.headers()
    return Response(refused.body(), refused.status, media_type=headers.pop("Content-Type"), headers=headers)


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an application."""
    if app.openapi_schema is None:
        app.version = predrain_version()
        app.description = "Which GPUs are about to fail: risks by node, with reasons and until when they hold."
        document = app.openapi()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas["Problem"] = Problem.model_json_schema()
        document["components"]["securitySchemes"] = _SCHEMES
        for name in ("HTTPValidationError", "ValidationError"):  # refusals are problems
            schemas.pop(name, None)
        for operation in (entry for methods in document["paths"].values() for entry in methods.values()):
            content = operation["responses"].get("422", {}).get("content", {})
            if "HTTPValidationError" in str(content):
                del operation["responses"]["422"]
    schema: dict[str, Any] = app.openapi()
    return schema


def _of_validation(route: APIRoute, error: Any) -> RequestRefused:
    """Say in words what a query parameter should have been."""
    name, kind, context = str(error["loc"][1]), error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        query = route.dependant.query_params[0].field_info.annotation
        known = [field.alias or key for key, field in getattr(query, "model_fields", {}).items()]
        return RequestRefused(400, unknown_name(name, known, "query parameter"), "invalid")
    if kind in ("literal_error", "enum"):
        choices = [part.strip("'\" ") for part in str(context["expected"]).replace(" or ", ", ").split(",")]
        return RequestRefused(400, unknown_name(str(error["input"]), choices, name), "invalid")
    return RequestRefused(400, f"{name} is {shown(error.get('input'))}: {error['msg']}", "invalid")
