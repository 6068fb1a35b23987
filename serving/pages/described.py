"""The OpenAPI document in an order and in words that a person reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
    found = []
    for path, methods in document["paths"].items():
        for method, each in methods.items():
            bodies = each.get("requestBody", {}).get("content", {})
            found.append(
                Operation(
                    method.upper(),
                    path,
                    each["summary"],
                    not each.get("security"),
                    [(one["name"], one["in"], _short(one["schema"])) for one in each.get("parameters", [])],
                    [(media, _shape(content)) for media, content in bodies.items()],
                    [_answer(status, one) for status, one in each["responses"].items()],
                )
            )
    return found


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
