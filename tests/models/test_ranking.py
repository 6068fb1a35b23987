import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from models.rows.ranking import mix, name_hashes, rank_within, seed_of, top_nodes, uniform


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=40))
def test_ranks_equal_a_plain_sort_and_ignore_row_order(pairs):
    times = np.array([t for t, _ in pairs], dtype=np.int64)
    score = np.array([s for _, s in pairs], dtype=float)
    tie = name_hashes([f"unit-{i}" for i in range(len(pairs))])
    ranks = rank_within(times, score, tie)
    for t in set(times.tolist()):
        rows = [i for i in range(len(pairs)) if times[i] == t]
        expected = sorted(rows, key=lambda i: (-score[i], int(tie[i])))
        assert [int(ranks[i]) for i in expected] == list(range(1, len(rows) + 1))
    shuffled = np.random.default_rng(0).permutation(len(pairs))
    assert np.array_equal(rank_within(times[shuffled], score[shuffled], tie[shuffled]), ranks[shuffled])


@given(st.integers(0, 500), st.integers(1, 6), st.integers(1, 9))
def test_units_alert_down_to_the_node_that_the_budget_does_not_hold(seed, k, per_node):
    rng = np.random.default_rng(seed)
    times, node = rng.integers(0, 3, 60), rng.integers(0, 60 // per_node, 60)
    rank = rank_within(times, rng.normal(size=60), np.arange(60, dtype=np.uint64))
    alert = top_nodes(times, rank, node, k)
    for t in range(3):
        nodes = set()
        for row in sorted(np.flatnonzero(times == t), key=lambda row: rank[row]):
            nodes.add(int(node[row]))
            assert alert[row] == (len(nodes) <= k)


def test_a_budget_of_nodes_reaches_beyond_many_units_of_one():
    rank = np.arange(1, 101)
    alert = top_nodes(np.zeros(100, int), rank, np.minimum(rank, 90) // 90, 1)
    assert alert.sum() == 89


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
