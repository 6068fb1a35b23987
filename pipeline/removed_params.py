"""Parameters that predrain no longer has under this name, each with the sentence that says what to do now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

_CALENDAR: Final = "Leave it out: models are refitted every training.refit_every, and the report says what drifted."
_SETTINGS: Final = "Leave it out, and give a learner's settings in models.settings."
_CHOICE: Final = "Leave it out: training.candidate_windows are compared by one small LightGBM model on one tail."

REMOVED: Final[dict[str, str]] = {
    "training.refit_on": _CALENDAR,
    "training.refit_at_most": _CALENDAR,
    "training.hard_negatives": "Leave it out: negatives are drawn at the times of the positives.",
    "training.margin": "Leave it out, and widen labels.horizon if failures are dated late.",
    "training.search": _SETTINGS,
    "training.judge": _CHOICE,
    "telemetry.late": "Leave it out: samples are taken however late they come.",
    "training.bins": "Leave it out: every fit finds its own bin edges.",
}
"""What to do instead, by the dotted name of a parameter."""

RENAMED: Final[dict[str, str]] = {
    "labels.coalesce": "labels.merge_window",
    "labels.quiet": "labels.cooldown",
    "training.span": "training.window",
    "training.spans": "training.candidate_windows",
    "models.promises": "models.precision_targets",
    "models.precision_targets.targets": "models.precision_targets.values",
    "policy.tiers": "policy.thresholds",
    "serving.least_completeness": "serving.min_completeness",
    "serving.explained": "serving.max_explained",
    "serving.reasons": "serving.max_reasons",
}
"""New names of parameters, by the old ones."""

_OBJECTIVE: Final = "Name lightgbm or xgboost: no other objective was measured to be better."

REMOVED_LEARNERS: Final[dict[str, str]] = dict.fromkeys(
    ("lightgbm_focal", "lightgbm_rank", "xgboost_rank", "lightgbm_hazard", "xgboost_hazard"), _OBJECTIVE
)
"""What to do instead, by the name of a learner; in any value or key under ``models``."""


def removed_in(params: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Find what was removed or renamed.

    ``params``: merged parameters, not validated.
    """
    for name, hint in REMOVED.items():
        path = tuple(name.split("."))
        if holds(params, path):
            yield path, f"the parameter {name} was removed", hint
    for name, new in RENAMED.items():
        path = tuple(name.split("."))
        if holds(params, path):
            yield path, f"the parameter {name} is now {new}", f"Write {new}."
    for path, value in _leaves(params.get("models"), ("models",)):
        if value in REMOVED_LEARNERS:
            yield path, f"the learner {value} was removed", REMOVED_LEARNERS[value]


def holds(params: Any, path: tuple[str, ...]) -> bool:
    """Tell whether parameters have a value at a path of keys."""
    for key in path:
        if not isinstance(params, Mapping) or key not in params:
            return False
        params = params[key]
    return True


def _leaves(value: Any, at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Give every string under a value, keys included, with the path of the mapping entry that holds it."""
    if isinstance(value, str):
        yield at, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield (*at, str(key)), str(key)
            yield from _leaves(inner, (*at, str(key)))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner, at)
