from simulator.scenarios import SCENARIOS


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
