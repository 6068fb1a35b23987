import ast
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import simulator.parameters
from simulator.parameters import Parameters
from simulator.scenarios import SCENARIOS


def test_every_parameter_says_where_it_comes_from() -> None:
    tree = ast.parse(Path(simulator.parameters.__file__).read_text())
    bare = []
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name == "Parameters":  # it only joins the sections
            continue
        for position, statement in enumerate(node.body):
            if isinstance(statement, ast.AnnAssign):
                following = node.body[position + 1] if position + 1 < len(node.body) else None
                documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                if not documented:
                    bare.append(f"{node.name}.{ast.unparse(statement.target)}")
    assert bare == []


def test_parameters_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Parameters().hazards.recurs = 1.0  # type: ignore[misc]  # that it fails is what is tested


def test_every_scenario_explains_itself_in_plain_words() -> None:
    assert list(SCENARIOS) == ["base", "drift", "epidemic", "noprecursor", "announced"]
    for name, scenario in SCENARIOS.items():
        assert scenario.name == name
        assert len(scenario.explanation.split()) > 15
        assert scenario.explanation.endswith(".")


def test_shares_of_a_mechanism_are_shares() -> None:
    for scenario in SCENARIOS.values():
        for each in scenario.parameters.hazards.mechanisms:
            assert 0 <= each.weak + each.strong + each.structural <= 1
            assert 0 <= each.replaced <= 1
            assert bool(each.xids) or bool(each.tickets)
