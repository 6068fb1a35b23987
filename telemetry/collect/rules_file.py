"""Reading the YAML files in which a user writes rules for a collector."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import ValidationError

from telemetry.config import Section
from telemetry.errors import InputError
from telemetry.importing.mapping import nearest_hint
from telemetry.yaml_text import read_yaml

M = TypeVar("M", bound=Section)


def read_rules(path: Path, model: type[M], rule: type[Section]) -> M:
    """Read and check a file of rules; ``rule`` is the model of one.

    Raises ``InputError`` if the file is missing, is no YAML, or has an unknown key or a wrong value.
    """
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
        return model.model_validate({} if content is None else content)
    except OSError as error:
        raise InputError(f"the rules cannot be read: {error.strerror}", str(path), "Give a YAML file.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"the rules are not valid YAML: {error}", str(path), "Correct the file.") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        do = "Correct the value."
        if first["type"] == "extra_forbidden":
            known = rule.model_fields if len(first["loc"]) > 1 else model.model_fields
            do = nearest_hint(str(first["loc"][-1]), list(known)) or "Remove the key."
        raise InputError(f"rules: {first['msg']} (value {first['input']!r})", f"{path}, {place}", do) from error
