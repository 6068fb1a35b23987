"""What the reasons of drains say was done: rules that make a repair of a resumed drain. A resume alone is none.

A YAML file::

    reasons:                      # the first rule that matches decides; matched anywhere, without case
      - match: "RMA|replaced|swapped"
        type: replacement         # repair or replacement
        code: gpu                 # of the event; default: the type
      - match: "reseat|repaired"
        type: repair
        code: reseat

Given rules replace the default ones. They are tried, when a node is resumed, on every reason that it had since it was
drained, the latest first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from pydantic import field_validator

from telemetry.collect.rules_file import read_rules
from telemetry.config import Section


class ReasonRule(Section):
    """One rule."""

    match: str
    """Regular expression, searched without case."""

    type: Literal["repair", "replacement"]
    """Type of the event."""

    code: str | None = None
    """Code of the event; None is its type."""

    @field_validator("match")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is no regular expression: {error}") from error
        return value


class ReasonRules(Section):
    """All rules, in their order."""

    reasons: tuple[ReasonRule, ...] = ()
    """The first that matches decides."""

    def of(self, reasons: Sequence[str]) -> tuple[ReasonRule, str] | None:
        """Return the rule for a drain's reasons, oldest first, and the reason that it matched; None for none."""
        for reason in reversed(reasons):
            for rule in self.reasons:
                if re.search(rule.match, reason, re.IGNORECASE):
                    return rule, reason
        return None


def _not_denied(words: str) -> str:
    """Return an expression for any of some words, but not after "no", "not" or "without" in the same clause."""
    return rf"(?:^|[,;.])(?:(?!\b(?:no|not|without)\b)[^,;.])*?\b(?:{words})\b"


# What is still to come ("needs RMA", "to be replaced") was not done when it was written; that the node is back says it
# was done since.
DEFAULT_RULES: Final = ReasonRules(
    reasons=(
        ReasonRule(
            match=_not_denied(r"rma(?:'?e?d)?|replac(?:ed?|ing|ements?)|swap(?:ped)?|new gpu"), type="replacement"
        ),
        ReasonRule(match=_not_denied(r"repair(?:ed|s)?|re-?seat(?:ed)?|fixed|re-?cabled"), type="repair"),
    )
)
"""Rules where none are given."""


def load_reason_rules(path: Path | None) -> ReasonRules:
    """Read and check a file of rules; None gives :data:`DEFAULT_RULES`."""
    return DEFAULT_RULES if path is None else read_rules(path, ReasonRules, ReasonRule)
