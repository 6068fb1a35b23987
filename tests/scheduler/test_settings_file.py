"""The settings that are shipped are read, and what they call a default is one."""

from __future__ import annotations

import re
from pathlib import Path

from policy.config import PolicyConfig
from scheduler.controller.settings import ControllerSettings, read_settings
from scheduler.evacuation.settings import EvacuationSettings

ROOT = Path(__file__).parents[2]


def test_the_shipped_settings_hold_the_defaults_but_for_what_they_say() -> None:
    given = read_settings(ROOT / "deploy" / "act" / "act.yaml")
    usual = PolicyConfig(given.policy.thresholds)
    assert given.policy.budget == usual.budget
    assert given.policy.worth == usual.worth
    assert given.policy.hysteresis == usual.hysteresis
    assert (given.policy.stages.ceiling, usual.stages.ceiling) == ("soft", "soft")
    assert given.controller == ControllerSettings()
    assert given.evacuation == EvacuationSettings()


def test_the_operators_page_names_files_that_are_there_and_the_stages_as_they_are() -> None:
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", page):
        assert (ROOT / "docs" / link).exists(), link
    stages = PolicyConfig(read_settings(ROOT / "deploy" / "act" / "act.yaml").policy.thresholds).stages
    for share in (stages.soft.promote_at, stages.hard.promote_at, stages.soft.demote_below, stages.hard.demote_below):
        assert f"{share:.0%}".replace("%", " %") in page
    assert f"fewer than {stages.least_outcomes} outcomes" in page.replace("\n", " ")


def test_a_budget_that_names_no_fleet_keeps_the_limits_of_the_fleet(tmp_path: Path) -> None:
    file = tmp_path / "act.yaml"
    file.write_text("policy: {budget: {floors: [{scope: cluster, most: 9}], rates: []}}")
    budget = read_settings(file).policy.budget
    assert [(each.scope, each.most_share) for each in budget.floors] == [("fleet", 0.10), ("cluster", None)]
    assert [(each.scope, each.most_share) for each in budget.rates] == [("fleet", 0.05)]
