"""The command that runs the benchmarks: what becomes of one that misses its aim, and of one that fails."""

import json
import sys

import pytest

from benchmarks import run_all

TOLD = {"value": 2, "unit": "s", "peer": None, "ratio": None}


def test_a_missed_aim_keeps_its_line_and_a_failure_has_none(tmp_path, monkeypatch, capsys):
    lines = {
        "good": {"name": "good", **TOLD},
        "slow": {"name": "slow", **TOLD, "aim": "1 s", "met": False},
        "broken": None,
        "odd": {"name": "odd", **TOLD, "aim": "1 s", "met": True},
    }
    for name, told in lines.items():
        words = f"print({json.dumps(json.dumps(told))!s})" if told else "print('half a table')"
        (tmp_path / f"{name}.py").write_text(f"{words}\nraise SystemExit({int(name != 'good')})\n")
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    monkeypatch.setattr(run_all, "PAGE", tmp_path / "results.md")
    monkeypatch.setattr(run_all, "RUNS", tuple(lines))
    monkeypatch.setattr(sys, "argv", ["run_all.py"])
    with pytest.raises(SystemExit) as ended:
        run_all.main()
    said = str(ended.value).splitlines()
    assert said[0] == "slow ran and missed its aim (1 s)"
    assert [line.split()[0] for line in said[1:] if "failed to run" in line] == ["broken", "odd"]
    assert "half a table" in capsys.readouterr().out
    page = run_all.read_page()
    assert set(page) == {"good", "slow", "odd"}
    assert "| 1 s: **missed** |" in page["slow"]
    assert "| 1 s: met |" in page["odd"]
