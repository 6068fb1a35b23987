"""The report's section on settings that were searched: what was chosen, and how much better it was."""

from __future__ import annotations

from models.evaluation import Evaluation
from models.searched import search_facts, settings_in_words
from pipeline.report.context import ReportContext
from pipeline.report.sections import Section
from pipeline.report.tables import Cell, Table
from pipeline.report.wording import count, number


def searched(_evaluation: Evaluation, context: ReportContext) -> Section | None:
    """Make the section; None where no settings were searched."""
    found = search_facts(context.extras.get("search"))
    if not found:
        return None
    rows = tuple(
        (
            Cell(learner),
            Cell(settings_in_words(facts["settings"]), "as given" if facts["settings"] == facts["given"] else ""),
            Cell(count(facts["tried"])),
            Cell(count(facts["folds"])),
            Cell(number(facts["mean"], 4)),
            Cell(number(facts["given_mean"], 4)),
            Cell(facts["why"]),
        )
        for learner, facts in found.items()
    )
    table = Table(
        "The settings that each learner was fitted with (what is not named is its default), and the mean average "
        "precision of these and of the given ones over the folds.",
        ("learner", "settings", "tried", "folds", "average precision", "of the given", "why"),
        rows,
        words=frozenset({0, 1, 6}),
    )
    return Section(
        key="searched",
        name="Settings",
        title="Settings that were searched",
        before=(
            "Settings of the learners were tried on time-ordered folds of the history before the first test, and what "
            "was chosen served all refits. The given settings stay unless another's gain is larger than its standard "
            "error: with few incidents the best of many trials is better by luck.",
        ),
        tables=(table,),
        after=("Every trial stands in evaluation/extra_search.parquet.",),
    )
