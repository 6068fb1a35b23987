"""Dumps: rows equal those of a plain reading, whatever the order, the size of parts and the interruptions."""

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foundation.errors import InputError
from telemetry.accounting import Accounting
from telemetry.bounds import BAD_TIME
from telemetry.collect.openmetrics import NO_TIME, stage_dump
from telemetry.collect.series.exposition import BAD_LINE, parse_line
from telemetry.collect.series.identity import SeriesCatalogue
from telemetry.collect.series.mapping import SourceMapping
from telemetry.dataset.channels import CATALOGUE
from telemetry.importing.files.tables import column_names
from telemetry.staging.folder import StagingFolder
from tests.processes import invoke
from tests.staged import staged_table

T0 = 1_772_323_200
METRICS = ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "DCGM_FI_DEV_XID_ERRORS")


def line(metric: str, gpu: str, value: str, seconds: float | str) -> str:
    return f'{metric}{{UUID="{gpu}",Hostname="n1",pod="a {{b}} c"}} {value} {seconds}'


def dump(gpus: int = 3, times: int = 50, every_s: float = 3600.5) -> str:
    lines = ["# TYPE DCGM_FI_DEV_GPU_TEMP gauge"]
    for metric in METRICS:
        for gpu in range(gpus):
            lines += [
                line(metric, f"GPU-{gpu}", str(10**9 * METRICS.index(metric) % 7 + turn * gpu), T0 + turn * every_s)
                for turn in range(times)
            ]
    return "\n".join([*lines, "# EOF"]) + "\n"


def stage_frame(path: Path, folder: Path, mapping: SourceMapping | None = None, **more: Any) -> dict[str, Any]:
    staging, accounting = StagingFolder(folder, writer="test"), Accounting()
    report = stage_dump(path, staging, SeriesCatalogue(CATALOGUE, mapping), accounting=accounting, **more)
    return report | {"account": accounting.tables["sample values"]}


def staged(folder: Path, kind: str = "samples") -> list[dict[str, Any]]:
    return sorted(
        staged_table(folder, kind).to_pylist(), key=lambda row: (row["gpu"], row.get("timestamp") or row.get("seen_at"))
    )


def plain(text: str) -> dict[tuple[str, int], dict[str, float]]:
    rows: dict[tuple[str, int], dict[str, float]] = {}
    for line in text.splitlines():
        sample = parse_line(line, openmetrics=True)
        if sample is None:
            continue
        channel = SeriesCatalogue(CATALOGUE).metric_names()[sample.name]
        rows.setdefault((sample.labels["UUID"], sample.timestamp_ms), {})[channel] = sample.value
    return rows


def as_plain(rows: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, float]]:
    keys = {"timestamp", "node", "gpu", "mig_instance"}
    return {
        (row["gpu"], round(row["timestamp"].timestamp() * 1000)): {
            name: value for name, value in row.items() if name not in keys and value is not None
        }
        for row in rows
    }


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("held", [2_000_000, 40])
def test_rows_are_those_of_a_plain_reading(tmp_path: Path, suffix: str, held: int) -> None:
    text = dump()
    path = tmp_path / f"d.om{suffix}"
    raw = text.encode()
    packed = {"": raw, ".gz": gzip.compress(raw), ".zst": pa.compress(raw, "zstd", asbytes=True)}
    path.write_bytes(packed[suffix])
    result = stage_frame(path, tmp_path / "live", held_samples=held)
    assert as_plain(staged(tmp_path / "live")) == plain(text)
    assert (result["samples"], result["series"], result["gpus"], result["account"].used) == (450, 9, 3, 450)
    assert {row["gpu"] for row in staged(tmp_path / "live", "inventory")} == {"GPU-0", "GPU-1", "GPU-2"}
    assert not any(path.is_dir() for path in (tmp_path / "live" / "state").iterdir())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("range.json", '{"status": "success", "data": {"resultType": "matrix", "result": []}}'),
        ("promtool.json", '[\n {"metric": {"__name__": "up"}, "values": []}]'),
        ("victoria.jsonl", '{"metric": {"__name__": "up"}, "values": [1], "timestamps": [1772323200000]}'),
        ("otlp.json", '{"resourceMetrics": [{"scopeMetrics": []}]}'),
        ("grafana.csv", '\ufeffsep=,\n"Time","GPU_TEMP{UUID=""GPU-0""}"\n1772323200000,45\n'),
        ("grafana rows.csv", "Time;Metric;Value\n2026-03-01 00:00:00;GPU_TEMP;45\n"),
    ],
)
def test_exports_of_series_are_refused_by_both_readers(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match="export of time series"):
        stage_frame(tmp_path / name, tmp_path / "live")
    with pytest.raises(InputError, match="export of time series"):
        column_names(tmp_path / name)


def test_the_files_are_as_many_as_the_samples_need_whatever_time_they_span(tmp_path: Path) -> None:
    dense = [line(METRICS[0], "GPU-0", str(turn), T0 + turn) for turn in range(300)]
    century = [line(METRICS[0], "GPU-0", str(turn), 946_684_800 + turn * 10_500_000) for turn in range(300)]
    (tmp_path / "d.om").write_text("\n".join(century + dense))
    result = stage_frame(tmp_path / "d.om", tmp_path / "live", held_samples=100)
    sizes = [pq.read_metadata(path).num_rows for path in (tmp_path / "live" / "samples").iterdir()]
    assert (result["files staged"], sum(sizes), max(sizes) <= 100) == (12, 600, True)


def test_odd_lines_are_read_or_counted(tmp_path: Path) -> None:
    name = METRICS[0]
    path = tmp_path / "d.om"
    path.write_text(
        "\n".join(
            [
                line(name, "GPU-0", "1", f"{T0}.9999"),
                line(name, "GPU-0", "2", f'{T0 + 1} # {{trace="x"}} 0.5'),
                line(name, "GPU-0", "1_0", T0 + 2),
                line(name, "GPU-0", "+3.5E0", T0 + 3),
                f'{name}{{UUID="GPU-0",Hostname="n1"}} 7',
                f'{name}{{UUID="GPU-0",Hostname="n1}} 7 {T0}',
                f'{name}{{Hostname="n1"}} 7 {T0}',
                line(name, "GPU-0", "8", 12),
                line("DCGM_FI_DEV_VGPU_LICENSE_STATUS", "GPU-0", "0", T0),
                f"acme 1 {T0}",
                f"acme 2 {T0}",
                "# EOF",
            ]
        )
    )
    result = stage_frame(path, tmp_path / "live")
    values = {ms - T0 * 1000: row["gpu_temp_c"] for (_, ms), row in as_plain(staged(tmp_path / "live")).items()}
    assert values == {999: 1.0, 1000: 2.0, 3000: 3.5}
    account = result["account"]
    assert (account.read, account.used, account.unaccounted) == (11, 3, 0)
    assert account.left_out == {
        BAD_LINE: 2,
        NO_TIME: 1,
        BAD_TIME: 1,
        f"{name}: its labels do not name a GPU and a node": 1,
        "DCGM_FI_DEV_VGPU_LICENSE_STATUS: known, and not used": 1,
        "acme: no channel": 2,
    }
    assert account.examples[BAD_LINE].startswith("line 3: ")


def test_a_second_run_lands_nothing_even_after_the_files_were_compacted(tmp_path: Path) -> None:
    path, live = tmp_path / "d.om", tmp_path / "live"
    path.write_text(dump())
    first = stage_frame(path, live)
    for file in (live / "samples").iterdir():
        file.unlink()
    again = stage_frame(path, live)
    assert (again["rows staged"], again["files staged"], staged(live)) == (0, 0, [])
    assert {key: again[key] for key in ("samples", "series", "gpus")}.items() <= first.items()
    other = stage_frame(path, live, SourceMapping(scale={"gpu_temp_c": 2.0}))
    assert other["rows staged"] == first["rows staged"]


@pytest.mark.parametrize("stop_at", [1, 3, 5, 9])
def test_a_run_that_was_killed_anywhere_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int) -> None:
    path, live, clean = tmp_path / "d.om", tmp_path / "live", tmp_path / "clean"
    path.write_text(dump(times=30))
    stage_frame(path, clean, held_samples=40)
    calls = 0

    class Killed(BaseException):
        pass

    def killing(whole: Any) -> Any:
        def wrapped(*args: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == stop_at:
                raise Killed
            return whole(*args, **more)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(StagingFolder, "stage", killing(StagingFolder.stage))
        with pytest.raises(Killed):
            stage_frame(path, live, held_samples=40)
    stage_frame(path, live, held_samples=40)
    assert staged(live) == staged(clean)
    names = [sorted(path.name for path in (root / "samples").iterdir()) for root in (live, clean)]
    assert names[0] == names[1]


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    def refusal(name: str, content: bytes | None) -> str:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError) as error:
            stage_frame(tmp_path / name, tmp_path / "live")
        return str(error.value).replace(f"{tmp_path}/", "")

    assert refusal("none.om", None) == "the file cannot be read: No such file or directory (none.om). Give a dump."
    assert refusal("e.om", b"").endswith("with --mapping. It is empty.")
    assert "It has acme: no channel (2 lines)" in refusal("a.om", b"acme 1 1772323200\nacme 1 1772323201\n")
    assert "a line cannot be read: line 1" in refusal("b.om", b"{{{ 1 2\n")
    whole = gzip.compress(dump().encode())
    assert refusal("c.om.gz", whole[: len(whole) // 2]).startswith("the file is damaged or truncated")
    assert refusal("z.om.zst", b"no zstd at all").startswith("the file is damaged or truncated")
    assert "a line is longer than 1048576 bytes" in refusal("l.om", b"x" * 9_000_000)
    assert {path.suffix for path in (tmp_path / "live" / "state").iterdir()} <= {".lock"}


def test_the_verb_lands_and_reports_what_was_left_out(tmp_path: Path) -> None:
    (tmp_path / "d.om").write_text(dump(gpus=1, times=4))
    arguments = ["collect", "openmetrics", str(tmp_path / "d.om"), "--dataset", str(tmp_path / "fleet"), "--json"]
    result = invoke(*arguments)
    assert '"rows staged": 4' in result.output
    assert len(staged(tmp_path / "fleet.live")) == 4


def test_rises_of_the_exporters_xid_counts_are_events(tmp_path: Path) -> None:
    counts = [(600, 1), (630, 1), (86_400 * 2, 1), (86_400 * 2 + 30, 2)]
    text = [line(METRICS[0], "GPU-0", "1", T0 + seconds) for seconds in range(0, 86_400 * 2 + 60, 300)]
    text += [
        line("DCGM_EXP_XID_ERRORS_COUNT", "GPU-0", str(n), T0 + s).replace("{", '{xid="79",', 1) for s, n in counts
    ]
    path, live = tmp_path / "d.om", tmp_path / "live"
    path.write_text("\n".join(text))
    result = stage_frame(path, live, held_samples=100)
    rises = [(round(row["timestamp"].timestamp()) - T0, row["code"]) for row in staged(live, "events")]
    assert rises == [(600, "79"), (86_400 * 2, "79"), (86_400 * 2 + 30, "79")]
    assert result["XID events staged"] == 3
