import threading

import pytest

from features.matrix.live_rows import prefetch


def test_an_error_is_raised_where_its_item_is_asked_for():
    def items():
        yield 1
        raise ValueError("no more")

    fetched = prefetch(items())
    assert next(fetched) == 1
    with pytest.raises(ValueError, match="no more"):
        next(fetched)


def test_whoever_stops_early_leaves_no_thread_behind():
    before = threading.active_count()
    fetched = prefetch(iter(range(10)))
    next(fetched)
    fetched.close()
    assert threading.active_count() == before
