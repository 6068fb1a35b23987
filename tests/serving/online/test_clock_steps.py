"""A clock that is set forth and back costs neither what is held nor what comes after."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest

from tests.features.small_fleet import HOUR, T0
from tests.serving.online.online_world import MINUTE, Clock, World, as_table


@pytest.mark.parametrize("step", [6 * HOUR, timedelta(days=400), -3 * HOUR])
def test_a_clock_that_was_wrong_for_a_while_leaves_the_rows_as_they_would_have_been(
    raw_world: World, step: timedelta
) -> None:
    """Wrong between two pushes, on the border of a step: a push under the wrong clock is told what becomes of it."""
    clock, right = Clock(T0 + 130 * MINUTE), Clock(T0 + 130 * MINUTE)
    state, other = raw_world.state(clock), raw_world.state(right)
    for minute in range(130, 215, 5):
        due = raw_world.samples["timestamp"].between(
            T0 + minute * MINUTE, T0 + (minute + 5) * MINUTE, inclusive="right"
        )
        clock.now = right.now = T0 + (minute + 5) * MINUTE
        if minute == 180:
            clock.now += step
            state.advance()
            assert len(state.rows(clock.now).keys)
            clock.now -= step
        assert state.push(as_table(raw_world.samples[due])) == other.push(as_table(raw_world.samples[due])), minute
    t = T0 + 215 * MINUTE
    assert state.totals.closed == 0
    assert state.size.rows == other.size.rows
    differs = ~np.isclose(state.rows(t).values, other.rows(t).values, rtol=1e-6, equal_nan=True)
    assert differs.mean() < 0.1  # the steps that were open when it was set forth hold what came before or after
