"""The pause of the search for garbage."""

from __future__ import annotations

import gc

import pytest

from foundation.garbage import gc_paused


@pytest.mark.parametrize("enabled", [True, False])
def test_the_search_for_garbage_is_off_within_and_afterwards_as_it_was(enabled):
    def paused():
        with gc_paused():
            assert not gc.isenabled()
            raise ValueError("no")

    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ValueError, match="no"):
            paused()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
