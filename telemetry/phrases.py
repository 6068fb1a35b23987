"""Classifies phrases about hardware (drain reasons, tickets, types of events) as types of events, in context.

The rules are those of ``phrases.yaml``, after those of a user. Slurm, tickets, imports and Kubernetes share them.
"""

import re
from collections import Counter
from collections.abc import Mapping
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, Field

from foundation.settings import Section
from foundation.yaml import read_yaml

CATALOGUE: Final = Path(__file__).with_name("phrases.yaml")
MAX_LENGTH: Final = 2_000  # characters
WORK: Final = frozenset({"repair", "replacement"})
"""Types that end an incident; words about the future do not make one."""

OTHER: Final = "other"
EventType = Literal["xid", "failure", "repair", "replacement", "driver", "diagnostic", "drain", "maintenance", "other"]
Source = Literal["ticket", "reason"]
_MAX_PHRASES: Final = 1_000
_WORD_GAPS: Final = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z]{3})(?=[A-Z][a-z])|[\s_]+")
_NUMBER: Final = re.compile(r"\d+")


def _without_case(pattern: re.Pattern[str]) -> re.Pattern[str]:
    return re.compile(pattern.pattern, re.IGNORECASE)


class PhraseRule(Section):
    """One rule of a user: ``match`` is searched anywhere in the text, without case; ``code`` defaults to the type."""

    match: Annotated[re.Pattern[str], AfterValidator(_without_case)]
    type: EventType
    code: Annotated[str, Field(min_length=1)] | None = None


class PhraseRules(Section):
    """Rules of a user, which go before the catalogue."""

    reasons: tuple[PhraseRule, ...] = ()

    def classify(self, text: str, source: Source) -> "Classification":
        """Return the type of a phrase; ``other`` where no rule is sure."""
        for rule in self.reasons:
            if rule.match.search(text):
                return Classification(rule.type, rule.code or rule.type, sure=True)
        return classify(text, source)


class Classification(NamedTuple):
    """``sure`` is False where no rule gave the type."""

    type: str
    code: str
    sure: bool


UNSURE: Final = Classification(OTHER, OTHER, sure=False)


class _Rule(NamedTuple):
    type: str
    match: re.Pattern[str]
    near: re.Pattern[str] | None
    only: str | None


class PhraseCatalogue:
    """The compiled phrases.yaml; ``content`` is what the file holds, for the page of the reference."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self._words: Mapping[str, str] = content["words"]
        compiled = {name: self.compile(content[name]) for name in ("clauses", "denied", "denied_after", "planned")}
        self._clauses, self._denied, self._denied_after, self._planned = compiled.values()
        self._done, self._false_alarm = self.compile(content["done"]), self.compile(content["false_alarm"])
        self._senses = [self.compile(sense["match"]) for sense in content["senses"]]
        self._precedence: list[str] = content["precedence"]

    def compile(self, written: str) -> re.Pattern[str]:
        """Compile a pattern in which ``{name}`` represents the words of that name."""
        for name, words in self._words.items():
            written = written.replace(f"{{{name}}}", words)
        return re.compile(written)

    @cached_property
    def _rules(self) -> list[_Rule]:
        return [
            _Rule(
                rule["type"],
                self.compile(rule["match"]),
                self.compile(rule["near"]) if "near" in rule else None,
                rule.get("only"),
            )
            for rule in self.content["rules"]
        ]

    def classify(self, text: str, source: Source) -> Classification:
        """Return the most telling type of all clauses."""
        plain = _WORD_GAPS.sub(" ", text[:MAX_LENGTH]).lower().replace("’", "'").strip()
        for sense in self._senses:
            plain = sense.sub(" ~ ", plain)
        false_alarm = self._false_alarm.search(plain) is not None
        types = {self._type_of(clause, source) for clause in self._clauses.split(plain)} - {None}
        if false_alarm:  # whatever was reported did not happen; work on it may have
            types = (types & WORK) | {OTHER}
        best = next((kind for kind in self._precedence if kind in types), None)
        return UNSURE if best is None else Classification(best, best, sure=True)

    def _type_of(self, clause: str, source: Source) -> str | None:
        for rule in self._rules:
            match = rule.match.search(clause) if rule.only in (None, source) else None
            if match is None or (rule.near is not None and not rule.near.search(clause)):
                continue
            if self._denied.search(clause, 0, match.start()) or self._denied_after.search(clause, match.end()):
                return None
            if rule.type in WORK and self._planned.search(clause) and not self._done.search(clause):
                return None
            return rule.type
        return None


@cache
def catalogue() -> PhraseCatalogue:
    """Return the catalogue of phrases.yaml."""
    return PhraseCatalogue(read_yaml(CATALOGUE.read_text(encoding="utf-8")))


@lru_cache(maxsize=20_000)
def classify(text: str, source: Source) -> Classification:
    """Return the type of a phrase by the catalogue alone."""
    return catalogue().classify(text, source)


@cache
def _hardware() -> re.Pattern[str]:
    return catalogue().compile(catalogue().content["hardware"])


def names_hardware(name: str) -> bool:
    """Whether the name of a condition or an event looks like one about a GPU, its links or its fabric."""
    return _hardware().search(name) is not None


class PhraseReview:
    """Distinct phrases and the type that each was given, for an operator to look through; numbers count as one."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, phrase: str, kind: str, number: int = 1) -> None:
        """Count a phrase; beyond a thousand distinct ones the rest is counted together."""
        key = (_NUMBER.sub("#", phrase.strip())[:200], kind)
        if key not in self._counts and len(self._counts) >= _MAX_PHRASES:
            key = ("(further phrases)", kind)
        self._counts[key] += number

    def rows(self) -> list[dict[str, Any]]:
        """Return ``phrase``, ``count`` and ``type``, the most frequent first."""
        return [
            {"phrase": phrase, "count": count, "type": kind} for (phrase, kind), count in self._counts.most_common()
        ]
