"""What is shipped for operators names only what the code shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("telemetry", "serving", "scheduler")
PREFIXED = ("exporters_", "score_")
DASHBOARD = ROOT / "deploy" / "grafana" / "predrain.json"
RULES = ROOT / "deploy" / "prometheus" / "predrain-rules.yaml"


def quoted() -> set[str]:
    """Every text in quotes that the rooms hold: the names of metrics are among them."""
    sources = (path.read_text(encoding="utf-8") for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return {found for source in sources for found in re.findall(r'"([a-z_]+)"', source)}


def shown(name: str, known: set[str]) -> bool:
    """Tell whether the code shows a metric."""
    base = re.sub(r"_bucket$", "", name.removeprefix("predrain_"))
    tails = [base.removeprefix(prefix) for prefix in PREFIXED if base.startswith(prefix)]
    return name in known or f"predrain_{base}" in known or any(each in known for each in (base, *tails))


def test_the_rules_and_the_dashboard_use_metrics_that_the_code_shows() -> None:
    known = quoted()
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 20
    rules = [line.partition("expr: ")[2] for line in RULES.read_text(encoding="utf-8").splitlines() if "expr: " in line]
    assert len(rules) > 10
    used = {name for query in [*queries, *rules] for name in re.findall(r"predrain_[a-z_]+", query)}
    assert sorted(name for name in used if not shown(name, known)) == []
    assert not shown("predrain_act_noodles", known)
