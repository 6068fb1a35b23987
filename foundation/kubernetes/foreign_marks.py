"""Taints, labels, annotations and conditions of other tools on nodes: a catalogue in YAML, extended by settings."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Final, Literal

import yaml
from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from foundation.kubernetes.opt_out import is_set, is_unmanaged

Kind = Literal["taint", "label", "annotation", "condition"]
Meaning = Literal["opt_out", "planned", "leaving", "starting", "repair"]
RESTING: Final[Mapping[str, str]] = {
    "planned": "planned maintenance", "leaving": "its removal", "starting": "its start"
}  # fmt: skip
"""Meanings under which a node is out of service for a known reason, with the reason as reported."""

_MAX_KEYS: Final = 100_000
_SWITCHES: Final[Mapping[str, Callable[[str], bool]]] = {"on": is_set, "off": is_unmanaged}


@dataclass(frozen=True, slots=True)
class ForeignMark:
    """A taint, label, annotation or condition of another tool; ``foreign_marks.yaml`` documents the fields."""

    tool: str
    meaning: Meaning
    taint: str | None = None
    label: str | None = None
    annotation: str | None = None
    condition: str | None = None
    value: str = "*"
    code: str | None = None

    def __post_init__(self) -> None:
        if [self.taint, self.label, self.annotation, self.condition].count(None) != 3:
            raise ValueError(f"a foreign mark of {self.tool}: give one of taint, label, annotation and condition")

    @property
    def pattern(self) -> tuple[Kind, str]:
        """The kind, and the pattern of the key."""
        patterns: dict[Kind, str | None] = {
            "taint": self.taint, "label": self.label, "annotation": self.annotation, "condition": self.condition
        }  # fmt: skip
        return next((kind, pattern) for kind, pattern in patterns.items() if pattern is not None)

    def counts(self, value: str) -> bool:
        """Whether the marker counts with this value."""
        switch = _SWITCHES.get(self.value)
        return switch(value) if switch else any(fnmatchcase(value, pattern) for pattern in self.value.split("|"))


class ForeignMarks:
    """Markers of other tools, in order of precedence."""

    def __init__(self, marks: tuple[ForeignMark, ...]) -> None:
        self._marks = marks
        # The nodes of a fleet share their keys, about a hundred each: cache the keys that no marker matches.
        self._unclaimed: defaultdict[Kind, set[str]] = defaultdict(set)

    def on(self, present: Mapping[Kind, Mapping[str, str]]) -> list[ForeignMark]:
        """Return the markers present on a node, in the order of the catalogue."""
        matching: set[int] = set()
        for kind, values in present.items():
            for key in values.keys() - self._unclaimed[kind]:
                patterns = (mark.pattern for mark in self._marks)
                of_key = [i for i, (of, pattern) in enumerate(patterns) if of == kind and fnmatchcase(key, pattern)]
                if not of_key and len(self._unclaimed[kind]) < _MAX_KEYS:
                    self._unclaimed[kind].add(key)
                matching |= {index for index in of_key if self._marks[index].counts(values[key])}
        return [self._marks[index] for index in sorted(matching)]


@cache
def catalogue() -> tuple[ForeignMark, ...]:
    """Return the markers of known tools."""
    text = resources.files("foundation.kubernetes").joinpath("foreign_marks.yaml").read_text(encoding="utf-8")
    return TypeAdapter(tuple[ForeignMark, ...]).validate_python(yaml.safe_load(text), extra="forbid")
