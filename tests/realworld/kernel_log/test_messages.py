"""Kernel messages reach the dataset as the right events of the right GPU or node, and every line is counted."""

from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest

from features.config import LabelSection
from features.labels.incidents import find_incidents
from telemetry.kernel_log.catalogue import MessageCatalogue, drivers, shipped
from telemetry.kernel_log.importing import parse_kernel_log
from telemetry.kernel_log.reader import QUOTED
from tests.telemetry.helpers import gpu, run_import, samples_frame

G0, G1 = gpu(0), gpu(1)
REAL = Path(__file__).parents[4] / "shared" / "data" / "kernel-logs"


def line(minute: int, message: str) -> str:
    stamp = f"2026-03-01T{minute // 60:02}:{minute % 60:02}:00.000000+00:00"
    return f"{stamp} node-0 kernel: [{60 * minute}.000000] {message}"


def lines(*messages: str) -> list[str]:
    return [line(minute, message) for minute, message in enumerate(messages)]


def imported(tmp_path: Path, log: list[str], mapping: str | None = None) -> list[tuple[str | None, ...]]:
    (tmp_path / "kernel.log").write_text("\n".join(log) + "\n")
    result = run_import(tmp_path, events=[tmp_path / "kernel.log"], mapping=mapping)
    events = result.dataset.events().sort_values("timestamp", kind="stable")
    assert set(events["node"]) <= {"node-0"}
    found = events[["gpu", "type", "code"]].astype(object)
    return list(found.where(found.notna(), None).itertuples(index=False, name=None))


MESSAGES = {
    "lost": ("NVRM: GPU 0000:10:00.0: GPU has fallen off the bus.", G0, "failure", "fallen_off_the_bus"),
    "lost, at": ("NVRM: GPU at PCI:0000:11:00: GPU has fallen off the bus.", G1, "failure", "fallen_off_the_bus"),
    "lost, upper case": ("NVRM: GPU at 00000000:10:00.0 has fallen off the bus.", G0, "failure", "fallen_off_the_bus"),
    "lost, is lost": ("NVRM: GPU 0000:10:00.0: GPU is lost.", G0, "failure", "fallen_off_the_bus"),
    "lost, UUID only": (f"NVRM: {G1}: GPU has fallen off the bus.", G1, "failure", "fallen_off_the_bus"),
    "lost, no GPU": ("NVRM: GPU has fallen off the bus.", None, "failure", "fallen_off_the_bus"),
    "lost, one message": (
        "NVRM: The NVIDIA GPU 0000:11:00.0 (PCI ID: 10de:20b0)#012NVRM: installed in this system has#012"
        "NVRM: fallen off the bus and is not responding to commands.",
        G1, "failure", "fallen_off_the_bus",
    ),
    "nvidia-smi": (
        "healthcheck: Unable to determine the device handle for GPU 0000:10:00.0: Unknown Error",
        G0, "failure", "fallen_off_the_bus",
    ),
    "init": ("NVRM: GPU 0000:11:00.0: RmInitAdapter failed! (0x24:0x72:1568)", G1, "failure", "gpu_init_failed"),
    "init, old": ("NVRM: RmInitAdapter failed! (0x26:0xffff:1123)", None, "failure", "gpu_init_failed"),
    "init, minor": (
        "NVRM: rm_init_adapter failed for device bearing minor number 1", None, "failure", "gpu_init_failed"
    ),
    "probe": ("nvidia: probe of 0000:10:00.0 failed with error -1", G0, "failure", "gpu_init_failed"),
    "XID": ("NVRM: Xid (PCI:0000:10:00): 31, pid=1, name=x, Ch 8", G0, "xid", "31"),
    "XID, no PCI": ("NVRM: Xid (0000:10:00): 48, DBE", G0, "xid", "48"),
    "XID, UUID only": (f"NVRM: Xid ({G1}): 48, DBE", G1, "xid", "48"),
    "XID, MIG": ("NVRM: Xid (PCI:0000:10:00 GPU-I:05): 43, pid=7, name=x, Ch 8", G0, "xid", "43"),
    "XID, unknown": ("NVRM: Xid (PCI:0000:11:00): 99999, x", G1, "xid", "99999"),
    "SXid, fatal": (
        "nvidia-nvswitch3: SXid (PCI:0000:86:00.0): 20034, Fatal, Link 30 LTSSM Fault Up", None, "failure", "sxid_20034"
    ),
    "SXid, non-fatal": (
        "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 20009, Non-fatal, Link 28 RX Short Error Rate",
        None, "other", "sxid_20009",
    ),
    "Fabric Manager": (
        "[ERROR] [tid 841] detected NVSwitch fatal error 20034 on fid 0 on NVSwitch pci bus id 00000000:86:00.0",
        None, "failure", "sxid_20034",
    ),
    "driver": (
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.144.03  Mon Dec 30 17:44:08 UTC 2024",
        None, "driver", "550.144.03",
    ),
    "boot": ("Linux version 5.15.0-131-generic (buildd@lcy02) (gcc) #141-Ubuntu SMP", None, "other", "boot"),
    "AER, fatal": (
        "nvidia 0000:10:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Receiver ID)",
        G0, "failure", "pcie_fatal",
    ),
    "AER, corrected": (
        "nvidia 0000:10:00.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer", G0, "other", "pcie_correctable"
    ),
    "AER, correctable": (
        "nvidia 0000:11:00.0: PCIe Bus Error: severity=Correctable, type=Physical", G1, "other", "pcie_correctable"
    ),
    "init, number": ("NVRM: GPU 0000:11:00.0: rm_init_adapter(0) failed", G1, "failure", "gpu_init_failed"),
    "AMD, fatal": (
        "amdgpu 0000:10:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!",
        G0, "failure", "ras_uncorrectable",
    ),
    "GSP": ("NVRM: GPU0 _kgspIsHeartbeatTimedOut: Heartbeat timed out", None, "other", "gsp_timeout"),
    "GSP, RPC": ("NVRM: _issueRpcAndWait: rpcRecvPoll timedout for fn 76 sequence 4!", None, "other", "gsp_timeout"),
    "FSP": ("NVRM: kfspPollForResponse_IMPL: FSP command timed out", None, "other", "gsp_boot_failed"),
    "modeset": (
        "nvidia-modeset: ERROR: GPU:0: Error while waiting for GPU progress: 0x0000c57d:0", None, "other", "gpu_locked"
    ),
    "assertion": (
        "NVRM: nvAssertFailedNoLog: Assertion failed: 0 @ g_kernel_gsp.c:1", None, "other", "assertion_failed"
    ),
    "peermem": (
        "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context", None, "other", "peermem_error"
    ),
    "AMD, lost": ("amdgpu 0000:10:00.0: amdgpu: device lost from bus!", G0, "failure", "fallen_off_the_bus"),
    "lost, no answer to a reset": (
        "nvidia 0000:10:00.0: not ready 65535ms after bus reset; giving up", G0, "failure", "fallen_off_the_bus"
    ),
    "lost, config space": (
        "nvidia 0000:11:00.0: can't change power state from D3cold to D0 (config space inaccessible)",
        G1, "failure", "fallen_off_the_bus",
    ),
    "no devices": ("NVRM: None of the NVIDIA devices were initialized.", None, "other", "gpu_probe_failed"),
    "no devices, old": ("NVRM: No NVIDIA graphics adapter found!", None, "other", "gpu_probe_failed"),
    "AMD, wedged": (
        "amdgpu 0000:11:00.0: [drm] *ERROR* device wedged, needs recovery", G1, "failure", "gpu_reset_failed"
    ),
    "AMD, reset": ("amdgpu 0000:11:00.0: amdgpu: GPU reset begin!", G1, "other", "amdgpu_reset"),
    "AMD, reset failed": (
        "amdgpu 0000:11:00.0: amdgpu: GPU reset end with ret = -22", G1, "failure", "gpu_reset_failed"
    ),
    "AMD, RAS": (
        "amdgpu 0000:10:00.0: amdgpu: socket: 1, die: 0 2 new uncorrectable hardware errors detected in umc block",
        G0, "failure", "ras_uncorrectable",
    ),
    "AMD, ring": (
        "[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring gfx timeout, signaled seq=4, emitted seq=6",
        None, "other", "amdgpu_ring_timeout",
    ),
    "AMD, hung block": (
        "amdgpu 0000:11:00.0: amdgpu: IP block:gfx_v11_0 is hung!", G1, "other", "amdgpu_block_hung"
    ),
    "AMD, hung block of older kernels": ("[drm] IP block:gmc_v8_0 is hung!", None, "other", "amdgpu_block_hung"),
}  # fmt: skip


def test_a_message_is_read_as_what_it_is(tmp_path: Path) -> None:
    log = [line(20 * place, message) for place, (message, *_) in enumerate(MESSAGES.values())]
    read = dict(zip(MESSAGES, imported(tmp_path, log), strict=True))
    assert read == {name: tuple(expected) for name, (_, *expected) in MESSAGES.items()}


@pytest.mark.parametrize(
    "message",
    [
        "amdgpu 0000:10:00.0: amdgpu: no uncorrectable hardware errors detected in umc block",
        "amdgpu 0000:10:00.0: amdgpu: 0 uncorrectable hardware errors detected in umc block",
        "amdgpu 0000:10:00.0: amdgpu: socket: 1, die: 0 2 uncorrectable hardware errors detected in total in umc block",
        "NVRM: GPU Board Serial Number: 1653723052734",
        "NVRM: GPU0 _kgspRpcGspEventPmuHalted: Received signal from GSP that PMU has halted.",
        "NVRM: GPU at PCI:0000:10:00: GPU-34bf77d1-c686-6821-79a8-32d326c5039c",
    ],
)
def test_a_message_that_reports_nothing_new_is_no_event(message: str) -> None:
    log = parse_kernel_log(lines(message))
    assert len(log.events) == 0
    assert log.accounting.tables["kernel log lines"].left_out == {"GPU driver message without an event": 1}


def test_several_messages_of_one_failure_are_one_event(tmp_path: Path) -> None:
    log = [
        f"2026-03-01T00:10:00.{place}00000+00:00 node-0 kernel: {message}"
        for place, message in enumerate(
            (
                "NVRM: The NVIDIA GPU 0000:10:00.0",
                "NVRM: (PCI ID: 10de:2330) installed in this system has",
                "usb 1-1: new high-speed USB device",
                "NVRM: fallen off the bus and is not responding to commands.",
                "NVRM: GPU 0000:11:00.0: RmInitAdapter failed! (0x24:0x72:1568)",
                "NVRM: GPU 0000:11:00.0: rm_init_adapter failed, device minor number 1",
                "nvidia-nvswitch1: SXid (PCI:0000:84:00.0): 12028, Non-fatal, Link 32 egress non-posted error",
                "nvidia-nvswitch1: SXid (PCI:0000:84:00.0): 12028, Severity 0 Engine instance 32",
            )
        )
    ]
    assert sorted(imported(tmp_path, log), key=str) == sorted(
        [(G0, "failure", "fallen_off_the_bus"), (G1, "failure", "gpu_init_failed"), (None, "other", "sxid_12028")],
        key=str,
    )


def test_a_message_of_several_indented_lines_has_the_stamp_of_its_first() -> None:
    log = parse_kernel_log(
        [
            "2026-03-01T00:10:00Z node-0 kernel: NVRM: The NVIDIA GPU 0000:10:00.0",
            "                                    NVRM: (PCI ID: 10de:2330) installed in this system has",
            "                                    NVRM: fallen off the bus and is not responding to commands.",
        ]
    )
    (event,) = log.events.to_dict("records")
    assert (event["code"], event["pci_bus_id"], event["node"]) == ("fallen_off_the_bus", "00000000:10:00", "node-0")
    assert log.accounting.tables["kernel log lines"].used == 3


def test_the_sentence_that_follows_an_xid_79_is_no_second_event(tmp_path: Path) -> None:
    xid = "NVRM: Xid (PCI:0000:10:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    again = "NVRM: GPU 0000:10:00.0: GPU has fallen off the bus."
    log = [line(1, text) for text in (xid, again)]
    assert imported(tmp_path, log) == [(G0, "xid", "79")]


@pytest.mark.parametrize(
    ("first", "second", "number"),
    [
        ("2026-03-01T00:01:00Z node-0 kernel: [  61.5] ", "2026-03-01T00:01:00.713Z node-0 kernel: [  61.5] ", 1),
        ("Mar  1 00:01:00 node-0 kernel: ", "2026-03-01T00:01:00.713+00:00 node-0 kernel: ", 1),
        ("Mar  1 00:01:00 node-0 kernel: [  61.5] ", "2026-03-01T00:01:00.713+00:00 node-0 kernel: ", 1),
        ("[Sun Mar  1 00:01:00 2026] ", "Mar 01 00:01:02 node-0 kernel: ", 1),
        ("Mar  1 00:01:00 node-0 kernel: ", "2026-03-01T00:01:09.713+00:00 node-0 kernel: ", 2),
        ("Mar  1 00:01:00 node-0 kernel: ", "2026-03-01T00:01:00.713+00:00 node-1 kernel: ", 2),
    ],
)
def test_a_line_that_two_programs_stored_in_one_file_is_one_event(first: str, second: str, number: int) -> None:
    xids = [f"NVRM: Xid (PCI:0000:10:00): {code}, pid=1, name=x, Ch 8" for code in (31, 31, 43)]
    log = [f"{prefix}{xid}" for xid in xids for prefix in (first, second)]
    clock = {"timezone": UTC, "reference_time": datetime(2026, 3, 2, tzinfo=UTC)}
    events = parse_kernel_log(log if " [" not in first else log[2:], node="node-0", **clock).events
    assert events["code"].tolist().count("43") == number
    assert events["code"].tolist().count("31") == number * (1 if " [" in first else 2)


def test_pcie_errors_count_for_devices_that_the_log_names_as_gpus(tmp_path: Path) -> None:
    log = lines(
        "NVRM: Xid (PCI:0000:10:00): 31, pid=1, name=x, Ch 8",
        "pcieport 0000:80:01.1: AER: Uncorrected (Fatal) error received: 0000:10:00.0",
        "pcieport 0000:80:01.1: AER: Corrected error received: 0000:41:00.0",
    )
    assert imported(tmp_path, log) == [(G0, "xid", "31"), (G0, "failure", "pcie_fatal")]


@pytest.mark.parametrize(
    "quotation",
    [
        "nhc[991]: Health check failed: check_dmesg: in dmesg: NVRM: Xid (PCI:0000:10:00): 79, GPU has fallen off",
        "python3[4242]: RuntimeError('NVRM: Xid (PCI:0000:11:00): 48 in training log')",
        '{"__REALTIME_TIMESTAMP": "1772331600000000", "_HOSTNAME": "node-0", "SYSLOG_IDENTIFIER": "nhc", '
        '"MESSAGE": "check_dmesg: in dmesg: NVRM: Xid (PCI:0000:10:00): 79, GPU has fallen off"}',
        "slurmd[77]: drained by health check, reason NVRM: Xid (PCI:0000:11:00): 94, Contained",
    ],
)
def test_what_another_program_quotes_is_no_event_and_counted(quotation: str) -> None:
    stamp = "2026-03-01T03:00:00.000000+00:00 node-0 "
    line = quotation if quotation.startswith("{") else stamp + quotation
    log = parse_kernel_log([line], node=None, timezone=UTC)
    assert log.events.empty
    assert dict(log.accounting.tables["kernel log lines"].left_out) == {QUOTED: 1}


@pytest.mark.parametrize(
    "forwarder",
    ["rsyslogd[12]: ", "promtail[12]: Mar  1 00:00:00 node-0 kernel: ", "journal[1]: node-0 kernel: [   12.3] "],
)
def test_what_another_program_forwards_is_an_event(forwarder: str) -> None:
    line = f"2026-03-01T00:00:00.000000+00:00 node-0 {forwarder}NVRM: Xid (PCI:0000:10:00): 79, GPU has fallen off."
    assert parse_kernel_log([line], timezone=UTC, reference_time=datetime(2026, 3, 2, tzinfo=UTC)).events[
        "code"
    ].tolist() == ["79"]


def test_every_line_is_counted_and_unknown_driver_messages_have_an_example() -> None:
    log = parse_kernel_log(
        lines(
            "NVRM: Xid (PCI:0000:10:00): 31, pid=1, name=x, Ch 8",
            "usb 1-1: new high-speed USB device",
            "NVRM: something that nobody has seen",
            "nvidia-nvswitch9: something else",
            "habanalabs hl0: Heartbeat failed",
            "NVRM: Xid (oops): x",
            "docker: pulled nvidia/cuda:12.4",
        )
    )
    account = log.accounting.tables["kernel log lines"]
    assert (account.read, account.used, account.unaccounted) == (7, 1, 0)
    assert account.left_out == {
        "not about a GPU": 2,
        "GPU driver message without a rule": 3,
        "no XID number or GPU": 1,
    }
    assert "nobody has seen" in account.examples["GPU driver message without a rule"]


def test_a_mapping_adds_messages(tmp_path: Path) -> None:
    rules = """
kernel_log:
  messages:
  - {pattern: 'mygpu <ADDRESS>: thermal trip (?P<level>\\d)', type: failure, code: 'thermal_{level}'}
  - {pattern: 'NVRM: Xid .*: 31,'}
"""
    log = lines("mygpu 0000:11:00.0: thermal trip 2", "NVRM: Xid (PCI:0000:10:00): 31, pid=1, name=x, Ch 8")
    assert imported(tmp_path, log, rules) == [(G1, "failure", "thermal_2")]


def test_hosts_of_one_file_are_kept_apart(tmp_path: Path) -> None:
    begin, end = "NVRM: The NVIDIA GPU 0000:10:00.0", "NVRM: fallen off the bus and is not responding to commands."
    log = [f"2026-03-01T00:01:00Z {host} kernel: {text}" for text in (begin, end) for host in ("node-0", "node-1")]
    (tmp_path / "kernel.log").write_text("\n".join(log) + "\n")
    events = run_import(tmp_path, events=[tmp_path / "kernel.log"]).dataset.events()
    assert sorted(zip(events["node"], events["gpu"], strict=True)) == [("node-0", gpu(0)), ("node-1", gpu(2))]


def test_losses_without_an_xid_are_incidents_of_their_class(tmp_path: Path) -> None:
    (tmp_path / "kernel.log").write_text("\n".join(lines(*(MESSAGES[name][0] for name in ("lost", "init")))) + "\n")
    dataset = run_import(tmp_path, samples=samples_frame(), events=[tmp_path / "kernel.log"]).dataset
    incidents = find_incidents(dataset.events(), dataset.inventory(), LabelSection())
    assert sorted(zip(incidents["gpu"], incidents["failure_class"], strict=True)) == [(G0, "bus"), (G1, "bus")]


def test_examples_of_the_catalogue_are_read_as_it_says() -> None:
    for driver in drivers():
        for rule in driver.rules:
            found = MessageCatalogue().read(rule.example)
            assert (found.type, found.part) == (rule.type, rule.part)
            assert (found.repeat_window_s, found.known) == (rule.again, rule.known)
            assert shipped().start(f"Mar  1 02:20:00 h kernel: {rule.example}") == len("Mar  1 02:20:00 h kernel: ")


@pytest.mark.skipif(not REAL.is_dir(), reason="the real logs are not here")
def test_real_logs_give_their_xids_and_sxids() -> None:
    given = (REAL / "xid-lines.txt").read_text().splitlines()
    stamped = [f"2026-03-01T00:00:00Z h kernel: {line}" for line in given]
    log = parse_kernel_log(stamped)
    with_number = [line for line in given if "Xid" in line and line.split("): ")[-1][:1].isdigit()]
    assert len(log.events) >= len(with_number) - 3
    fabric = parse_kernel_log((REAL / "fabricmanager.log").read_text().splitlines(), node="h", timezone=UTC)
    (event,) = fabric.events.to_dict("records")
    assert event["timestamp"] == pd.Timestamp("2025-02-27T15:10:02Z")
    assert (event["type"], event["code"]) == ("other", "sxid_12028")
    booted = pd.Timestamp("2025-03-01T00:00:00Z")
    pstore = parse_kernel_log((REAL / "dmesg-pstore.txt").read_text().splitlines(), node="h", boot_time=booted)
    assert "550.144.03" in pstore.events["code"].tolist()
    assert pstore.accounting.tables["kernel log lines"].unaccounted == 0
