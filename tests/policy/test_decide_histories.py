"""Many random histories of a fleet, as fast as they go: `make histories` draws a million others each day.

What must hold, and what happens, are those of ``test_decide_properties``, which finds the shortest history that breaks
something; here blocks of fifty run side by side, and a failure names the one that broke.
"""

from __future__ import annotations

import os
from random import Random

import pytest

from tests.policy.test_decide_properties import EVENTS, NODES, World, check

COUNT, SEED = int(os.environ.get("HISTORIES", "100")), os.environ.get("SEED", "")
BLOCK = 50


@pytest.mark.parametrize("block", range(-(-COUNT // BLOCK)))
def test_whatever_happens_no_floor_is_broken(block: int) -> None:
    for number in range(block * BLOCK, min((block + 1) * BLOCK, COUNT)):
        random = Random(f"{SEED} {number}")
        world = World(
            random.choice(["shadow", "soft", "hard", "hard"]), random.randint(1, 2), random.choice(["any", "worst"])
        )
        for step in range(random.randint(8, 60)):
            world.step((random.choice(EVENTS), random.randrange(NODES), random.random()))
            try:
                check(world)
            except AssertionError as error:
                raise AssertionError(f"SEED={SEED!r}: history {number}, step {step}") from error
