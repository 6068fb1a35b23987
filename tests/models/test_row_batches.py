import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.config import BASELINES
from models.rows import row_reader
from models.rows.ranking import name_hashes
from models.rows.row_reader import batches
from models.rows.training_set import TrainingRows
from tests.models.small_models import fitted_models, rows

ROWS = 90


@given(count=st.integers(0, 50), at_once=st.integers(1, 20))
def test_batches_hold_every_row_once_in_order(count, at_once):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_reader, "BATCH_ROWS", at_once)
        parts = [np.arange(count)[batch] for batch in batches(count)]
    assert np.array_equal(np.concatenate(parts), np.arange(count))
    assert all(len(batch) <= at_once for batch in parts)


@pytest.mark.parametrize("at_once", [1, 13, 30])
def test_scores_in_batches_are_those_of_all_rows_at_once(monkeypatch, at_once):
    """Also where a batch ends within a decision time: ranks are taken of everything."""
    fitted = fitted_models()
    values, _ = rows(ROWS, seed=5)
    time = np.repeat([0, 1, 2], ROWS // 3)
    tie = name_hashes(np.array([f"g{i % 30}" for i in range(ROWS)], dtype=object))
    want = fitted.score_arrays(values, time, tie, tie)
    read_rows = []

    def read(positions):
        read_rows.append(len(positions))
        return values[positions]

    monkeypatch.setattr(row_reader, "BATCH_ROWS", at_once)
    scores = fitted.score_rows(read, np.arange(ROWS), TrainingRows(time, time < 0, time, tie, tie.view(np.int64)))
    assert max(read_rows) == at_once
    assert list(scores) == list(want)
    for name, batched in scores.items():
        if name in (*BASELINES, "lightgbm", "xgboost", "random_forest", "intersection", "mean_rank", "stacked"):
            assert np.array_equal(batched.score, want[name].score)
            assert np.array_equal(batched.rank, want[name].rank)
            assert np.array_equal(batched.alert, want[name].alert)
        else:  # products of matrices differ in their last bits with the number of rows
            np.testing.assert_allclose(batched.score, want[name].score, rtol=1e-5, atol=1e-5)
