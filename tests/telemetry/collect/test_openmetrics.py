"""Dumps: rows equal those of a plain reading, whatever the order, the size of parts and the interruptions."""

import csv
import gzip
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foundation.errors import InputError
from telemetry.accounting import Accounting
from telemetry.bounds import BAD_TIME
from telemetry.collect.openmetrics import NO_TIME, stage_dump
from telemetry.collect.series.exposition import BAD_LINE, Sample, parse_line
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


def attributes(labels: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"key": name, "value": {"intValue" if isinstance(value, int) else "stringValue": str(value)}}
        for name, value in labels.items()
    ]


def received(sample: Sample) -> dict[str, Any]:
    point = {"attributes": attributes(dict(sample.labels)), "timeUnixNano": str((sample.timestamp_ms or 0) * 10**6)}
    kind = "sum" if "TOTAL" in sample.name else "gauge"
    return {"name": sample.name, kind: {"dataPoints": [point | {"asDouble": sample.value}]}}


def exports(text: str) -> dict[str, str]:
    """Write the series of a dump as other tools export them."""
    series: dict[str, list[tuple[int, float]]] = {}
    metrics: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if (sample := parse_line(line, openmetrics=True)) is not None:
            head = line.rsplit(None, 2)[0]
            metrics[head] = {"__name__": sample.name, **sample.labels}
            series.setdefault(head, []).append((sample.timestamp_ms or 0, sample.value))
    ranges = [
        {"metric": metrics[head], "values": [[ms / 1000, str(value)] for ms, value in points]}
        for head, points in series.items()
    ]
    answers = [
        {"status": "success", "data": {"resultType": "matrix", "result": part}} for part in (ranges[:4], ranges[4:])
    ]
    times = sorted({ms for points in series.values() for ms, _ in points})
    values = {head: dict(points) for head, points in series.items()}
    stamps = {ms: datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds") for ms in times}
    wide, rows = io.StringIO(), io.StringIO()
    csv.writer(wide).writerows(
        [["Time", *series], *([ms, *(values[head].get(ms, "") for head in series)] for ms in times)]
    )
    csv.writer(rows, delimiter=";").writerows(
        [["Time", "Metric", "Value"], *([stamps[ms], head, value] for head in series for ms, value in series[head])]
    )
    requests = [
        {"resourceMetrics": [{"resource": {}, "scopeMetrics": [{"scope": {}, "metrics": [received(sample)]}]}]}
        for sample in filter(None, (parse_line(line, openmetrics=True) for line in text.splitlines()))
    ]
    return {
        "otlp.json": "\n".join(map(json.dumps, requests)),
        "range.json": json.dumps({"status": "success", "data": {"resultType": "matrix", "result": ranges}}),
        "ranges.jsonl": "\n".join(map(json.dumps, answers)),
        "ranges.json": "\n".join(json.dumps(answer, indent=2) for answer in answers),
        "promtool.json": json.dumps(ranges, indent=1),
        "victoria.jsonl": "\n".join(
            json.dumps(
                {"metric": metrics[head], "values": [v for _, v in points], "timestamps": [ms for ms, _ in points]}
            )
            for head, points in series.items()
        ),
        "grafana.csv": "\ufeffsep=,\n" + wide.getvalue(),
        "grafana rows.csv": rows.getvalue(),
    }


@pytest.mark.parametrize("name", exports(dump(1, 1)))
def test_exports_of_other_tools_give_the_rows_of_the_dump(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(exports(dump())[name])
    result = stage_frame(path, tmp_path / "live")
    assert as_plain(staged(tmp_path / "live")) == plain(dump())
    assert (result["samples"], result["account"].unaccounted, result["account"].left_out.total()) == (450, 0, 0)
    with pytest.raises(InputError, match="export of time series"):
        column_names(path)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("named.csv", '"Time","GPU 0 {{a}}","GPU{x=""1""}"\n1772323200000,45 °C,46\n', "no samples of a known channel"),
        ("naive.csv", '"Time","GPU_TEMP{UUID=""GPU-0""}"\n2026-03-01 00:00:00,45\n', "no time zone"),
        ("other.json", '{"status": "success", "data": {"result": [{"metric": 7}, {}, 7]}}', "cannot be read"),
        ("cut.json", '{"status": "success", "data": {"result": [{"metric": {"__name__": "up"}, "val', "cannot be read"),
    ],
)
def test_exports_that_cannot_be_used_say_why(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=problem):
        stage_frame(tmp_path / name, tmp_path / "live")


HW = {"host.name": "n1", "service.name": "gpu-collector"}
UUID = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.mark.parametrize(
    ("resource", "points", "gpu", "row", "bad"),
    [
        (
            {**HW, "hw.id": UUID, "hw.type": "gpu"},
            [
                *(("hw.gpu.utilization", "1", {"hw.gpu.task": "general"}, 0.75), ("hw.power", "W", {}, 300.5)),
                *(("hw.temperature", "Cel", {}, 61), ("hw.gpu.memory.usage", "By", {}, 2**30)),
                *(("hw.gpu.utilization", "1", {"hw.gpu.task": "copy"}, 0.5), ("hw.energy", "J", {}, 12.5)),
            ],
            UUID,
            {"gpu_util_pct": 75, "power_w": 300.5, "gpu_temp_c": 61, "fb_used_mib": 1024, "energy_mj": 12_500},
            0,
        ),
        (
            {**HW, "k8s.node.name": "n1", "host.name": "otel-collector-x7k2p", "gpu.uuid": UUID, "gpu.number": 3},
            [
                *(("gpu.dcgm.clock.frequency", "Hz", {}, 1.41e9), ("gpu.dcgm.utilization", "1", {}, 0.5)),
                *(("gpu.dcgm.memory.bytes_used", "By", {"gpu.memory.state": "free"}, 2**20),),
            ],
            UUID,
            {"sm_clock_mhz": 1410, "gr_engine_active_ratio": 0.5, "fb_free_mib": 1},
            0,
        ),
        ({**HW, "hw.id": 2, "hw.type": "gpu"}, [("hw.power", "W", {}, 300)], "n1@slot-2", {"power_w": 300}, 0),
        (
            {**HW, "gpu.uuid": UUID},
            [("hw.gpu.temperature", "W", {}, 9), ("hw.gpu.power.draw", "kW", {}, 0.25)],
            UUID,
            {"power_w": 250},
            1,
        ),
    ],
)
def test_metrics_of_opentelemetry_are_channels_in_their_units(tmp_path, resource, points, gpu, row, bad):
    def metric(name: str, unit: str, labels: dict[str, Any], value: float, **more: Any) -> dict[str, Any]:
        point = {"attributes": attributes(labels), "timeUnixNano": str(T0 * 10**9), "asDouble": value}
        return {"name": name, "unit": unit, "sum": {"dataPoints": [7, point, point | {"flags": 1}], **more}}

    other = metric("hw.gpu.io", "By", {}, 7)
    scope = {"scope": {"name": "gpu"}, "metrics": [{"name": "x"}, other, *(metric(*point) for point in points)]}
    request = {"resourceMetrics": [{"resource": {"attributes": attributes(resource)}, "scopeMetrics": [scope]}]}
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps(request) + "\n" + json.dumps({"resourceMetrics": [7]}) + "\n")
    account = stage_frame(path, tmp_path / "live")["account"]
    assert as_plain(staged(tmp_path / "live")) == {(gpu, T0 * 1000): row}
    assert {entry["node"] for entry in staged(tmp_path / "live")} == {"n1"}
    assert (account.read, account.used, account.unaccounted) == (2 * len(points) + 4, len(row), 0)
    assert account.left_out[BAD_LINE] == len(points) + 3 + bad, "no request, metric, data point, unit of the quantity"
    assert account.left_out["hw_gpu_io: no channel"] == 1


def test_deltas_of_opentelemetry_add_up_to_a_counter(tmp_path: Path) -> None:
    """One that repeats is left out; a series that another file continues begins at zero again, which is a reset."""

    def request(*deltas: tuple[int, int, float]) -> str:
        points = [
            {"asDouble": value, "timeUnixNano": (T0 + end) * 10**9, "startTimeUnixNano": (T0 + start) * 10**9}
            for start, end, value in deltas
        ]
        content = {"dataPoints": points, "aggregationTemporality": 1, "isMonotonic": True}
        scope = {"metrics": [{"name": "hw.energy", "unit": "J", "sum": content}]}
        resource = {"attributes": attributes({**HW, "hw.id": UUID, "hw.type": "gpu"})}
        return json.dumps({"resourceMetrics": [{"resource": resource, "scopeMetrics": [scope]}]}) + "\n"

    path = tmp_path / "metrics.json"
    path.write_text(request((0, 60, 2), (0, 60, 2)) + request((60, 120, 0.5), (300, 360, 4)))
    account = stage_frame(path, tmp_path / "live")["account"]
    energy = {time - T0 * 1000: row["energy_mj"] for (_, time), row in as_plain(staged(tmp_path / "live")).items()}
    assert energy == {0: 0, 60_000: 2000, 120_000: 2500, 360_000: 6500}
    assert account.left_out == {BAD_LINE: 1}


@pytest.mark.parametrize(
    ("metric", "value", "channel", "expected"),
    [
        ("nvidia_smi_temperature_gpu", 61, "gpu_temp_c", 61),
        ("nvidia_smi_utilization_gpu_ratio", 0.75, "gpu_util_pct", 75),
        ("nvidia_smi_memory_used_bytes", 2**30, "fb_used_mib", 1024),
        ("nvidia_smi_clocks_current_sm_clock_hz", 1.98e9, "sm_clock_mhz", 1980),
        ("nvidia_smi_remapped_rows_failure", 1, "row_remap_failure", 1),
        ("nvidia_smi_gpu_recovery_action", 4, "recovery_action", 4),
        ("nvidia_smi_pstate", 8, "pstate", 8),
        ("nvidia_smi_memory_used", 1024, "fb_used_mib", 1024),  # Telegraf's
        ("nvidia_gpu_power_usage_milliwatts", 350_500, "power_w", 350.5),
    ],
)
def test_metrics_of_exporters_around_nvidia_smi(tmp_path, metric, value, channel, expected):
    labels = 'uuid="11111111-2222-3333-4444-555555555555",instance="n1:9835"'
    (tmp_path / "a.om").write_text(f"{metric}{{{labels}}} {value} {T0}\n")
    stage_frame(tmp_path / "a.om", tmp_path / "live")
    (row,) = as_plain(staged(tmp_path / "live")).values()
    assert row == {channel: pytest.approx(expected)}


def test_errors_and_xids_of_the_ops_agent(tmp_path: Path) -> None:
    def metric(name: str, labels: dict[str, Any], value: int, seconds: int) -> dict[str, Any]:
        point = {"attributes": attributes(labels), "timeUnixNano": str((T0 + seconds) * 10**9), "asInt": str(value)}
        return {"name": name, "unit": "{err}", "sum": {"dataPoints": [point]}}

    metrics = [metric("gpu.dcgm.ecc_errors", {"gpu.error.type": "dbe"}, 3 + turn, 60 * turn) for turn in range(3)]
    metrics += [metric("gpu.dcgm.xid_errors", {"gpu.error.xid": 79}, turn, 60 * turn) for turn in (1, 2)]
    resource = {"attributes": attributes({**HW, "gpu.uuid": UUID, "gpu.number": 0})}
    request = {"resourceMetrics": [{"resource": resource, "scopeMetrics": [{"metrics": metrics}]}]}
    (tmp_path / "metrics.json").write_text(json.dumps(request))
    stage_frame(tmp_path / "metrics.json", tmp_path / "live")
    rows = as_plain(staged(tmp_path / "live"))
    assert [row["ecc_dbe_volatile_total"] for row in rows.values()] == [3, 4, 5]
    assert {(row["gpu"], row["code"]) for row in staged(tmp_path / "live", "events")} == {(UUID, "79")}


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
    assert "a line is longer than 1,048,576 characters" in refusal("l.om", b"x" * 9_000_000)
    open_quote = b'Time,"power{gpu=""0""}"\n1772323200000,"' + b"1" * 200_000
    assert "It has line over the length limit (1 line)" in refusal("g.csv", open_quote)
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
