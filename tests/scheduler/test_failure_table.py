"""tests/failure-table.md names tests that exist, and each of its rows some."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tests" / "failure-table.md").read_text(encoding="utf-8")
NAMED_TEST = re.compile(r"`([a-z_/]+\.py)::(\w+)`")
NAMED = NAMED_TEST.findall(PAGE)
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and ".py::" in line]


def test_each_test_that_the_page_names_exists():
    assert len(NAMED) > 50
    missing = []
    for file, name in NAMED:
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        if not re.search(rf"^(def {name}\(|{name} = )", text, re.MULTILINE):
            missing.append(f"{file}::{name}")
    assert missing == []


def test_each_claim_of_the_readmes_safety_model_has_its_row():
    model = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Safety model")[2].partition("\n## ")[0]
    table = PAGE.partition("## The safety model of the README")[2]
    leads = re.findall(r"^- \*\*([^*]+)\.\*\*|^- \*\*([^*]+)\*\*", model, re.MULTILINE)
    words = [" ".join(lead).split()[0].strip("`").lower() for lead in leads]
    assert len(words) >= 6
    assert [word for word in words if word not in table.lower()] == []


def test_each_row_names_a_guard_and_tests():
    assert len(ROWS) > 30
    for row in ROWS:
        failure, guard, tests = (cell.strip() for cell in row.strip("|").split(" | "))
        assert failure
        assert guard
        assert NAMED_TEST.search(tests), failure
