from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from models.rows.ranking import mix, name_hashes, rank_within, seed_of, uniform


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=40))
def test_ranks_equal_a_plain_sort_and_ignore_row_order(pairs):
    times = np.array([t for t, _ in pairs], dtype=np.int64)
    score = np.array([s for _, s in pairs], dtype=float)
    tie = name_hashes([f"unit-{i}" for i in range(len(pairs))])
    ranks = rank_within(times, score, tie)
    for t in set(times.tolist()):
        rows = [i for i in range(len(pairs)) if times[i] == t]
        wanted = sorted(rows, key=lambda i: (-score[i], int(tie[i])))
        assert [int(ranks[i]) for i in wanted] == list(range(1, len(rows) + 1))
    shuffled = np.random.default_rng(0).permutation(len(pairs))
    assert np.array_equal(rank_within(times[shuffled], score[shuffled], tie[shuffled]), ranks[shuffled])


def test_hashes_are_the_same_in_every_release():
    assert name_hashes(["gpu-1", "gpu-2", None]).tolist() == [
        int.from_bytes(__import__("hashlib").blake2b(name.encode(), digest_size=8).digest(), "little")
        for name in ("gpu-1", "gpu-2", "")
    ]
    assert seed_of(42, "lightgbm", 3) == seed_of(42, "lightgbm", 3) != seed_of(42, "lightgbm", 4)


def test_mixed_hashes_are_uniform():
    u = uniform(mix(name_hashes([f"g{i}" for i in range(4000)]), 7))
    assert abs(u.mean() - 0.5) < 0.02
    assert abs(u.std() - 12**-0.5) < 0.01
    assert 0 < u.min() < u.max() < 1
