"""What gpud has on each node, asked for over TLS as its events API answers, becomes events."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from foundation.errors import InputError
from foundation.http import connect_to
from telemetry.accounting import Accounting
from telemetry.collect.gpud import EVENTS, NO_EVIDENCE, EventSink, EventsWatch
from telemetry.collect.kubernetes.rules import KubernetesRules, load_rules
from telemetry.collect.outbox import Outbox
from telemetry.collect.scraping.collector import PAGE_BYTES, SCRAPES, ScrapeCollector, Scraper, ScrapeSettings
from telemetry.collect.scraping.targets import read_targets
from tests import http_server
from tests.clock import NOW, Clock
from tests.http_server import Handler, certify
from tests.processes import invoke
from tests.telemetry.collect.builders import staged, staging

UUID = "GPU-b850f46d-d5ea-c752-ddf3-c4453e44d3f7"
XIDS = "accelerator-nvidia-error-xid"
LOST = f"XID 79 ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS detected on GPU PCI:0000:9b:00 UUID:{UUID}"
LINK = "XID 149.37 (err status 0x00000000) NVLINK_NETIR_ERROR detected on GPU PCI:0000:1a:00"


def entry(minutes: float, message: str, name: str = "error_xid", kind: str = "Fatal") -> dict[str, Any]:
    """An event so long before noon."""
    return {"time": (NOW - timedelta(minutes=minutes)).isoformat(), "name": name, "type": kind, "message": message}


class Gpud:
    """A gpud: events by component, answered from ``startTime`` on, the newest first, whatever their number."""

    def __init__(self) -> None:
        self.events: dict[str, list[dict[str, Any]]] = {XIDS: [], "os": []}
        self.body: bytes | None = None
        self.filler = ""

    def answer(self, start: int) -> bytes:
        if self.body is not None:
            return self.body
        recent = [
            {
                "component": name,
                "startTime": "2026-03-01T00:00:00Z",
                "endTime": "2026-03-01T12:00:00Z",
                "events": [e for e in events if not e["time"] or datetime.fromisoformat(e["time"]).timestamp() >= start]
                or None,
            }
            for name, events in self.events.items()
        ]
        return json.dumps(recent).encode()


@contextlib.contextmanager
def served(tls: ssl.SSLContext | None = None) -> Iterator[tuple[Gpud, str]]:
    gpud = Gpud()

    class Api(Handler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            start = parse_qs(parts.query).get("startTime", ["0"])[0]
            known = parts.path == "/v1/events"
            self.reply(200 if known else 404, gpud.answer(int(start)) if known else b"")

    with http_server.serving(Api, tls=tls) as address:
        yield gpud, address


class Collected:
    """A collector whose looks are made one by one, each by a process of its own."""

    def __init__(self, folder: Path, targets: str, gpud: Gpud | None = None) -> None:
        self.staging, self.clock, self.targets, self.gpud = staging(folder), Clock(), targets, gpud or Gpud()
        self.accounting = Accounting()
        self.rules: KubernetesRules | None = None

    def look(self) -> list[dict[str, Any]]:
        before = len(staged(self.staging))
        self.accounting = Accounting()
        with Outbox(self.staging, "gpud", self.accounting) as outbox:
            sink = EventSink(outbox)
            collector = ScrapeCollector(
                read_targets=lambda: read_targets([self.targets], EVENTS),
                fetch=Scraper(connect_to("http://targets"), timeout_s=5).fetch,
                watch=partial(
                    EventsWatch, sink=sink, accounting=self.accounting, delay=timedelta(minutes=10), rules=self.rules
                ),
                sink=sink,
                settings=ScrapeSettings(),
                accounting=self.accounting,
                clock=self.clock,
            )
            asyncio.run(collector.once())
        return staged(self.staging)[before:]

    def read(self, *xids: dict[str, Any], **others: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Look at a node with these events, those of other components by their name."""
        self.gpud.events |= {XIDS: list(xids), **others}
        return self.look()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Collected]:
    with served() as (gpud, address):
        targets = tmp_path / "nodes.txt"
        targets.write_text(f"{address} n1\n")
        yield Collected(tmp_path, str(targets), gpud)


def test_a_host_alone_is_gpuds_own_port_and_path() -> None:
    (target,) = read_targets(["n7"], EVENTS)
    assert (target.url, target.host) == ("https://n7:15132/v1/events", "n7")


def test_what_a_node_has_becomes_events_with_their_gpu_and_time(node: Collected) -> None:
    boot = entry(60, "system reboot detected 2026-03-01 11:00:00 UTC", "reboot", "Warning")
    rows = sorted(node.read(entry(90, LOST), entry(3, LINK), os=[boot]), key=lambda row: row["timestamp"])
    assert [(row["node"], row["type"], row["code"], row["gpu"], row["pci_bus_id"]) for row in rows] == [
        ("n1", "xid", "79", UUID, "00000000:9b:00"),
        ("n1", "other", "boot", None, None),
        ("n1", "xid", "149", None, "00000000:1a:00"),
    ]
    assert rows[0]["timestamp"] == NOW - timedelta(minutes=90)
    # An NVLink error is one that counts where gpud's catalogue calls it fatal.
    assert rows[2]["detail"] == f"Fatal: {LINK}"
    assert [row["known_at"] - NOW for row in rows] == [timedelta(minutes=-80), timedelta(minutes=-50), timedelta(0)]


def test_the_same_answer_again_adds_nothing_and_what_is_new_is_known_from_now(node: Collected) -> None:
    lost = entry(30, LOST)
    assert len(node.read(lost)) == 1
    node.clock.move(minutes=1)
    assert node.look() == []
    (row,) = node.read(lost, entry(40, LINK))  # gpud was started, and read the kernel log late
    assert (row["code"], row["known_at"]) == ("149", NOW + timedelta(minutes=1))
    node.clock.move(hours=5)
    assert node.look() == []


def test_what_is_no_evidence_of_a_gpu_stays_out(node: Collected) -> None:
    slowdown = [
        entry(5, "told by NVML", "hw_slowdown", "Info"),
        entry(6, f"{UUID}: HW Thermal Slowdown", "hw_slowdown", "Warning"),
    ]
    full = [entry(5, "no space left", "no_space_left", "Critical")]
    healthy = entry(5, "", "SetHealthy", "Info")
    (row,) = node.read(healthy, disk=full, **{"accelerator-nvidia-hw-slowdown": slowdown})
    assert (row["type"], row["code"], row["gpu"]) == ("other", "gpud_hw_slowdown", UUID)


@pytest.mark.parametrize(
    ("message", "codes"),
    [
        ("XID 48, 63 and 94 detected on GPU PCI:0000:9b:00", ["48", "63", "94"]),
        ("NVRM: Xid (PCI:0000:9b:00): 48, DBE NVRM: Xid (PCI:0000:1a:00): 45, Ch 8", ["48", "45"]),
    ],
)
def test_each_xid_of_an_entry_is_an_event_and_the_entry_is_counted_once(node, message, codes):
    assert [(row["type"], row["code"]) for row in node.read(entry(5, message))] == [("xid", code) for code in codes]
    account = node.accounting.tables["gpud entries"]
    assert (account.read, account.used) == (1, 1)
    assert node.look() == []


@pytest.mark.parametrize("message", ["XID 79 detected", "XID 154 GPU_RECOVERY_ACTION detected on GPU PCI:0000:9b:00"])
def test_an_xid_without_its_gpu_or_its_meaning_is_no_xid(node: Collected, message: str) -> None:
    (row,) = node.read(entry(5, message))
    assert (row["type"], row["code"]) == ("other", f"xid_{message.split()[1]}")


def test_rules_of_a_site_decide_what_an_entry_is(node: Collected, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(
        "rules:\n- {condition: gpud/disk/*, type: other, code: full_disk}\n- {condition: gpud/os/*, type: ignore}\n"
    )
    node.rules = load_rules(tmp_path / "rules.yaml")
    full, boot = entry(5, "no space left", "no_space_left", "Critical"), entry(5, "reboot", "reboot", "Warning")
    assert [row["code"] for row in node.read(disk=[full], os=[boot])] == ["full_disk"]


def test_an_xid_that_gpud_has_from_nvsentinel_is_the_kernels(node: Collected) -> None:
    text = "kernel: [7.5] NVRM: Xid (PCI:0000:1a:00): 149, pid=1, NETIR_LINK_EVT Nonfatal XC0 i0 Link 02 (0x0045)"
    (row,) = node.read(entry(5, text, kind="Critical"))
    found = (row["type"], row["code"], row["pci_bus_id"], row["detail"])
    assert found == ("xid", "149", "00000000:1a:00", "NETIR_LINK_EVT Nonfatal link 02")


def test_an_entry_that_is_left_out_is_counted_once_and_named(node: Collected) -> None:
    undated = {**entry(5, LOST), "time": None}
    assert len(node.read(undated, entry(4, LOST), entry(3, "", "SetHealthy", "Info"))) == 1
    account = node.accounting.tables["gpud entries"]
    assert (account.read, account.used) == (3, 1)
    first, second = sorted(account.left_out)
    assert first.startswith(f"{XIDS}.time: ")
    assert second == f"{NO_EVIDENCE}: {XIDS} SetHealthy"
    assert node.look() == []
    assert node.accounting.tables["gpud entries"].read == 0


@pytest.mark.parametrize("body", [b"<html>", b'{"code": 1}', b"3", b'[{"events": []}]', b'[{"component": "x"'])
def test_a_node_that_is_no_gpud_holds_up_no_other(tmp_path: Path, body: bytes) -> None:
    with served() as (gpud, address), served() as (other, elsewhere):
        gpud.events[XIDS], other.body = [entry(5, LOST)], body
        collected = Collected(tmp_path, f"{elsewhere},{address}")
        assert len(collected.look()) == 1
        assert (scrapes := collected.accounting.tables[SCRAPES]).used == 1
        assert scrapes.left_out == {"parse": 1}
        gpud.body = body
        with pytest.raises(InputError, match=r"none of 2 targets could be scraped, .*: parse"):
            collected.look()
        # Once it is gpud again, it goes on where it was, and the other begins.
        gpud.body = other.body = None
        other.events[XIDS] = [entry(5, LINK)]
        assert [row["code"] for row in collected.look()] == ["149"]


def test_of_more_events_than_an_answer_may_have_the_newest_are_taken(node, caplog):
    flood = entry(20 * 24 * 60, "x" * PAGE_BYTES)
    assert [row["code"] for row in node.read(flood, entry(5, LOST))] == ["79"]
    assert "too many events for one response, those before 2026-02-14" in caplog.text


def test_nothing_is_an_answer_too(node: Collected) -> None:
    node.gpud.body = b"null"
    assert node.look() == []
    assert node.accounting.tables[SCRAPES].used == 1


def test_the_command_takes_gpuds_own_certificate_only_when_told_to(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certify(tmp_path, "localhost"))
    with served(context) as (gpud, address):
        gpud.events[XIDS] = [entry(5, LOST) | {"time": datetime.now(UTC).isoformat()}]
        command = ("collect", "gpud", "--targets", address, "--dataset", tmp_path / "fleet", "--once", "--json")
        assert "--insecure-skip-verify" in invoke(*command, code=1).output
        report = json.loads(invoke(*command, "--insecure-skip-verify").stdout)
    assert [report["accounting"][name]["used"] for name in ("scrapes", "events")] == [1, 1]
    account = report["accounting"]["gpud entries"]
    assert account == {"read": 1, "used": 1, "left_out": [], "waiting": [], "assumed": []}
