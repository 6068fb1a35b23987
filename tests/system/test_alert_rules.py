"""The shipped alert rules, by Prometheus' own checker: they are valid, fire when they should, and else are silent."""

import json
import subprocess
from pathlib import Path

import pytest

RULES = Path(__file__).parents[2] / "deploy" / "helm" / "predrain" / "files" / "predrain-rules.yaml"
DASHBOARD = RULES.with_name("predrain.json")
CASES = Path(__file__).with_name("alert_rules_test.yaml")
pytestmark = pytest.mark.system


def promtool(*args: str | Path) -> str:
    done = subprocess.run(["promtool", *args], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_are_valid() -> None:
    assert "SUCCESS" in promtool("check", "rules", RULES)


def test_each_alert_fires_in_its_case_and_none_fires_while_all_is_well(tmp_path: Path) -> None:
    cases = tmp_path / "cases.yaml"
    cases.write_text(CASES.read_text().replace("RULES", str(RULES)))
    assert "SUCCESS" in promtool("test", "rules", cases)
    text = CASES.read_text()
    for line in RULES.read_text().splitlines():
        name, _, value = line.strip().partition("alert: ")
        assert name != "- " or f'alertname="{value}"' in text, f"no case lets {value} fire"


def test_the_queries_of_the_dashboard_are_valid(tmp_path: Path) -> None:
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", file)
