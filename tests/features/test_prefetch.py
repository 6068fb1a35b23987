from __future__ import annotations

import threading

import pytest

from features.prefetch import prefetch


def test_items_come_in_order_and_none_is_lost():
    assert list(prefetch(iter(range(50)))) == list(range(50))
    assert list(prefetch([])) == []
    assert list(prefetch([None, None])) == [None, None]


def test_the_next_item_is_made_while_this_one_is_in_use():
    asked = threading.Event()

    def items():
        yield 1
        asked.set()
        yield 2

    found = prefetch(items())
    assert next(found) == 1
    assert asked.wait(10)
    assert list(found) == [2]


def test_an_error_is_raised_where_its_item_is_asked_for():
    def items():
        yield 1
        raise ValueError("no more")

    found = prefetch(items())
    assert next(found) == 1
    with pytest.raises(ValueError, match="no more"):
        next(found)


def test_whoever_stops_early_leaves_no_thread_behind():
    before = threading.active_count()
    found = prefetch(iter(range(10)))
    next(found)
    found.close()
    assert threading.active_count() == before
