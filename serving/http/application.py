"""Creates the FastAPI applications of both ports: error responses as problem details (RFC 9457), token checks."""

from typing import Any, Final

from fastapi import Depends, FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.models import HTTPBase
from fastapi.routing import APIRoute
from fastapi.security.base import SecurityBase
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException

from foundation.server.problems import RequestRefused
from foundation.version import VERSION
from serving.http.bodies import PROBLEM, quoted, unknown_name
from serving.http.middleware import Access
from serving.http.schemas import Problem


class NameConvertor(Convertor[str]):
    """Path parameter for any name, including slashes and newlines, at which Starlette's ``path`` stops."""

    regex = "(?s:.+)"

    def convert(self, value: str) -> str:
        """Return the value unchanged."""
        return value

    def to_string(self, value: str) -> str:
        """Return the value unchanged."""
        return value


register_url_convertor("name", NameConvertor())

TEXT: Final[dict[str, Any]] = {"content": {"text/plain": {"schema": {"type": "string"}}}}
"""A plain-text response, for the OpenAPI document."""


class ReadAccess(SecurityBase):
    """Rejects callers whose token lacks the scope ``read``.

    The middleware has already looked up the token, because its limits depend on it (:mod:`serving.http.middleware`).
    """

    def __init__(self, scheme_name: str, scheme: str) -> None:
        self.scheme_name, self.model = scheme_name, HTTPBase(scheme=scheme)

    async def __call__(self, request: Request) -> None:
        """Check the token of a request."""
        grant = request.scope["grant"]
        if grant is None:
            raise RequestRefused(401, "send one of the service's tokens: `Authorization: Bearer TOKEN`", "token")
        if not grant.covers("read"):
            raise RequestRefused(403, "this token lacks the scope read", "scope")


TOKEN: Final = Security(ReadAccess("token", "bearer"))
PASSWORD: Final = Security(ReadAccess("password", "basic"))
"""Like :data:`TOKEN`, for pages: browsers send the token as a password (RFC 7617)."""


def refusals(media: str, schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """Describe error responses for the OpenAPI document."""
    content = {"content": {media: {"schema": schema}}}
    return {
        "4XX": {"description": "Request rejected", **content},
        "5XX": {"description": "Unavailable, or an internal error", **content},
    }


async def _refuse_parameters(request: Request) -> None:
    """Reject query parameters on routes that take none; other routes validate theirs with a model."""
    if not request.scope["query_string"] or request.scope["route"].dependant.query_params:
        return
    for name in request.query_params:
        raise RequestRefused(400, unknown_name(name, [], "query parameter"), "invalid")


def make_application(access: Access) -> FastAPI:
    """Create an application without routes; FastAPI's docs pages are disabled because they load files from a CDN."""
    app = FastAPI(
        title="predrain",
        version=VERSION,
        description="Failure risk of each GPU, by node, with reasons and expiry.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=refusals(PROBLEM, Problem.model_json_schema()),
        dependencies=[Depends(_refuse_parameters)],
    )

    @app.exception_handler(RequestRefused)
    async def refused(request: Request, error: RequestRefused) -> Response:
        return access.refusal(request, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return access.refusal(request, _of_validation(request.scope["route"], error.errors()[0]))

    @app.exception_handler(HTTPException)
    async def unmatched(request: Request, error: HTTPException) -> Response:
        if error.status_code != 405:
            return access.refusal(request, NOTHING_HERE)
        allowed = sorted((error.headers or {})["Allow"].split(", "))
        methods = [*(["HEAD"] if "GET" in allowed else []), *allowed]
        response = access.refusal(request, RequestRefused(405, f"send {' or '.join(methods)}", "method"))
        response.headers["Allow"] = ", ".join(methods)
        return response

    return app


NOTHING_HERE: Final = RequestRefused(404, "not found: /openapi.json lists all paths", "path")


def problem_response(_: Request, refused: RequestRefused) -> Response:
    """Return an error as problem details (RFC 9457)."""
    headers = refused.headers()
    return Response(refused.body(), refused.status, media_type=headers.pop("Content-Type"), headers=headers)


def _of_validation(route: APIRoute, error: Any) -> RequestRefused:
    """Convert a validation error of FastAPI to a readable one."""
    name, kind, context = str(error["loc"][1]), error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        query = route.dependant.query_params[0].field_info.annotation
        known = [field.alias or key for key, field in getattr(query, "model_fields", {}).items()]
        return RequestRefused(400, unknown_name(name, known, "query parameter"), "invalid")
    if kind in ("literal_error", "enum"):
        choices = [part.strip("'\" ") for part in str(context["expected"]).replace(" or ", ", ").split(",")]
        return RequestRefused(400, unknown_name(str(error["input"]), choices, name), "invalid")
    return RequestRefused(400, f"{name} is {quoted(error.get('input'))}: {error['msg']}", "invalid")
