"""What a matrix's digest covers."""

from __future__ import annotations

from pathlib import Path

from features.matrix import build_tasks


def test_the_code_digest_covers_the_folders_of_the_room(tmp_path: Path, monkeypatch) -> None:
    room = tmp_path / "features"
    (room / "windows").mkdir(parents=True)
    (room / "config.py").write_text("A = 1\n")
    (room / "windows" / "gauges.py").write_text("B = 1\n")
    monkeypatch.setattr(build_tasks, "_ROOM", room)
    before = build_tasks.code_digest.__wrapped__()
    (room / "windows" / "gauges.py").write_text("B = 2\n")
    assert build_tasks.code_digest.__wrapped__() != before


def test_the_code_digest_is_of_this_rooms_own_kernels() -> None:
    assert (build_tasks._ROOM / "windows" / "counters.py").exists()
