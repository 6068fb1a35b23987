"""What other tools say on a node about what they do with it: a catalogue as data, which settings extend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Final, Literal

import yaml

from scheduler.ports.codec import object_of
from scheduler.ports.opt_out import is_set, is_unmanaged

Kind = Literal["taint", "label", "annotation"]
Meaning = Literal["opt_out", "planned", "leaving", "repair"]
RESTING: Final[Mapping[str, str]] = {"planned": "planned maintenance", "leaving": "its removal"}
"""Meanings of which a node is at rest, as reported."""

_MAX_KEYS: Final = 100_000
_SWITCHES: Final[Mapping[str, Callable[[str], bool]]] = {"on": is_set, "off": is_unmanaged}


@dataclass(frozen=True, slots=True)
class ForeignMark:
    """A taint, label or annotation of another tool; ``foreign_marks.yaml`` documents the fields."""

    tool: str
    meaning: Meaning
    taint: str | None = None
    label: str | None = None
    annotation: str | None = None
    value: str = "*"

    def __post_init__(self) -> None:
        if [self.taint, self.label, self.annotation].count(None) != 2:
            raise ValueError(f"a foreign mark of {self.tool}: give one of taint, label and annotation")

    @property
    def pattern(self) -> tuple[Kind, str]:
        """Of what kind it is, and the pattern of its key."""
        if self.taint is not None:
            return "taint", self.taint
        return ("label", self.label) if self.label is not None else ("annotation", self.annotation or "")

    def counts(self, value: str) -> bool:
        """Whether a value of it counts."""
        switch = _SWITCHES.get(self.value)
        return switch(value) if switch else any(fnmatchcase(value, pattern) for pattern in self.value.split("|"))


class ForeignMarks:
    """Marks of other tools, the first of which that stands on a node counts."""

    def __init__(self, marks: tuple[ForeignMark, ...]) -> None:
        self._marks = marks
        self._known: dict[tuple[Kind, str], tuple[int, ...]] = {}  # the nodes of a fleet have the same keys

    def on(self, present: Mapping[Kind, Mapping[str, str]]) -> list[ForeignMark]:
        """Return those that stand on a node, in the order of the catalogue."""
        standing = {
            index
            for kind, values in present.items()
            for key, value in values.items()
            for index in self._of((kind, key))
            if self._marks[index].counts(value)
        }
        return [self._marks[index] for index in sorted(standing)]

    def _of(self, key: tuple[Kind, str]) -> tuple[int, ...]:
        if key not in self._known:
            if len(self._known) >= _MAX_KEYS:
                self._known.clear()
            kinds = [(index, *mark.pattern) for index, mark in enumerate(self._marks)]
            self._known[key] = tuple(
                index for index, kind, pattern in kinds if kind == key[0] and fnmatchcase(key[1], pattern)
            )
        return self._known[key]


@cache
def catalogue() -> tuple[ForeignMark, ...]:
    """Return the marks of known tools."""
    text = resources.files("scheduler.ports").joinpath("foreign_marks.yaml").read_text(encoding="utf-8")
    return tuple(object_of(tuple[ForeignMark, ...], yaml.safe_load(text), "foreign_marks.yaml"))


def reference_page() -> str:
    """Return the page of docs/reference that lists the catalogue."""
    meanings = {
        "opt_out": "keeps every remediator off: predrain publishes nothing and removes its own marks",
        "planned": "maintenance, an upgrade or a reboot is under way: the node is at rest",
        "leaving": "the node is about to be removed or stopped: it is at rest",
        "repair": "the tool found a fault or repairs the node: it is out of service",
    }
    lines = [
        "# Marks of other tools on Kubernetes nodes", "",
        "What `predrain act --scheduler kubernetes` understands. Nothing new is put on such a node but the prediction,"
        " and predrain's cordon stays while a `planned`, `leaving` or `repair` mark stands. A node at rest counts"
        " neither as out of service nor as capacity. This page is made from `scheduler/ports/foreign_marks.yaml`; a"
        " test keeps it current. `kubernetes.foreign_marks` adds entries of the same form, which are asked first.", "",
        "| meaning | |", "|---|---|", *[f"| `{name}` | {text} |" for name, text in meanings.items()], "",
        "| tool | mark | value | meaning |", "|---|---|---|---|",
    ]  # fmt: skip
    for mark in catalogue():
        kind, key = mark.pattern
        value = mark.value.replace("|", ", ")
        lines.append(f"| {mark.tool} | {kind} `{key}` | `{value}` | {mark.meaning} |")
    return "\n".join(lines) + "\n"
