"""What the reasons of drains report as done: rules that make a repair of a resumed drain. A resume alone is none.

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
from typing import Annotated, Final, Literal

from pydantic import AfterValidator

from foundation.settings import Section
from telemetry.importing.mapping import read_mapping


def _without_case(pattern: re.Pattern[str]) -> re.Pattern[str]:
    return re.compile(pattern.pattern, re.IGNORECASE)


class ReasonRule(Section):
    """One rule; of ``code`` None is the type."""

    match: Annotated[re.Pattern[str], AfterValidator(_without_case)]
    type: Literal["repair", "replacement"]
    code: str | None = None


class ReasonRules(Section):
    """All rules; the first that matches decides."""

    reasons: tuple[ReasonRule, ...] = ()

    def of(self, reasons: Sequence[str]) -> tuple[ReasonRule, str] | None:
        """Return the rule for a drain's reasons, oldest first, and the reason that it matched; None for none."""
        for reason in reversed(reasons):
            for rule in self.reasons:
                if rule.match.search(reason):
                    return rule, reason
        return None


def _not_denied(choices: str) -> re.Pattern[str]:
    """Return an expression for any of the choices, but not after "no", "not" or "without" in the same clause."""
    return re.compile(rf"(?:^|[,;.])(?:(?!\b(?:no|not|without)\b)[^,;.])*?\b(?:{choices})\b")


# What is still to come ("needs RMA", "to be replaced") was not done when it was written; that the node is back says it
# was done since.
_REPLACED: Final = r"rma(?:'?e?d)?|replac(?:ed?|ing|ements?)|swap(?:ped)?|new gpu"
_REPAIRED: Final = r"repair(?:ed|s)?|re-?seat(?:ed)?|fixed|re-?cabled"
DEFAULT_RULES: Final = ReasonRules(
    reasons=(
        ReasonRule(match=_not_denied(_REPLACED), type="replacement"),
        ReasonRule(match=_not_denied(_REPAIRED), type="repair"),
    )
)
"""Rules where none are given."""


def load_reason_rules(path: Path | None) -> ReasonRules:
    """Read and check a file of rules; None gives :data:`DEFAULT_RULES`."""
    return DEFAULT_RULES if path is None else read_mapping(path, ReasonRules, "rules")
