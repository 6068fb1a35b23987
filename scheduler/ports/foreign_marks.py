"""What other tools say on a node about what they do with it: a catalogue as data, which settings extend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from importlib import resources
from typing import Final, Literal

import yaml

from scheduler.ports.codec import object_of
from scheduler.ports.opt_out import is_set, is_unmanaged

Meaning = Literal["opt_out", "planned", "leaving", "repair"]
RESTING: Final[Mapping[str, str]] = {"planned": "planned maintenance", "leaving": "its removal"}
"""Meanings of which a node is at rest, as reported."""

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

    def is_on(self, labels: Mapping[str, str], annotations: Mapping[str, str], taints: Mapping[str, str]) -> str | None:
        """Return the key by which it stands on a node; None: it does not."""
        for pattern, present in ((self.taint, taints), (self.label, labels), (self.annotation, annotations)):
            if pattern is None:
                continue
            plain = not any(sign in pattern for sign in "*?[")
            keys: Iterable[str] = (pattern,) if plain else (key for key in present if _fits(key, pattern))
            for key in keys:
                if key in present and self._counts(present[key]):
                    return key
        return None

    def _counts(self, value: str) -> bool:
        switch = _SWITCHES.get(self.value)
        return switch(value) if switch else any(fnmatchcase(value, pattern) for pattern in self.value.split("|"))


@lru_cache(maxsize=65_536)
def _fits(key: str, pattern: str) -> bool:
    """Whether a key is of a pattern: nodes of a fleet have the same keys, and there are as many questions as nodes."""
    return fnmatchcase(key, pattern)


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
        kind = "taint" if mark.taint else "label" if mark.label else "annotation"
        key, value = mark.taint or mark.label or mark.annotation, mark.value.replace("|", ", ")
        lines.append(f"| {mark.tool} | {kind} `{key}` | `{value}` | {mark.meaning} |")
    return "\n".join(lines) + "\n"
