"""The null check at small size: nothing where nothing is, something where something is, and a leak is noticed."""

import pytest

from benchmarks.null.finding import Finding, Outcome, show
from benchmarks.null.runs import Size, passed, run_checks, small_params

pytestmark = pytest.mark.system  # half a minute of computing

SIZE = Size(gpus=64, days=40, incidents=150, acceleration=100.0)
NAMES = ("shuffled", "leak shuffled", "independent", "leak", "planted")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("null")


@pytest.fixture(scope="module")
def outcomes(work):
    return run_checks(work, SIZE, small_params(), NAMES)


@pytest.mark.parametrize("name", ["shuffled", "independent"])
def test_nothing_is_found_where_nothing_is(outcomes, name):
    assert outcomes[name].above == ()
    assert outcomes[name].incidents >= 20
    models = {finding.model for finding in outcomes[name].findings}
    assert {"lightgbm", "mean_rank", "stacked", "intersection", "cascade", "history_count", "random"} <= models


def test_a_planted_signal_is_found_by_every_learner(outcomes):
    for model in ("lightgbm", "xgboost", "logistic", "mean_rank", "stacked", "cascade"):
        assert outcomes["planted"].of(model, "roc_auc").low > 0.7
        assert (
            outcomes["planted"].of(model, "precision_at_k").low > outcomes["planted"].of(model, "precision_at_k").chance
        )


@pytest.mark.parametrize("name", ["leak", "leak shuffled"])
def test_a_feature_that_reads_the_future_fails_the_check(outcomes, name):
    assert len(outcomes[name].above) >= 3
    assert outcomes[name].of("mean_rank", "roc_auc").low > 0.6


def test_the_verdict_follows(outcomes):
    assert all(passed(outcomes).values())
    assert not any(passed({"independent": outcomes["leak"], "planted": outcomes["independent"]}).values())
    assert "mean_rank" not in show(outcomes, "mean_rank").splitlines()[0]
    assert len(show(outcomes, "mean_rank").splitlines()) == 1 + 3 * len(NAMES)


def test_a_finding_is_judged_by_how_many_were_looked_at():
    def finding(z):
        return Finding("m", "sliding", "roc_auc", 0.6, 0.5, 0.7, 0.5, z)

    assert Outcome("one", (finding(2.0),), 9).above
    assert not Outcome("many", (finding(2.0), *[finding(0.0)] * 50), 9).above
