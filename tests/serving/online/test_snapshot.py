"""A snapshot is whole or refused."""

import json
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

from features.errors import InputError
from serving.online.snapshot import META
from serving.online.state import OnlineState
from tests.features.small_fleet import HOUR, T0
from tests.serving.online.online_world import MINUTE, Clock, as_table, make_world

T = T0 + 9 * HOUR


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("snapshot"))


@pytest.fixture
def state(world):
    made = world.state(Clock(T))
    made.push(as_table(world.samples[world.samples["timestamp"] < T]), replayed=True)
    return made


def test_what_is_restored_is_what_was_held(world, state, tmp_path):
    state.snapshot(tmp_path / "s")
    back = OnlineState.restore(tmp_path / "s", clock=Clock(T), config=world.config)
    assert back.size == state.size
    assert back.totals == state.totals
    np.testing.assert_array_equal(back.rows(T).values, state.rows(T).values)


def test_a_second_snapshot_writes_only_what_is_new(world, state, tmp_path):
    first = state.snapshot(tmp_path / "s")
    frames = {path.name: path.stat().st_ino for path in (tmp_path / "s").glob("frame-*")}
    second = state.snapshot(tmp_path / "s")
    assert second < first
    assert {path.name: path.stat().st_ino for path in (tmp_path / "s").glob("frame-*")} == frames
    back = OnlineState.restore(tmp_path / "s", clock=Clock(T))
    np.testing.assert_array_equal(back.rows(T).values, state.rows(T).values)


def test_any_damage_is_told_and_nothing_of_it_is_used(state, tmp_path):
    state.snapshot(tmp_path / "s")
    for file in sorted((tmp_path / "s").iterdir()):
        good = file.read_bytes()
        turned = bytearray(good)
        turned[len(good) // 2] ^= 0xFF
        for bad in (bytes(turned), good[: len(good) // 2], b"", None):
            if bad is None:
                file.unlink()
            else:
                file.write_bytes(bad)
            with pytest.raises(InputError) as error:
                OnlineState.restore(tmp_path / "s", clock=Clock(T))
            assert str(tmp_path / "s") in str(error.value)
        file.write_bytes(good)
    OnlineState.restore(tmp_path / "s", clock=Clock(T))


def test_a_damaged_snapshot_says_what_to_do(state, tmp_path):
    state.snapshot(tmp_path / "s")
    (tmp_path / "s" / "waiting.npz").unlink()
    with pytest.raises(InputError) as error:
        OnlineState.restore(tmp_path / "s", clock=Clock(T))
    assert "Remove the folder, begin without a sample, and push what is kept in files again." in str(error.value)
    state.snapshot(tmp_path / "s")  # a running state writes over it
    OnlineState.restore(tmp_path / "s", clock=Clock(T))


def test_no_snapshot_is_no_damage(tmp_path):
    with pytest.raises(InputError) as error:
        OnlineState.restore(tmp_path / "none", clock=Clock(T))
    assert str(error.value) == f"there is no snapshot ({tmp_path / 'none'}). Begin without a sample."


def test_a_snapshot_of_another_bundle_is_refused(world, state, tmp_path):
    state.snapshot(tmp_path / "s")
    other = replace(world.config, step=5 * MINUTE)
    with pytest.raises(InputError, match="it was made for a bundle with other features"):
        OnlineState.restore(tmp_path / "s", clock=Clock(T), config=other)


def test_a_snapshot_of_another_version_is_refused(state, tmp_path):
    from serving.online import snapshot

    state.snapshot(tmp_path / "s")
    body = json.loads((tmp_path / "s" / META).read_bytes().partition(b"\n")[2])
    raw = json.dumps({**body, "version": 99}).encode()
    (tmp_path / "s" / META).write_bytes(snapshot._digest(raw).encode() + b"\n" + raw)
    with pytest.raises(InputError, match=f"it has version 99, this predrain reads {snapshot.VERSION}"):
        OnlineState.restore(tmp_path / "s", clock=Clock(T))


def test_samples_pushed_again_after_a_restart_count_once(world, state, tmp_path):
    state.snapshot(tmp_path / "s")
    before = state.rows(T).values
    back = OnlineState.restore(tmp_path / "s", clock=Clock(T))
    recent = world.samples[(world.samples["timestamp"] < T) & (world.samples["timestamp"] > T - timedelta(hours=2))]
    back.push(as_table(recent), replayed=True)
    np.testing.assert_array_equal(back.rows(T).values, before)
