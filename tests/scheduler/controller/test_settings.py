"""Settings are read, refused where wrong, and shipped with their defaults."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from foundation.errors import InputError
from policy.config import PolicyConfig
from policy.maintenance import MaintenanceWindow
from policy.stages import FIXED
from policy.tiers import TierThresholds
from scheduler.controller.settings import ActSettings, ControllerSettings, read_scheduler_settings, read_settings
from scheduler.evacuation.settings import EvacuationSettings
from scheduler.kubernetes.settings import KubernetesSettings
from tests.policy.decide_world import HOUR, T0

ROOT = Path(__file__).parents[3]


def test_the_shipped_settings_hold_the_defaults_but_for_what_they_state() -> None:
    given = read_settings(ROOT / "deploy" / "act" / "act.yaml")
    usual = PolicyConfig(given.policy.thresholds)
    assert given.policy.budget == usual.budget
    assert given.policy.cost_benefit == usual.cost_benefit
    assert given.policy.hysteresis == usual.hysteresis
    assert (given.policy.stages.ceiling, usual.stages.ceiling) == ("shadow", "shadow")
    assert given.controller == ControllerSettings()
    assert given.evacuation == EvacuationSettings()


def test_the_operators_page_names_files_that_are_there_and_the_stages_as_they_are() -> None:
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", page):
        assert (ROOT / "docs" / link).exists(), link
    stages = PolicyConfig(read_settings(ROOT / "deploy" / "act" / "act.yaml").policy.thresholds).stages
    for share in FIXED.values():
        assert f"{share:.0%}".replace("%", " %") in page
    assert f"after {stages.min_outcomes} outcomes" in page.replace("\n", " ")


@pytest.mark.parametrize("kind", [ControllerSettings, EvacuationSettings, KubernetesSettings])
def test_the_page_of_settings_names_every_key(kind: type) -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    section = page.split(f"\n## {kind.__name__.removesuffix('Settings').lower()}\n")[1].split("\n## ")[0]
    assert [key.name for key in fields(kind) if not re.search(rf"`{key.name}[`.]", section)] == []


def test_a_budget_that_names_no_fleet_keeps_the_limits_of_the_fleet(tmp_path: Path) -> None:
    file = tmp_path / "act.yaml"
    file.write_text("policy: {budget: {disruption_budgets: [{scope: cluster, max_unavailable: 9}], rate_limits: []}}")
    budget = read_settings(file).policy.budget
    assert [
        (disruption_budget.scope, disruption_budget.max_unavailable_share)
        for disruption_budget in budget.disruption_budgets
    ] == [("fleet", 0.10), ("cluster", None)]
    assert [(rate_limit.scope, rate_limit.max_share) for rate_limit in budget.rate_limits] == [("fleet", 0.05)]


def test_a_misspelt_setting_is_refused_with_the_nearest_name(tmp_path):
    file = tmp_path / "act.yaml"
    file.write_text("policy: {thresholds: {watch: 0.1}, budgget: {}}\n")
    with pytest.raises(InputError, match=r"settings\.policy\.budgget: unknown key\. Did you mean 'budget'\?"):
        read_settings(file)
    file.write_text("kubernetes: {events: true}\n")  # no key has a name like it
    with pytest.raises(InputError, match=r"settings\.kubernetes\.events: unknown key\. Valid keys: avoid_label, "):
        read_settings(file)
    file.write_text("policy: {thresholds: {watch: 0.1}, horizon: 24}\n")
    with pytest.raises(InputError, match=r"settings\.policy\.horizon: 24 is not a duration: .* such as '6h'"):
        read_settings(file)
    file.write_text("policy: {thresholds: {watch: 3}}\n")
    with pytest.raises(InputError, match=r"settings\.policy\.thresholds: watch is 3\.0: give a risk above 0"):
        read_settings(file)
    file.write_text("controller: [")
    with pytest.raises(InputError, match="not valid YAML"):
        read_settings(file)
    with pytest.raises(InputError, match="does not exist"):
        read_settings(tmp_path / "absent.yaml")


def test_the_way_to_the_scheduler_is_read_whatever_is_wrong_with_the_rest(tmp_path):
    file = tmp_path / "act.yaml"
    file.write_text("policy: [no, {policy}]\nkubernetes: {namespace: predrain-x}\nevacuation: {enabeld: 3}\n")
    with pytest.raises(InputError):
        read_settings(file)
    assert read_scheduler_settings(file).kubernetes.namespace == "predrain-x"
    file.write_text("kubernetes: {namespce: predrain-x}\n")
    with pytest.raises(InputError, match="Did you mean 'namespace'"):
        read_scheduler_settings(file)


def known_settings(kind: Any, above: str = "") -> Iterator[str]:
    for name, hint in get_type_hints(kind).items():
        yield f"{above}{name}"
        for inner in (hint, *get_args(hint)):
            if is_dataclass(inner):
                yield from known_settings(inner, f"{above}{name}.")


def test_settings_are_read_and_what_is_left_out_has_its_default(tmp_path):
    file = tmp_path / "act.yaml"
    file.write_text(
        "policy:\n  thresholds: {watch: 0.1, high: 0.6}\n  stages: {pinned: {c/g: hard}}\n"
        "  budget:\n    disruption_budgets: [{scope: cluster, max_unavailable_share: 0.1}]\n"
        "    rate_limits: [{scope: cluster, max_nodes: 2, window: 1h}]\n"
        "  maintenance: [{start: 2026-03-01T08:00:00Z, end: '2026-03-01T12:00:00+00:00', nodes: [rack7-*]}]\n"
        "controller: {interval: 30s}\n"
    )
    result = read_settings(file)
    assert result.policy.thresholds == TierThresholds(0.1, None, 0.6)
    assert result.policy.stages.pinned == {"c/g": "hard"}
    assert result.policy.budget.rate_limits[0].window == HOUR
    start = T0 + 8 * HOUR
    assert result.policy.maintenance == (MaintenanceWindow(start, start + 4 * HOUR, ("rack7-*",)),)
    assert result.policy.horizon == PolicyConfig(TierThresholds()).horizon
    assert result.controller.interval == timedelta(seconds=30)
    file.write_text("")
    assert read_settings(file) == ActSettings()
