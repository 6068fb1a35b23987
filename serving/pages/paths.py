"""The pages as the OpenAPI document describes them."""

from __future__ import annotations

from typing import Any, Final

from serving.pages.query import PAGE_SIZES, PAGE_SORTS, SHOWN
from serving.scores.fleet import ALL_TIERS

_HTML: Final = {"text/html": {"schema": {"type": "string"}}}
_TEXT: Final = {"type": "string", "maxLength": 200}
_SESSION: Final[list[dict[str, list[str]]]] = [{"token": []}, {"session": []}, {}]
_WORDS: Final = {
    "303": "The browser is sent elsewhere.",
    "400": "The request cannot be read.",
    "403": "The token lacks the scope, or another site sent the form.",
    "404": "There is no such thing.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "415": "The media type is not taken.",
    "422": "The form has fields that are not known.",
    "429": "Too many requests in a short time.",
    "500": "A fault of the service.",
    "503": "Not now: no scores, or too much to do.",
}


def page_paths() -> dict[str, Any]:
    """Return the paths of the pages; refusals are pages, too."""
    fleet = [
        _query("show", {"enum": list(SHOWN), "default": SHOWN[0]}),
        _query("q", _TEXT),
        _query("tier", {"type": "array", "items": {"enum": list(ALL_TIERS)}}),
        _query("rack", _TEXT),
        _query("group", _TEXT),
        _query("sort", {"enum": list(PAGE_SORTS), "default": PAGE_SORTS[0]}),
        _query("offset", {"type": "integer", "minimum": 0, "maximum": 10**7, "default": 0}),
        _query("limit", {"enum": list(PAGE_SIZES), "default": 100}),
    ]
    return {
        "/": {"get": _read("Show who is at risk.", *fleet)},
        "/nodes/{node}": {"get": _read("Show a node, its GPUs and why.", _path("node"))},
        "/gpus/{gpu}": {"get": _read("Show a GPU: why, earlier scores, channels, outcomes.", _path("gpu"))},
        "/outcomes": {"get": _read("Show what came of the alerts of the last 30 days.")},
        "/ledger": {"get": _read("Show what a controller decided, of all nodes or one.", _query("node", _TEXT))},
        "/docs": {"get": _page("Show this document to people.")},
        "/page/decision": {
            "get": _read("Tell which decision is shown, for the pages' script.")
            | {"responses": _answers({"application/json": {"schema": _DECISION}}, *_READ)}
        },
        "/page/{file}": {
            "get": _page("Give the pages' style, script and icon.", _path("file"), _query("v", _TEXT))
            | {
                "responses": _answers(
                    {
                        media: {"schema": {"type": "string"}}
                        for media in ("text/css", "text/javascript", "image/svg+xml")
                    },
                    *("400", "404", "429", "503"),
                )
            }
        },
        "/login": {
            "get": _page("Ask for a token.", _query("next", {"type": "string"}), refusals=("303", "400", "429", "503")),
            "post": _form(
                "Begin a session of 12 hours.", {name: {"type": "string"} for name in ("token", "next", "user")}
            ),
        },
        "/logout": {"post": _form("End the session.", {})},
    }


_DECISION: Final = {"type": "object", "properties": {"decision": {"type": "string"}}, "required": ["decision"]}
_READ: Final = ("303", "400", "403", "404", "429", "503")


def _read(summary: str, *parameters: dict[str, Any]) -> dict[str, Any]:
    return _page(summary, *parameters, refusals=_READ) | {"security": _SESSION}


def _page(
    summary: str, *parameters: dict[str, Any], refusals: tuple[str, ...] = ("400", "429", "503")
) -> dict[str, Any]:
    operation = {"summary": summary, "tags": ["pages"], "security": [], "responses": _answers(_HTML, *refusals)}
    return operation | {"parameters": list(parameters)} if parameters else operation


def _form(summary: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "summary": summary,
        "tags": ["pages"],
        "security": [],
        "requestBody": {
            "required": bool(fields),
            "content": {
                "application/x-www-form-urlencoded": {
                    "schema": {"type": "object", "properties": fields, "additionalProperties": False}
                }
            },
        },
        "responses": _answers(None, "303", "400", "403", "408", "413", "415", "422", "429", "503"),
    }


def _answers(content: dict[str, Any] | None, *refusals: str) -> dict[str, Any]:
    found: dict[str, Any] = {} if content is None else {"200": {"description": "Done.", "content": content}}
    for status in (*refusals, "500"):
        found[status] = {"description": _WORDS[status]} | ({} if status == "303" else {"content": _HTML})
    return found


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}
