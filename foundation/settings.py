"""The base of every settings model, and files of settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from foundation.errors import InputError
from foundation.text import nearest_hint
from foundation.yaml import read_yaml


class Section(BaseModel):
    """Base of every section of params.yaml: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


_SectionT = TypeVar("_SectionT", bound=Section)


def settings_content(path: Path, what: str = "mapping") -> Any:
    """Read a YAML file as it is; ``InputError`` if it is missing, or no YAML."""
    if not path.is_file():
        raise InputError(f"the {what} file does not exist", str(path), "Give the path of a YAML file.")
    try:
        return read_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"the {what} file is not valid YAML: {error}", str(path), "Correct the file.") from error


def read_settings(path: Path, model: type[_SectionT], what: str = "mapping") -> _SectionT:
    """Read and check a YAML file of one kind; ``what`` names the kind in errors.

    Raises ``InputError`` if the file is missing, is no YAML, or has an unknown key or a wrong value; the nearest valid
    key is named.
    """
    content = settings_content(path, what)
    try:
        return model.model_validate({} if content is None else content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "top level"
        do = "Correct the value."
        if first["type"] == "extra_forbidden":
            do = nearest_hint(str(first["loc"][-1]), _fields(model, first["loc"][:-1])) or "Remove the key."
        raise InputError(f"{what}: {first['msg']} (value {first['input']!r})", f"{path}, {place}", do) from error


def _fields(model: type[Section], place: Sequence[int | str]) -> list[str]:
    """Return the keys at a place of a file; those of a list are its elements'."""
    for part in place:
        if isinstance(part, int):  # in a list, whose element the name before it stood for
            continue
        annotation = model.model_fields[part].annotation
        annotation = next(iter(get_args(annotation)), annotation)
        if not (isinstance(annotation, type) and issubclass(annotation, Section)):
            return []
        model = annotation
    return list(model.model_fields)
