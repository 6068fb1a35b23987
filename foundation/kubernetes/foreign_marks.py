"""Taints, labels, annotations and conditions of other tools on nodes: a catalogue in YAML, extended by settings."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cache, lru_cache
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
        self._marks = [(*mark.pattern, mark) for mark in marks]
        # The nodes of a fleet share their keys, about a hundred each: cache the markers of each key, mostly none.
        self._of_key = lru_cache(_MAX_KEYS)(self._matching)

    def on(self, present: Mapping[Kind, Mapping[str, str]]) -> list[ForeignMark]:
        """Return the markers present on a node, in the order of the catalogue."""
        found = {
            place: mark
            for kind, values in present.items()
            for key, value in values.items()
            for place, mark in self._of_key(kind, key)
            if mark.counts(value)
        }
        return [found[place] for place in sorted(found)]

    def _matching(self, kind: Kind, key: str) -> list[tuple[int, ForeignMark]]:
        return [
            (place, mark)
            for place, (kind_of_mark, pattern, mark) in enumerate(self._marks)
            if kind_of_mark == kind and fnmatchcase(key, pattern)
        ]


@cache
def catalogue() -> tuple[ForeignMark, ...]:
    """Return the markers of known tools."""
    text = resources.files("foundation.kubernetes").joinpath("foreign_marks.yaml").read_text(encoding="utf-8")
    return TypeAdapter(tuple[ForeignMark, ...]).validate_python(yaml.safe_load(text), extra="forbid")
