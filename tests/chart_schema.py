"""The JSON schema of settings, from the program's own types: keys, and the values of settings that are a choice."""

import json
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from pipeline.params import Params
from scheduler.controller.settings import ActSettings
from tests.chart import CHART

SCHEMA = CHART / "values.schema.json"


def schema_of(kind: Any) -> dict[str, Any]:
    """Return what of a type a chart can check before anything is installed; an empty schema takes anything."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return schema_of(inner[0])
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        choices = [schema_of(option) for option in inner if option is not type(None)]
        if len(choices) != 1 or not choices[0]:
            return {}
        return {"anyOf": [choices[0], {"type": "null"}]} if type(None) in inner else choices[0]
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": ["object", "null"], "additionalProperties": schema_of(inner[1])} if schema_of(inner[1]) else {}
    if origin is not None and isinstance(origin, type) and issubclass(origin, Sequence):
        return {"items": schema_of(inner[0])} if schema_of(inner[0]) else {}
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        return _object({field.name: hints[field.name] for field in fields(kind) if field.init})
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return _object({name: field.rebuild_annotation() for name, field in kind.model_fields.items()})
    return {"type": ["boolean", "null"]} if kind is bool else {}


def _object(hints: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a section; null is what a chart leaves a value out with."""
    return {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {name: schema_of(hint) for name, hint in sorted(hints.items())},
    }


def settings_schemas() -> dict[str, dict[str, Any]]:
    """Return the definitions of the chart's schema that are made of the program's settings."""
    params = schema_of(Params)
    # One file serves scoring and the controller, which checks the rest of `policy`.
    params["properties"]["policy"]["additionalProperties"] = True
    return {"settings": schema_of(ActSettings), "params": params}


def write() -> None:
    """Bring the chart's schema up to date: python -m tests.chart_schema."""
    text = SCHEMA.read_text(encoding="utf-8")
    for name, schema in settings_schemas().items():
        # A definition of the program's has one line, in `definitions`, which come first.
        line = re.search(rf'^    "{name}": .*?(?=,?$)', text, re.MULTILINE)
        text = text[: line.start()] + f'    "{name}": {json.dumps(schema)}' + text[line.end() :]
    SCHEMA.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
