import json
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest

from foundation.errors import InputError
from telemetry.dataset.schema import ms_of
from telemetry.importing.events import place_events
from telemetry.importing.inventory import InstallationIndex
from telemetry.kernel_log.catalogue import parse_xid_message
from telemetry.kernel_log.importing import parse_kernel_log
from tests.telemetry.helpers import gpu, quarantine_of, run_import, samples_frame

FELL = "NVRM: Xid (PCI:0000:10:00): 79, pid=1234, name=python, GPU has fallen off the bus."
NEW_YEAR = datetime(2026, 1, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("2026-03-01T10:20:30Z kernel: " + FELL.replace("79", "9" * 5000), "no XID number or GPU"),
        (f"0001-01-01T00:00:00+05:00 kernel: {FELL}", "no usable timestamp"),
        (f"2026-03-01T10:20:30Z kernel: {FELL.replace('79', '%d')}", "no XID number or GPU"),
        (f"9999-12-31T23:59:59-05:00 kernel: {FELL}", "no usable timestamp"),
        (f"[99999999999.5] {FELL}", "no usable timestamp"),
        (f"2026-03-01T01:00:00+99:99 here kernel: {FELL}", "no usable timestamp"),
        (f"9999-12-31T23:59:59Z kernel: {FELL}", None),
        (json.dumps({"__REALTIME_TIMESTAMP": "1772360430000000", "_HOSTNAME": ["a", "b"], "MESSAGE": FELL}), None),
        (json.dumps({"__REALTIME_TIMESTAMP": "1772360430000000", "MESSAGE": f"{FELL} \ud800"}), None),
    ],
)
def test_a_line_that_cannot_be_meant_stops_no_other(line: str, problem: str | None):
    log = parse_kernel_log([f"2026-03-01T10:20:30Z kernel: {FELL}", line], node="here", boot_time=NEW_YEAR)
    assert [reason for _, _, reason in log.unparsed] == ([] if problem is None else [problem])
    assert log.events["node"].tolist() == ["here"] * (2 if problem is None else 1)
    log.events["detail"].str.encode("utf-8")


@pytest.mark.parametrize(
    ("message", "code", "bus", "detail"),
    [
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", "14", "00000000:03:00", "Channel 00000001"),
        ("NVRM: Xid (PCI:0000:04:00): 69", "69", "00000000:04:00", None),
        ("NVRM: Xid (PCI:0000:01:00): 31, pid=123", "31", "00000000:01:00", "pid=123"),
        ("NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
         "79", "00000000:05:00", "GPU has fallen off the bus."),
        ("NVRM: Xid (PCI:0008:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x0)",
         "149", "00000008:01:00", "NETIR_LINK_EVT Fatal link 01"),
        ("NVRM: Xid (PCI:0018:01:00): 145, pid=8, name=ray::Worker, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2",
         "145", "00000018:01:00", "RLW_RXPIPE Nonfatal link 13"),
        ("NVRM: Xid (PCI:0018:01:00): 149, NETIR Fatal XC0 i0 Link -1 (0x",
         "149", "00000018:01:00", "NETIR Fatal link -1"),
        ("NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from 0x4 (Drain) to 0x1 (GPU Reset)",
         "154", "00000008:01:00", "recovery action GPU Reset (0x1), was Drain (0x4)"),
    ],
)  # fmt: skip
def test_messages_of_every_driver_age(message: str, code: str, bus: str, detail: str | None):
    xid = parse_xid_message(message)
    assert (xid.code, xid.pci_bus_id, xid.detail) == (code, bus, detail)


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        (f"[ 12.5] {FELL}", ["seconds since boot", "line 1", "boot_time", "dmesg --time-format iso"]),
        (f"Mar  1 10:00:00 h kernel: {FELL}", ["no year", "reference_time"]),
        (f"[Sun Mar  1 10:20:30 2026] {FELL}", ["naive", "timezone: UTC"]),
        (f"2026-03-01T10:20:30Z {FELL}", ["does not name its node", "kernel_log: {node: NAME}"]),
    ],
)
def test_what_the_log_does_not_contain_must_be_given(line: str, texts: list[str]):
    with pytest.raises(InputError) as caught:
        parse_kernel_log([line])
    for text in texts:
        assert text in str(caught.value)


def inventory(*rows: tuple[str, str, str, str, str | None]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["gpu", "node", "pci_bus_id", "installed_at", "removed_at"])
    dates = {name: pd.to_datetime(frame[name], utc=True) for name in ("installed_at", "removed_at")}
    return frame.assign(**dates)


def located(installations: pd.DataFrame, *lines: tuple[str, str, str]) -> list[tuple[str | None, str]]:
    """GPU and node of an XID at each time, host and bus."""
    logged = [f"{when}T00:00:00Z {host} kernel: {FELL.replace('10:00', bus)}" for when, host, bus in lines]
    events = parse_kernel_log(logged).events
    text = {name: events[name].to_numpy(object, copy=True) for name in ("node", "gpu", "type", "pci_bus_id")}
    place_events(text, ms_of(events["timestamp"]), InstallationIndex(installations, "gpu"))
    return list(zip(text["gpu"], text["node"], strict=True))


def test_addresses_find_the_gpu_of_that_time():
    installations = inventory(
        ("old", "host-1.example", "00000000:10:00", "2026-01-01", "2026-02-01"),
        ("new", "host-1.example", "0000:10:00.0", "2026-02-01", None),
        ("other", "host-2", "10:00.0", "2026-01-01", None),
        ("a", "host-3", "00000000:3b:00", "2026-01-01", "2026-03-01"),
        ("b", "host-3", "00000000:3b:00", "2026-02-01", None),
    )
    asked = {
        ("2026-01-15", "host-1", "10:00"): ("old", "host-1.example"),
        ("2026-02-01", "host-1.example", "10:00"): ("new", "host-1.example"),
        ("2026-02-15", "host-2.example", "10:00"): ("other", "host-2"),
        ("2025-12-15", "host-1", "10:00"): (None, "host-1.example"),
        ("2026-02-15", "host-1", "11:00"): (None, "host-1.example"),
        ("2026-02-15", "host-10", "10:00"): (None, "host-10"),
        ("2026-02-15", "host-3", "3b:00"): (None, "host-3"),  # of two at once it is the node's
        ("2026-03-01", "host-3", "3b:00"): ("b", "host-3"),
    }
    for order in (installations, installations[::-1].reset_index(drop=True)):
        assert located(order, *asked) == list(asked.values())


def test_kernel_logs_are_event_sources(tmp_path: Path):
    (tmp_path / "messages.log").write_text(
        f"2026-03-01T00:20:00Z node-0 kernel: {FELL}\n"
        "2026-03-01T00:21:00Z node-0 kernel: NVRM: Xid (PCI:0000:99:00): 79, no such slot\n"
        "2026-03-01T00:22:00Z node-7 kernel: NVRM: Xid (PCI:0000:10:00): 79, no such node\n"
        "2026-03-01T00:23:00Z node-0 kernel: NVRM: Xid (oops): 1\n"
    )
    journal = {
        "__REALTIME_TIMESTAMP": "1772324430000000",
        "_HOSTNAME": "node-1",
        "MESSAGE": FELL.replace(": 79", ": 777"),
    }
    (tmp_path / "journal.jsonl").write_text(json.dumps(journal) + "\n")
    (tmp_path / "node-1.txt").write_text(f"[  60.0] {FELL.replace('10:00', '11:00')}\n")
    rules = "kernel_log: {boot_time: 2026-03-01T00:30:00Z}"
    files = [tmp_path / name for name in ("messages.log", "journal.jsonl", "node-1.txt")]
    result = run_import(tmp_path, samples=samples_frame(), events=files, mapping=rules)
    events = result.dataset.events().sort_values("timestamp")
    assert [None if pd.isna(name) else name for name in events["gpu"]] == [gpu(0), gpu(2), None, gpu(3)]
    assert events["node"].tolist() == ["node-0", "node-1", "node-0", "node-1"]
    assert events["code"].tolist() == ["79", "777", "79", "79"]
    assert result.quarantined == {"no XID number or GPU": 1, "unknown node": 1}
    assert result.counts["xids_without_a_gpu"] == 2
    assert set(quarantine_of(result)["file"]) == {"messages.log"}
    (tmp_path / "dmesg.log").write_text(f"[  60.0] {FELL}\n")
    with pytest.raises(InputError, match=r"does not name its node.*dmesg\.log, line 1"):
        run_import(tmp_path, events=[tmp_path / "dmesg.log"], mapping=rules, out="other")


def test_the_lines_of_a_real_driver_give_its_xids_and_the_gpu_that_it_names_before_them() -> None:
    lines = (Path(__file__).parents[2] / "data" / "nvml" / "h200-dmesg.log").read_text().splitlines()
    log = parse_kernel_log(lines, node="here", boot_time=NEW_YEAR)
    assert log.events["type"].tolist() == ["driver"] + ["xid"] * 6
    assert log.events["code"].tolist() == ["580.159.04", "31", "13", "13", "13", "43", "31"]
    assert log.events["gpu"].dropna().unique().tolist() == ["GPU-0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"]
    assert log.unparsed == []
