"""The base of every settings model, ranges of its fields, and files of settings."""

import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from foundation.durations import Duration
from foundation.errors import InputError
from foundation.text import nearest_hint
from foundation.yaml import read_yaml


class Section(BaseModel):
    """Base of every section of params.yaml: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
PositiveTime = Annotated[Duration, Field(gt=timedelta(0))]
NonNegativeTime = Annotated[Duration, Field(ge=timedelta(0))]


_SectionT = TypeVar("_SectionT", bound=Section)
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")  # of models, of dataclasses


def settings_content(path: Path, what: str = "mapping") -> Any:
    """Read a YAML file as it is; ``InputError`` if it is missing, or no YAML."""
    if not path.is_file():
        raise InputError(f"the {what} file does not exist", str(path), "Give the path of a YAML file.")
    try:
        return read_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"the {what} file is not valid YAML: {error}", str(path), "Correct the file.") from error
    except OSError as error:
        raise InputError(f"the {what} file cannot be read: {error}", str(path), "Make it readable.") from error


def read_settings(path: Path, model: type[_SectionT], what: str = "mapping") -> _SectionT:
    """Read and check a YAML file of one kind; ``what`` names the kind in errors.

    Raises ``InputError`` if the file is missing, is no YAML, or has an unknown key or a wrong value; the nearest valid
    key is named.
    """
    content = settings_content(path, what)
    try:
        return model.model_validate({} if content is None else content)
    except ValidationError as error:
        place, problem, do = first_problem(error, model)
        raise InputError(f"{what}: {problem}", f"{path}, {place or 'top level'}", do or "Correct the value.") from error


def first_problem(error: ValidationError, kind: Any) -> tuple[str, str, str]:
    """Return where the first problem of a value of ``kind`` is, what it is, and what to do where that is known."""
    # a misspelt key comes before the key that is missing for it
    first = min(error.errors(include_url=False), key=lambda problem: problem["type"] not in _UNKNOWN_KEY)
    place = ".".join(map(str, first["loc"]))
    if first["type"] in _UNKNOWN_KEY:
        *above, name = first["loc"]
        return place, "unknown key", nearest_hint(str(name), _fields(kind, above)) or "Remove the key."
    if first["type"] == "value_error":  # of a check of ours, which names the value
        return place, str(first["ctx"]["error"]), ""
    return place, f"{first['msg']} (value {first['input']!r:.200})", ""


def _fields(kind: Any, place: Sequence[int | str]) -> list[str]:
    """Return the keys at a place of a file; those of a list or mapping are its elements'."""
    for part in place:
        hints = _hints(kind)
        if part in hints:  # else an element, for which the name before it was
            inner = [hints[str(part)], *get_args(hints[str(part)])]
            kind = next((option for option in inner if _hints(option)), None)
    return list(_hints(kind))


def _hints(kind: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return get_type_hints(kind)
    model = isinstance(kind, type) and issubclass(kind, BaseModel)
    return {name: field.annotation for name, field in kind.model_fields.items()} if model else {}
