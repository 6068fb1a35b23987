"""What the OpenAPI document says of telemetry: samples, events, and what became of them."""

from __future__ import annotations

from typing import Any, Final

_TEXT: Final = {"type": "string", "minLength": 1}
_TEXT_OR_NULL: Final = {"type": ["string", "null"]}
_TIME: Final = {"type": "string", "format": "date-time"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_FATES: Final = (
    *("rows", "stored", "late", "closed", "too_old", "ahead", "unknown", "values_nulled", "after_decision"),
)

ABSORBED: Final[dict[str, Any]] = {"type": "object", "properties": dict.fromkeys(_FATES, _COUNT)}
"""What became of samples, by the number of rows; ``after_decision`` where they were only asked about."""


def samples_schema(most: int) -> dict[str, Any]:
    """Describe a list of samples: keys, and any of the channels."""
    keys = {"timestamp": _TIME, "node": _TEXT, "gpu": _TEXT_OR_NULL, "mig_instance": _TEXT_OR_NULL}
    row = {
        "type": "object",
        "properties": keys | {"sample_count": {"type": ["integer", "null"]}},
        "required": ["timestamp", "node"],
        "additionalProperties": {"type": ["number", "null"]},
    }
    return {"type": "array", "minItems": 1, "maxItems": most, "items": row}


def telemetry_body(most: int) -> dict[str, Any]:
    """Describe the body of ``POST /v1/telemetry``."""
    names = ("node", "type", "source")
    event = {
        "type": "object",
        "properties": {"timestamp": _TIME, "known_at": _TIME | {"type": ["string", "null"]}}
        | dict.fromkeys(names, _TEXT)
        | dict.fromkeys(("gpu", "code", "detail", "pci_bus_id"), _TEXT_OR_NULL),
        "required": ["timestamp", *names],
        "additionalProperties": False,
    }
    events = {"type": "array", "minItems": 1, "maxItems": most, "items": event}
    samples = samples_schema(most)
    both = {
        "type": "object",
        "properties": {"samples": samples, "events": events},
        "minProperties": 1,
        "additionalProperties": False,
    }
    return {"anyOf": [both, samples, events]}


def telemetry_answer() -> dict[str, Any]:
    """Describe what is answered: what became of every row."""
    told = {"type": "object", "properties": dict.fromkeys(("rows", "added", "unknown"), _COUNT)}
    return {
        "type": "object",
        "properties": {"samples": ABSORBED, "events": told},
        "required": ["samples", "events"],
    }
