"""Opt-outs are read in any spelling, and what cannot be read keeps predrain off."""

import pytest

from foundation.kubernetes.opt_out import is_set, is_unmanaged, read_switch, unclear

ON = ["true", "True", "TRUE", " true ", '"true"', "'yes'", "on", "1", "Enabled", "y"]
OFF = ["false", "False", "FALSE", " false\n", '"false"', "no", "No", "off", "OFF", "0", "disabled", "n"]
UNCLEAR = ["", " ", "24h", "maybe", "tru", "2", "until friday", "null", "none"]


@pytest.mark.parametrize("value", [*ON, *OFF])
def test_a_clear_yes_or_no_is_read_in_any_spelling(value):
    assert (read_switch(value), is_unmanaged(value), is_set(value)) == (value in ON, value in OFF, value in ON)


@pytest.mark.parametrize("value", UNCLEAR)
def test_what_is_neither_holds_both_ways_and_is_reported(value):
    assert (read_switch(value), is_unmanaged(value), is_set(value)) == (None, True, True)
    assert repr(value) in (unclear("predrain.io/managed", value) or "")
    assert unclear("predrain.io/managed", "no") is None
