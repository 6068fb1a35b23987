"""Base class of settings models, field types with ranges, and reading of settings files."""

import dataclasses
import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from foundation.durations import Duration
from foundation.errors import InputError
from foundation.files import read_text
from foundation.text import nearest_hint
from foundation.yaml import read_yaml


class Section(BaseModel):
    """Base of every section of params.yaml: immutable, unknown keys rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
PositiveTime = Annotated[Duration, Field(gt=timedelta(0))]
NonNegativeTime = Annotated[Duration, Field(ge=timedelta(0))]


_SectionT = TypeVar("_SectionT", bound=Section)
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")  # of models, of dataclasses
_UNION_TAGS = ("function-", "literal[", "constrained-")  # parts of a location that name no key


def settings_content(path: Path, kind: str = "mapping") -> Any:
    """Read a YAML file without validation; raises ``InputError`` if it is missing or not YAML."""
    if not path.exists():
        raise InputError(f"the {kind} file does not exist", str(path), "Give the path of a YAML file.")
    try:
        return read_yaml(read_text(path))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"the {kind} file is not valid YAML: {error}", str(path), "Correct the file.") from error
    except OSError as error:
        raise InputError(f"the {kind} file cannot be read: {error}", str(path), "Make it readable.") from error


def read_settings(path: Path, model: type[_SectionT], kind: str = "mapping") -> _SectionT:
    """Read and validate a YAML file; ``kind`` names its kind in errors.

    Raises ``InputError`` if the file is missing or not YAML, or has an unknown key (with the closest valid one) or an
    invalid value.
    """
    content = settings_content(path, kind)
    try:
        return model.model_validate({} if content is None else content)
    except ValidationError as error:
        place, problem, advice = first_problem(error, model)
        raise InputError(
            f"{kind}: {problem}", f"{path}, {place or 'top level'}", advice or "Correct the value."
        ) from error


def first_problem(error: ValidationError, kind: Any) -> tuple[str, str, str]:
    """Return the location of the first problem of a value of ``kind``, the problem, and the fix if known."""
    # a misspelled key also causes a "missing" error: report the misspelling
    first = min(error.errors(include_url=False), key=lambda problem: problem["type"] not in _UNKNOWN_KEY)
    place = ".".join(part for part in map(str, first["loc"]) if not part.startswith(_UNION_TAGS))
    if first["type"] in _UNKNOWN_KEY:
        *parents, name = first["loc"]
        known = sorted(_fields(kind, parents))
        fallback = f"Valid keys: {', '.join(known)}." if known else "Remove the key."
        return place, "unknown key", nearest_hint(str(name), known, fallback)
    if first["type"] == "value_error":  # raised by our own validators, which name the value
        return place, str(first["ctx"]["error"]), ""
    choices = re.findall(r"'([^']+)'", str(first["ctx"]["expected"])) if first["type"] == "literal_error" else ()
    return place, f"{first['msg']} (value {first['input']!r:.200})", nearest_hint(first["input"], choices)


def _fields(kind: Any, place: Sequence[int | str]) -> list[str]:
    """Return the valid keys at a location; for a list or mapping, the keys of its elements."""
    for part in place:
        hints = _hints(kind)
        if part in hints:  # otherwise an index or key of the list or mapping named before it
            inner = [hints[str(part)], *get_args(hints[str(part)])]
            kind = next((option for option in inner if _hints(option)), None)
    return list(_hints(kind))


def _hints(kind: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return get_type_hints(kind)
    model = isinstance(kind, type) and issubclass(kind, BaseModel)
    return {name: field.annotation for name, field in kind.model_fields.items()} if model else {}
