import numpy as np
import pytest

from simulator.randomness import poisson, stream


@pytest.mark.parametrize("mean", [0.0, 1e-4, 0.3, 4.0, 29.0, 31.0, 5000.0])
def test_poisson_numbers_have_their_mean_and_variance(mean: float) -> None:
    state = stream(7, 0, 0, 1)
    draws = np.array([poisson(state, mean, np.exp(-mean)) for _ in range(20_000)])
    assert (draws >= 0).all()
    assert (draws == np.floor(draws)).all()
    assert draws.mean() == pytest.approx(mean, abs=5 * np.sqrt(mean / 20_000) + 1e-9)
    if mean > 0.1:
        assert draws.var() == pytest.approx(mean, rel=0.06)
