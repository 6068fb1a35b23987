"""Whether each run of the null check came out as it must, in a word for programs and in a line for people."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.null.finding import CAPTURE, Outcome
from benchmarks.null.trace import beyond_honest

AT_CHANCE = ("shuffled", "independent", "real shuffled")
"""Runs in which nothing may be found."""

REAL = "real"
"""The run in which something may be found, but no more than is known from outside."""


def passed(outcomes: Mapping[str, Outcome]) -> dict[str, bool]:
    """Tell of each run whether it came out as it must: at chance, found, or within what is known."""
    return {
        name: not beyond_honest(each) if name == REAL else (not each.above) == (name in AT_CHANCE)
        for name, each in outcomes.items()
    }


def line(name: str, outcome: Outcome, good: bool) -> str:
    """Say what a run found and whether that is as it must be."""
    if name == REAL:
        auc, capture = (
            max(each.value for each in outcome.findings if each.measure == wanted) for wanted in ("roc_auc", CAPTURE)
        )
        found = f"highest ROC-AUC {auc:.2f}, highest capture in the top 5 % {100 * capture:.1f} %"
        verdict = "within what is known from outside" if good else "MORE than is known from outside"
    else:
        found = f"{len(outcome.above)} of {len(outcome.findings)} measures above chance"
        verdict = "as it must" if good else "WRONG"
    return f"{name}: {outcome.incidents} incidents tested, {found}: {verdict}"
