from simulator.scenarios.drawn import STEPS, draw_fleet


def test_a_fleet_depends_on_its_seed_and_number_only():
    assert draw_fleet(7, 3) == draw_fleet(7, 3)
    drawn = [draw_fleet(seed, number) for seed in (7, 8) for number in range(30)]
    assert len({fleet.seed for fleet in drawn}) == len(drawn)
    assert {fleet.step for fleet in drawn} == set(STEPS)
    assert any(fleet.hidden and fleet.scenario.drifts for fleet in drawn)
    for fleet in drawn:
        for mechanism in fleet.scenario.parameters.hazards.mechanisms:
            announced = mechanism.weak + mechanism.strong + mechanism.structural
            assert announced == 0 or abs(announced - (1 - fleet.silent)) < 1e-9
