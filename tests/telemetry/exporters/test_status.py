"""The state file that several collectors write and the doctor reads."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

from telemetry.exporters.failures import ScrapeError
from telemetry.exporters.status import collector_name, illness, metrics_text, own_state, write_state
from tests.telemetry.exporters.exporter_pages import START, FakeFetcher, exporter_page, make_collector, run_virtual


def scraped(tmp_path: Path) -> Any:
    def answer(url: str, number: int) -> str | Exception:
        return ScrapeError("timeout", "no page") if "bad" in url else exporter_page("n1", number)

    async def work() -> Any:
        collector = make_collector(tmp_path, FakeFetcher(answer), ["n1", "http://bad:1/metrics?token=geheim"])
        await collector.once()
        now = collector.clock.now()
        return own_state(collector, now), metrics_text(collector, now), illness(collector)

    return run_virtual(work)


def part(name: str, seen_at: Any, *targets: str) -> dict[str, Any]:
    seen = {"seen_at": seen_at.isoformat()}
    return {
        "collectors": {name: seen | {"interval_s": 30.0}},
        "targets": {target: seen | {"collector": name} for target in targets},
    }


def test_what_a_collector_tells_of_its_targets_holds_no_secret(tmp_path: Path) -> None:
    state, metrics, ill = scraped(tmp_path)
    assert ill is None
    good = state["targets"]["n1:9400"]
    assert good["last_success_at"] == "2026-03-01T00:00:00+00:00"
    assert (good["gpus"], good["hung"], good["failures"]) == ({"GPU-n1-0": 3, "GPU-n1-1": 3}, False, {})
    (bad,) = (entry for name, entry in state["targets"].items() if name.startswith("bad:1"))
    assert (bad["last_failure_kind"], bad["last_failure"], bad["failures"]) == ("timeout", "no page", {"timeout": 1})
    assert "geheim" not in json.dumps(state) + metrics
    assert 'predrain_exporters_failures_total{kind="timeout"} 1.0\n' in metrics
    assert "predrain_exporters_rows_landed_total 2.0\n" in metrics
    assert state["collectors"][collector_name()]["good"] == 1


def test_several_collectors_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "state" / "exporters.json"
    write_state(path, part("a", START, "n1", "n2"), START)
    write_state(path, part("b", START, "n3"), START)
    state = json.loads(path.read_text())
    assert state["collectors"].keys() == {"a", "b"}
    assert {name: entry["collector"] for name, entry in state["targets"].items()} == {"n1": "a", "n2": "a", "n3": "b"}


def test_a_collector_goes_when_all_it_had_was_taken_over_or_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "exporters.json"
    write_state(path, part("a", START, "n1"), START)
    later = START + timedelta(minutes=10)
    write_state(path, part("b", later), later)
    assert json.loads(path.read_text())["collectors"].keys() == {"a", "b"}
    write_state(path, part("b", later, "n1"), later)
    assert json.loads(path.read_text())["collectors"].keys() == {"b"}
    write_state(path, part("b", later, "n1"), later, leaving="b")
    state = json.loads(path.read_text())
    assert (state["collectors"], state["targets"].keys()) == ({}, {"n1"})


def test_what_nobody_has_written_for_an_hour_goes_and_a_damaged_file_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "exporters.json"
    path.write_text('{"targets": 7, "collectors": {"x": null')
    write_state(path, part("a", START, "n1"), START)
    later = START + timedelta(hours=2)
    write_state(path, part("b", later, "n2"), later)
    state = json.loads(path.read_text())
    assert (state["collectors"].keys(), state["targets"].keys()) == ({"b"}, {"n2"})
