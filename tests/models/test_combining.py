import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from models.ensembles import Stacker, combine
from models.rows.ranking import name_hashes, rank_within


def some_scores(seed=0, times=5, units=12, members=3):
    rng = np.random.default_rng(seed)
    scores = np.round(rng.normal(size=(times * units, members)), 1)
    return scores, np.repeat(np.arange(times), units), name_hashes([f"u{i}" for i in range(units)] * times)


@given(st.integers(0, 200), st.integers(1, 8), st.sampled_from(["intersection", "min_votes"]), st.integers(1, 3))
def test_voted_alerts_equal_plain_sets(seed, k, combiner, votes):
    scores, times, tie = some_scores(seed)
    needed = 3 if combiner == "intersection" else votes
    score, alert = combine(scores, times, tie, tie, k=k, combiner=combiner, min_votes=votes)
    rank = rank_within(times, score, tie)
    ranks = np.column_stack([rank_within(times, scores[:, m], tie) for m in range(3)])
    for t in range(5):
        sets = [set(np.flatnonzero((times == t) & (ranks[:, m] <= k)).tolist()) for m in range(3)]
        expected = {i for i in np.flatnonzero(times == t).tolist() if sum(i in one for one in sets) >= needed}
        assert set(np.flatnonzero((times == t) & alert).tolist()) == expected
        # Votes come first, then the mean rank; so the alerts stand before the rest.
        rows = np.flatnonzero(times == t)
        votes_of = (ranks[rows] <= k).sum(axis=1)
        order = sorted(rows.tolist(), key=lambda i: int(rank[i]))
        keys = [(-votes_of[i - rows[0]], ranks[i].mean()) for i in order]
        assert keys == sorted(keys)


def test_members_vote_with_the_units_of_their_top_nodes():
    scores = np.array([[4.0, 3.0], [3.0, 4.0], [2.0, 1.0], [1.0, 2.0]])
    tie, node = name_hashes(list("abcd")), np.array([0, 0, 1, 1])
    _, alert = combine(scores, np.zeros(4, int), tie, node, k=1, combiner="intersection")
    assert alert.tolist() == [True, True, False, False]


def test_intersection_may_be_empty():
    scores, tie = np.array([[3.0, 1.0], [2.0, 2.0], [1.0, 3.0]]), name_hashes(list("abc"))
    _, alert = combine(scores, np.zeros(3, int), tie, tie, k=1, combiner="intersection")
    assert not alert.any()
    _, none = combine(
        np.zeros((0, 2)), np.zeros(0, int), name_hashes([]), name_hashes([]), k=1, combiner="intersection"
    )
    assert len(none) == 0


def test_mean_rank_of_a_member_that_shouts_is_not_swayed():
    scores = np.array([[0.0, 0.1, 0.2], [1e6, 0.0, 0.0], [1.0, 0.2, 0.3]])
    tie = name_hashes(list("abc"))
    score, _ = combine(scores, np.zeros(3, int), tie, tie, k=1, combiner="mean_rank")
    assert score[2] > score[:2].max()


def test_a_member_that_is_sure_sways_the_mean_of_log_odds_and_no_stacker_does():
    scores = np.array([[6.0, -1.0], [0.0, 1.0], [-3.0, -4.0]])
    times, tie = np.zeros(3, dtype=np.int64), np.arange(3, dtype=np.uint64)
    score, alert = combine(scores, times, tie, tie, k=1, combiner="mean_log_odds", stacker=Stacker((0.0, 1.0)))
    assert score.tolist() == [2.5, 0.5, -3.5]
    assert alert is None


def test_stacker_trusts_the_member_that_knows():
    rng = np.random.default_rng(3)
    y = (rng.random(3000) < 0.1).astype(int)
    scores = np.column_stack([2.5 * y - 3 + rng.normal(size=3000), rng.normal(size=3000) - 3])
    stacker = Stacker.fit(scores, y)
    assert stacker.weights[0] > 2 * stacker.weights[1] >= 0
    assert Stacker.fit(scores, np.zeros(3000, int)) == Stacker.mean(2)
