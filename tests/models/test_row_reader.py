from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from models.rows.row_reader import HeldRows, Room

COLUMNS = 5


class Counted:
    """A matrix that counts how often each row is read."""

    def __init__(self, rows: int) -> None:
        self.features = np.random.default_rng(0).normal(size=(rows, COLUMNS)).astype(np.float32)
        self.rows, self.columns = np.zeros(rows), [SimpleNamespace()] * COLUMNS
        self.reads = np.zeros(rows, dtype=int)

    def values(self, positions=None):
        positions = np.arange(len(self.features)) if positions is None else np.asarray(positions, dtype=np.int64)
        np.add.at(self.reads, positions, 1)
        return self.features[positions]


def test_a_matrix_that_fits_is_read_once_and_held():
    matrix = Counted(30)
    read = HeldRows(matrix, 30 * COLUMNS * 4)
    assert np.array_equal(read(np.array([3, 1, 2])), matrix.features[[3, 1, 2]])
    read(np.array([7]))
    read(np.arange(4, 9))
    assert (matrix.reads == 1).all()


@settings(max_examples=60, deadline=None)
@given(
    held=st.integers(1, 39),
    asked=st.lists(st.lists(st.integers(0, 39), max_size=30), min_size=1, max_size=8),
)
def test_a_matrix_that_does_not_fit_is_read_the_same_in_any_order(held, asked):
    matrix = Counted(40)
    read = HeldRows(matrix, held * COLUMNS * 4)
    for wanted in asked:
        values = read(np.array(wanted, dtype=np.int64))
        assert values.dtype == np.float32
        assert np.array_equal(values, matrix.features[wanted])
    assert np.array_equal(read(np.arange(40)), matrix.features)


def test_a_window_that_slides_reads_each_row_once():
    matrix = Counted(200)
    read = HeldRows(matrix, 40 * COLUMNS * 4)
    for start in range(0, 160, 8):
        chosen = np.arange(start, start + 30, 2)
        assert np.array_equal(read(chosen), matrix.features[chosen])
        assert np.array_equal(read(np.arange(start + 30, start + 38)), matrix.features[start + 30 : start + 38])
    assert matrix.reads.max() == 1


def test_threads_hold_no_more_than_the_room_and_a_larger_wish_waits_to_be_alone():
    room, in_use, most = Room(10), [], []

    def take(size):
        with room.take(size):
            in_use.append(min(size, 10))
            most.append(sum(in_use))
            in_use.remove(min(size, 10))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(take, [3, 4, 5, 12] * 50))
    assert len(most) == 200
    assert max(most) <= 10
