"""The report says which settings a search chose, and why."""

from __future__ import annotations

from types import SimpleNamespace

from models.search import search_table
from pipeline.report.searched import searched
from pipeline.report.sections import MAKERS
from tests.models.test_searched import FOUND


def test_the_report_tells_what_was_chosen_for_each_learner():
    section = searched(None, SimpleNamespace(extras={"search": search_table(FOUND)}))
    [table] = section.tables
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["mlp", "epochs 20, hidden_layer_sizes (32, 16)", "3", "2", "0.4000", "0.2000", "trial 1 of mlp gains 0.2000"],
        ["logistic", "C 0.1", "0", "0", "–", "–", "settings of logistic stay: nothing to try"],
    ]
    assert [row[1].note for row in table.rows] == ["", "as given"]
    assert all(len(row) == len(table.header) for row in table.rows)
    assert "evaluation/extra_search.parquet" in section.after[0]


def test_without_a_search_there_is_no_section():
    assert searched in MAKERS
    assert searched(None, SimpleNamespace(extras={})) is None
