"""Files that are no tables, and tables made to exhaust a reader: a clear error or a counted reason, at once."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import resource
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from foundation.errors import InputError
from foundation.server.token_file import TokenFile, digest_of
from foundation.yaml import read_yaml
from scheduler.file import FileScheduler
from scheduler.ports.clock import SystemClock
from telemetry.collect.diagnostics import read_gpu_names
from telemetry.collect.scraping.targets import read_targets
from telemetry.doctor.series_source import observe_file
from telemetry.importing.files.sources import expand_sources
from telemetry.importing.files.tables import column_names, read_batches
from telemetry.importing.instants import parse_instants
from telemetry.importing.mapping import TimeFormat, load_mapping
from telemetry.importing.quarantine import Quarantine
from telemetry.kernel_log.importing import read_lines
from telemetry.values.dates import read_dates
from telemetry.values.numbers import read_numbers
from tests.realworld.hostile import damaged

FUZZED = 10_000


def rows_of(path: Path) -> tuple[int, Quarantine]:
    quarantine = Quarantine(None)
    return sum(len(batch.rows) for batch in read_batches(path, "samples", quarantine)), quarantine


@pytest.mark.parametrize("kind", ["fifo", "device", "socket", "proc"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = {"device": Path("/dev/zero"), "proc": Path("/proc/self/status")}.get(kind, tmp_path / "samples.csv")
    if kind == "fifo":
        os.mkfifo(path)
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    with pytest.raises(InputError, match="not a regular file"):
        expand_sources((path,), "samples")


@pytest.mark.parametrize(
    "read",
    [
        load_mapping,
        read_gpu_names,
        lambda path: TokenFile(path, lambda line, _number, _location: (digest_of(line), True), ""),
        lambda path: read_targets([str(path)]),
        lambda path: observe_file(path, channels={}, now=datetime.now(UTC)),
        lambda path: FileScheduler(path, SystemClock()),
    ],
)
def test_no_file_beside_the_data_may_be_a_pipe(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a regular file"):
        read(tmp_path / "pipe")


def test_a_cell_of_a_megabyte_hides_no_time_of_day(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"Date,Time,Notes\n2026-11-01,10:00:00,{'a' * 300_000}\n")
    assert column_names(tmp_path / "a.csv") == ["Date", "Notes"]


PACKED = gzip.compress(b"x", mtime=0)
"""Without the time of packing: it becomes an id of a test, which has to be the same in each worker."""


@pytest.mark.parametrize("content", [b"PK\x03\x04\0\0", b"LPKSHHRH\0", b"\xd0\xcf\x11\xe0\xa1", PACKED])
def test_a_file_of_another_kind_is_no_kernel_log(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tickets.xlsx").write_bytes(content)
    with pytest.raises(InputError, match="not a text log"):
        list(read_lines(tmp_path / "tickets.xlsx"))


@pytest.mark.parametrize("text", ["a" * (2 << 20), ",".join(map(str, range(50_000))) + "\n1\n", ""])
def test_a_header_that_is_none_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError, match=r"header|empty"):
        column_names(tmp_path / "a.csv")


def test_a_long_header_is_read(tmp_path: Path) -> None:
    names = [f"column_{number:05d}" for number in range(10_000)]
    (tmp_path / "a.csv").write_text(",".join(names) + "\n" + ",".join("1" for _ in names) + "\n")
    assert column_names(tmp_path / "a.csv") == names
    assert rows_of(tmp_path / "a.csv")[0] == 1


@pytest.mark.parametrize(
    ("line", "good"),
    [
        ("[" * 100_000, 2),
        ('{"a":' * 5_000 + "1" + "}" * 5_000, 2),
        ('{"\\ud800": 1}', 3),
        ('{"a": 1e400}', 3),
        ('{"a": ' + "9" * 5_000 + "}", 2),
        ("nonsense", 2),
        ("[1]", 2),
    ],
)
def test_one_bad_line_of_json_does_not_stop_the_next(tmp_path: Path, line: str, good: int) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' + line + '\n{"a": 2}\n')
    rows, quarantine = rows_of(tmp_path / "a.jsonl")
    assert rows == good
    assert quarantine.counts.total() == 3 - good


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('{"a": 1} x\n{"a": 2}\n{"a": 3}\n', 3, 1),
        ('{\n "a": 1\n}\nno GPU was found\n{\n "a": 2\n}\n{\n "a": 3\n}\n', 3, 1),
        ('{\n "a": 1\n}\n]\n{\n "a": 2\n}\n', 2, 1),
        ('[{"a": 1}]\n[{"a": 2}]\n', 2, 0),
        ('[\n{"a": 1}\n]\n\n[\n{"a": 2},\n{"a": 3}\n]', 3, 0),
        ('{"data": [\n{"a": 1}\n],\n"next": ["b"]}', 1, 0),
        ('[\n{"a": 1},\n{"a": 2}\n{\n "items": [\n{"a": 3}\n]\n}', 3, 1),
        ('Sun\n{\n "jobs": [\n{"a": 1}\n],\n "errors": []\n}\n{\n "jobs": []\n}\n{"jobs": [{"a": 2}]}', 2, 1),
        ('{"items": [{"a": 1}], "kind": "List"}{"items": [{"a": 2}, {"a": 3}]}', 3, 0),
        ('[{"hits": {"total": 1, "hits": [{"a": 1}]}}, {"hits": {"hits": [{"a": 2}]}}]', 2, 0),
        ('{"incidents": [{"a": 1}], "alerts": [{"b": 1}, {"b": 2}], "members": []}', 1, 1),
        ('{"host": "a", "alerts": [{"b": 1}, {"b": 2}]}\n{"created": "b", "alerts": []}', 2, 0),
    ],
)
def test_what_a_tool_appends_to_one_file_is_read_past_lines_of_no_json(tmp_path, text, good, bad):
    (tmp_path / "a.json").write_text(text)
    rows, quarantine = rows_of(tmp_path / "a.json")
    assert (rows, quarantine.counts.total()) == (good, bad)


def test_a_small_archive_of_many_rows_takes_little_memory(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as stream:
        block = b'{"timestamp": 1, "value": 2, "other": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}\n' * 10_000
        for _ in range(20):
            stream.write(block)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert rows_of(tmp_path / "a.jsonl.gz")[0] == 200_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700 << 10


MEBIBYTE = 1 << 20
PACKERS: dict[str, Callable[[Path], Any]] = {
    ".gz": lambda path: gzip.GzipFile(path, "wb"),
    ".bz2": lambda path: bz2.BZ2File(path, "wb"),
    ".xz": lambda path: lzma.LZMAFile(path, "wb", preset=0),  # noqa: SIM115
    ".zst": lambda path: pa.CompressedOutputStream(path, "zstd"),
}


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize(
    ("name", "line", "filling"),
    [("a.csv", b"a,b\n", b"1,1\n" * 250), ("a.jsonl", b'{"a": 1}', b" " * 1000)],
)
def test_a_decompression_bomb_is_an_error(tmp_path: Path, name: str, line: bytes, filling: bytes, suffix: str) -> None:
    path = tmp_path / f"{name}{suffix}"
    with PACKERS[suffix](path) as stream:
        stream.write(line)
        for _ in range(40):
            stream.write(filling * 1000)
    with pytest.raises(InputError, match="decompression bomb"):
        rows_of(path)


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_flood_of_one_message_is_no_decompression_bomb(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.log{suffix}"
    line = b"Nov 28 10:00:00 node-1 kernel: NVRM: Xid (PCI:0000:3b:00): 63, pid=1234, Row Remapper: pending\n"
    with PACKERS[suffix](path) as stream:
        stream.write(line * 200_000)
    assert sum(1 for _ in read_lines(path)) == 200_000


TEXT = "a" * MEBIBYTE
FLOODS = {
    "objects in one value": ("a.jsonl", '{"a": [' + "{}," * (MEBIBYTE + 9) + "{}]}", "keys, objects and lists"),
    "keys in one value": ("a.jsonl", "{" + '"a":1,' * (MEBIBYTE + 9) + '"b":1}', "keys, objects and lists"),
    "empty objects": ("a.jsonl", "{}\n" * 200_002, "no JSON objects with keys"),
    "numbers": ("a.json", "[" + "0," * 200_002 + "0]", "no JSON objects with keys"),
    "malformed rows": ("a.csv", "a,b\n" + "1\n" * 200_002, "Expected 2 columns"),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_is_an_error_within_10_s_and_1_gb(tmp_path: Path, kind: str) -> None:
    name, content, problem = FLOODS[kind]
    (tmp_path / name).write_text(content)
    memory, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(InputError, match=problem):
        rows_of(tmp_path / name)
    assert time.process_time() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 700 << 10


def test_text_that_many_devices_of_one_object_share_is_not_repeated_without_end(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"a": TEXT, "gpus": [{"b": number} for number in range(2_000)]}))
    rows, quarantine = rows_of(tmp_path / "a.json")
    assert rows == 64
    assert quarantine.counts.total() == 1


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_one_endless_value_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('["' + "a" * (20 << 20) if name == "a.json" else '{"a": "' + "a" * (20 << 20))
    with pytest.raises(InputError, match="larger than 16 MiB"):
        rows_of(tmp_path / name)


def test_a_list_is_read_as_it_streams(tmp_path: Path) -> None:
    records = [{"a": number, "b": {"c": "x" * 20}} for number in range(30_000)]
    (tmp_path / "a.json").write_text(json.dumps(records, indent=1))
    assert rows_of(tmp_path / "a.json")[0] == 30_000
    assert column_names(tmp_path / "a.json") == ["a", "b.c"]


def test_long_responses_are_read_as_they_stream(tmp_path: Path) -> None:
    rows = [{"a": number, "items": [{"b": "x" * 20}], "node": "n1"} for number in range(20_000)]
    (tmp_path / "a.json").write_text(json.dumps({"meta": {"c": 1}, "jobs": rows, "alerts": rows[:1]}, indent=1) * 2)
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, rows)))
    for name, good, bad in (("a.json", 40_000, 2), ("lines.json", 20_000, 0)):
        count, quarantine = rows_of(tmp_path / name)
        assert (count, quarantine.counts.total()) == (good, bad)
        assert column_names(tmp_path / name) == ["a", "items", "node"]


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        "samples: " + "[" * 20_000,
        "a: &a [*a]",
        "samples: {scale: {power_w: .inf}}",
        "samples: {columns: {a: &x {b: *x}}}",
        "kernel_log: {boot_time: 2026-13-45}",
        "samples: {scale: {power_w: " + "9" * 5_000 + "}}",
        "samples: {columns: [" + "a, " * 20_000 + "]}",
        "samples: {columns: {a: b}}  # " + "x" * (1 << 20),
        "samples: {columns: {a: b}}  # " + "x" * (16 << 20),
    ],
)  # fmt: skip
def test_a_mapping_that_explodes_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "mapping.yaml").write_text(text)
    start = time.process_time()
    with pytest.raises(InputError) as caught:
        load_mapping(tmp_path / "mapping.yaml")
    assert len(str(caught.value)) < 10_000
    assert time.process_time() - start < 10


SEEDS = [
    b'timestamp,uuid,power.draw [W]\n2026/03/01 00:00:00.123, GPU-0, 350.12 W\n"a\nb",,[N/A]\n',
    b'{"t": 1, "a": {"b": [1, null, "x"]}}\n{"t": "2026-03-01"}\n',
    b'[{"t": 1}, {"t": 2, "u": "\\ud800"}, 7]',
    b"a;b;c\n1,5;2;3\n;;\na;b;c\n",
]


# Arrow decodes a malformed row before it hands it over; where it cannot, it reports that and refuses the file.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_no_bytes_make_a_reader_fail_otherwise_than_with_an_error_of_input(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    for number in range(FUZZED):
        content = damaged(SEEDS, number)
        path.write_bytes(content if number % 10 else content[: len(content) // 2] + b"\xff\xfe")
        with contextlib.suppress(InputError):
            rows_of(path)


def test_damaged_parquet_is_an_error_or_rows(tmp_path: Path) -> None:
    path, whole = tmp_path / "a.parquet", io.BytesIO()
    pq.write_table(pa.table({"timestamp": [1, 2], "gpu": ["a", "b"], "power_w": [1.0, None]}), whole)
    for number in range(FUZZED):  # 0.6 ms each
        path.write_bytes(damaged([whole.getvalue()], number))
        with contextlib.suppress(InputError):
            rows_of(path)


TEXTS: tuple[Callable[[list[str]], object], ...] = (
    lambda texts: read_numbers(pa.chunked_array([pa.array(texts)]), "W"),
    lambda texts: read_dates(texts, "dmy"),
    lambda texts: parse_instants(pa.chunked_array([pa.array(texts)]), TimeFormat(order="dmy", unit="s"), ""),
)


@pytest.mark.parametrize("reader", TEXTS)
def test_no_text_makes_a_reader_of_values_fail(reader: Callable[[list[str]], object]) -> None:
    seeds = [b"350.12 W", b"28/11/2026 14:05", b"Nov 1, 2026 02:20 PM CET", b"0x4", b"[N/A]", b"1.234,5", b"1e5"]
    texts = [damaged([*seeds, b"20261101T000000Z"], number).decode("utf-8", "replace") for number in range(FUZZED)]
    for start in range(0, FUZZED, 500):
        reader(texts[start : start + 500])


def test_no_text_makes_the_reader_of_yaml_fail() -> None:
    for number in range(FUZZED):
        text = damaged([b"samples: {columns: {a: b, c: &x [1]}}\nspan: *x\n"], number).decode("utf-8", "replace")
        text = text.replace("[" * 99, "")  # deep nesting takes half a second, and has a test of its own
        with contextlib.suppress(yaml.YAMLError, ValueError):
            read_yaml(text)
