import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.randomness import NORMAL_TABLE, Purpose, bits, generator, normal, poisson, scattered, stream, uniform


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**63 - 1),
    node=st.integers(0, 10**6),
    slot=st.integers(0, 10**4),
    purpose=st.sampled_from(Purpose),
)
def test_a_stream_depends_on_each_part_of_its_key_and_on_nothing_else(
    seed: int, node: int, slot: int, purpose: Purpose
) -> None:
    first = bits(stream(seed, node, slot, purpose))
    assert bits(stream(seed, node, slot, purpose)) == first
    others = [
        bits(stream(seed ^ 1, node, slot, purpose)),
        bits(stream(seed, node + 1, slot, purpose)),
        bits(stream(seed, node, slot + 1, purpose)),
        bits(stream(seed, node, slot, purpose % len(Purpose) + 1)),
    ]
    assert first not in others


def test_uniforms_and_normals_have_their_moments() -> None:
    state = stream(1, 2, 3, 4)
    draws = np.array([uniform(state) for _ in range(20_000)])
    assert draws.min() >= 0
    assert draws.max() < 1
    assert draws.mean() == pytest.approx(0.5, abs=0.01)
    assert np.corrcoef(draws[1:], draws[:-1])[0, 1] == pytest.approx(0.0, abs=0.03)
    values = np.array([normal(state) for _ in range(20_000)])
    assert values.mean() == pytest.approx(0.0, abs=0.03)
    assert values.std() == pytest.approx(1.0, abs=0.03)
    assert NORMAL_TABLE.std() == pytest.approx(1.0, abs=0.001)


@pytest.mark.parametrize("mean", [0.0, 1e-4, 0.3, 4.0, 29.0, 31.0, 5000.0])
def test_poisson_numbers_have_their_mean_and_variance(mean: float) -> None:
    state = stream(7, 0, 0, 1)
    draws = np.array([poisson(state, mean, np.exp(-mean)) for _ in range(20_000)])
    assert (draws >= 0).all()
    assert (draws == np.floor(draws)).all()
    assert draws.mean() == pytest.approx(mean, abs=5 * np.sqrt(mean / 20_000) + 1e-9)
    if mean > 0.1:
        assert draws.var() == pytest.approx(mean, rel=0.06)


def test_generators_differ_by_node_purpose_and_unit() -> None:
    draws = [
        generator(1, node, purpose, unit).random()
        for node in (-1, 0, 1)
        for purpose in (Purpose.JOBS, Purpose.EVENTS)
        for unit in (0, 1, 65)
    ]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize("share", [0.03, 0.2, 0.5])
def test_scattered_traits_reach_their_share_in_a_small_fleet(share: float) -> None:
    for seed in range(5):
        found = np.mean([scattered(index, seed, 1) < share for index in range(100)])
        assert found == pytest.approx(share, abs=0.021)
