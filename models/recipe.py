"""How a learner is made from its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

THREADS = 1
"""Threads of one learner. More make a sum's order, and so its last bit, depend on the machine; and where other
programs use the cores, OpenMP's waiting threads slow a small fit twentyfold. ``fit_all`` fits several
learners at once instead."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A learner's settings and its maker.

    ``defaults``: settings the learner is made with unless they are overridden.
    ``build``: from a seed below 2**31 and all settings to an unfitted scikit-learn classifier.
    ``more``: further settings that may be overridden; the library's own default holds until they are.
    """

    defaults: Mapping[str, Any]
    build: Callable[[int, dict[str, Any]], Any]
    more: tuple[str, ...] = ()
