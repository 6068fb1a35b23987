"""The search for cyclic garbage is put off, and comes back whatever happens."""

import gc

import pytest

from scheduler.controller.controller import search_deferred


def fails() -> None:
    with search_deferred():
        assert not gc.isenabled()
        raise ValueError("no")


def test_it_is_off_within_and_on_again_after_whatever_ended_it() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="no"):
        fails()
    assert gc.isenabled()


def test_where_another_one_turned_it_off_it_stays_off() -> None:
    gc.disable()
    try:
        with search_deferred():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
