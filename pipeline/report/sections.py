"""Further sections of the report: each made by one function from the evaluation and the context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evaluation.metrics.evaluation import Evaluation
from pipeline.report.context import ReportContext
from pipeline.report.tables import Table


@dataclass(frozen=True, slots=True)
class Section:
    """One section of the page.

    ``key``: its anchor: letters and dashes.
    ``name``: what the page's navigation calls it.
    ``before``: paragraphs before the tables, in plain words.
    """

    key: str
    name: str
    title: str
    before: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    after: tuple[str, ...] = ()


Maker = Callable[[Evaluation, ReportContext], Section | None]
"""Makes a section, or None where there is nothing to tell."""

# Makers import Section from here, so they are imported once it stands.
from pipeline.report.comparisons import combining  # noqa: E402
from pipeline.report.decisions import decisions  # noqa: E402
from pipeline.report.drift import what_changed  # noqa: E402

MAKERS: tuple[Maker, ...] = (decisions, combining, what_changed)
"""Sections in the order of the page."""


def sections(evaluation: Evaluation, context: ReportContext) -> list[Section]:
    """Give the sections that have something to tell."""
    made = [make(evaluation, context) for make in MAKERS]
    return [section for section in made if section is not None]
