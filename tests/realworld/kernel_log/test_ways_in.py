"""One kernel log gives the same events by each way in, whatever its lines; hostile logs end in counts, quickly."""

import gzip
import json
import lzma
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foundation.errors import InputError
from telemetry.collect.kernel_log import collect_kernel_log
from telemetry.collect.outbox import Outbox
from telemetry.kernel_log.catalogue import drivers
from telemetry.kernel_log.importing import parse_kernel_log, read_lines
from telemetry.kernel_log.log_files import LogFiles
from telemetry.kernel_log.reader import TABLE
from telemetry.staging.folder import StagingFolder
from tests.clock import Clock
from tests.realworld.hostile import damaged
from tests.telemetry.collect.builders import staged, staging

NOW = datetime(2026, 3, 2, tzinfo=UTC)
EXAMPLES = [rule.example for driver in drivers() for rule in driver.rules] + [
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=x, GPU has fallen off the bus.",
    "NVRM: Xid (PCI:0000:0a:00): 31, pid=1, name=x, Ch 8",
    "usb 1-1: new high-speed USB device",
    "NVRM: a message without a rule",
]
COLUMNS = ["timestamp", "node", "gpu", "pci_bus_id", "type", "code", "detail"]


def stamped(when: datetime, form: int, message: str) -> str:
    message = message.replace("\n", "#012")
    return [
        f"{when.isoformat()} h1 kernel: {message}",
        f"{when:%b %d %H:%M:%S} h1 kernel: {message}",
        f"kern  :err   : [{when:%a %b %d %H:%M:%S %Y}] {message}",
        f"{when.isoformat()} stderr F [12.5] {message}",
        f"{when.timestamp():.6f} h1 kernel: {message}",
        json.dumps({"log": message + "\n", "time": when.isoformat()}),
        json.dumps(journal := {
            "__REALTIME_TIMESTAMP": str(int(when.timestamp() * 1e6)), "_HOSTNAME": "h1", "MESSAGE": message,
        }),
        json.dumps(journal, indent="\t"),
    ][form]  # fmt: skip


logs = st.lists(st.tuples(st.sampled_from(EXAMPLES), st.integers(0, 7), st.integers(0, 90)), min_size=1, max_size=30)


def collected(folder: Path, log: Path) -> tuple[StagingFolder, int]:
    where = staging(folder)
    with Outbox(where, "kernel-log") as outbox:
        accounting = collect_kernel_log(
            outbox,
            lambda position: LogFiles([log], position, clock=Clock(NOW), zone=UTC, once=True, sleep=lambda _: None),
            node="h1",
            fixed=False,
            clock=Clock(NOW),
            stop=lambda _seconds: False,
            once=True,
        )
    assert accounting.tables[TABLE].unaccounted == 0
    return where, accounting.tables[TABLE].read


@given(logs)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_importing_and_collecting_give_the_same_events(tmp_path_factory: pytest.TempPathFactory, parts: list) -> None:
    folder = tmp_path_factory.mktemp("ways")
    log, when, lines = folder / "kernel.log", datetime(2026, 3, 1, 0, 0, tzinfo=UTC), []
    for message, form, seconds in parts:
        when += timedelta(seconds=seconds)
        lines.append(stamped(when, form, message))
    log.write_text("\n".join(lines) + "\n")
    os.utime(log, (NOW.timestamp() - 3600, NOW.timestamp() - 3600))
    read = parse_kernel_log(read_lines(log), node="h1", timezone=UTC, reference_time=NOW)
    where, n_lines = collected(folder, log)
    found = pd.DataFrame(staged(where), columns=COLUMNS)
    found["timestamp"] = pd.to_datetime(found["timestamp"], utc=True).astype("datetime64[ms, UTC]")
    expected = read.events[COLUMNS].astype(object).where(read.events[COLUMNS].notna(), None)
    assert found.astype(object).where(found.notna(), None).to_dict("records") == expected.to_dict("records")
    counted = sum(1 + line.count("#012") + line.count("\n") for line in lines)
    assert n_lines == read.accounting.tables[TABLE].read == counted
    assert read.accounting.tables[TABLE].unaccounted == 0


def test_ten_thousand_broken_lines_are_counted() -> None:
    seeds = [stamped(NOW, form, message).encode() for form in range(7) for message in EXAMPLES[::3]]
    broken = (damaged(seeds, number).decode("utf-8", "surrogateescape") for number in range(10_000))
    lines = [line.replace("\n", " ") for line in broken]
    log = parse_kernel_log(lines, node="h", timezone=UTC, reference_time=NOW, boot_time=NOW)
    account = log.accounting.tables[TABLE]
    assert account.unaccounted == 0
    assert account.read >= 10_000
    assert account.used > 2000
    assert len(log.events) > 100
    log.events["detail"].dropna().str.encode("utf-8")


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid " * 100_000,
        "[" * 500_000 + "NVRM: Xid (PCI:0000:10:00): 79",
        '{"a":' * 50_000 + "1" + "}" * 50_000,
        '{"log": "NVRM: Xid (PCI:0000:10:00): 79, x", "time": 1e400}',
        '{"log": "NVRM: Xid (PCI:0000:10:00): 79, x", "time": ' + "9" * 5000 + "}",
        "Mar  1 02:20:00 " * 50_000 + "NVRM: Xid (PCI:0000:10:00): 79, x",
        "nvidia-nvswitch0: SXid (PCI:" * 30_000,
        "amdgpu 0000:10:00.0: " * 40_000,
        " " * 1_000_000 + "NVRM:",
    ],
    ids=range(9),
)
def test_a_hostile_line_takes_little_time(line: str) -> None:
    began = time.process_time()
    log = parse_kernel_log([line[: 1 << 20]], node="h", timezone=UTC, reference_time=NOW, boot_time=NOW)
    assert log.accounting.tables[TABLE].unaccounted == 0
    assert time.process_time() - began < 5


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kernel.log").write_bytes(b"0" * (65 << 20))
    with pytest.raises(InputError, match="longer than 64 MiB"):
        parse_kernel_log(read_lines(tmp_path / "kernel.log"), node="h")


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst", ".lz4"])
def test_packed_logs_are_read(tmp_path: Path, suffix: str) -> None:
    import bz2

    import pyarrow as pa

    text = f"2026-03-01T00:00:00Z h kernel: {EXAMPLES[-3]}\n".encode()
    packed = {
        ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress,
        ".zst": lambda content: pa.compress(content, "zstd", asbytes=True),
    }  # fmt: skip
    log = tmp_path / f"kernel.log{suffix}"
    if suffix in packed:
        log.write_bytes(packed[suffix](text))
    else:
        with pa.output_stream(str(log)) as stream:
            stream.write(text)
    assert parse_kernel_log(read_lines(log)).events["code"].tolist() == ["31"]


def test_a_pipe_is_no_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kernel.log")
    with pytest.raises(InputError, match="not a regular file"):
        list(read_lines(tmp_path / "kernel.log"))
    with pytest.raises(InputError, match="not a regular file"):
        LogFiles([tmp_path / "kernel.log"], {}, clock=Clock(NOW))
    with pytest.raises(InputError, match="not a regular file"):
        list(read_lines(Path("/dev/null")))


def test_a_log_in_utf_16_is_read(tmp_path: Path) -> None:
    log = tmp_path / "kernel.log"
    log.write_text(f"2026-03-01T00:00:00Z h kernel: {EXAMPLES[-3]}\r\n", encoding="utf-16")
    assert parse_kernel_log(read_lines(log)).events["code"].tolist() == ["31"]
