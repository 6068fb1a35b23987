"""A newcomer with a Prometheus, an export of a helpdesk and a syslog without years: one round of questions.

The history is fetched only after every question is answered; the dataset then holds what the files say.
"""

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from predrain.command import app
from telemetry.dataset.store import Dataset
from tests.light_models import lightgbm_alone
from tests.telemetry.collect.prometheus.fake_prometheus import FakePrometheus, error, serving

HALF_HOUR_MS = 1_800_000
DAYS = 4
LIGHT = lightgbm_alone(
    5,
    "features: {windows: [1h], history_windows: [7d]}",
    "training: {candidate_windows: [14d], refit_every: 14d, augmentation: 1}",
)


def uuid(number: int) -> str:
    return f"GPU-{number:08x}-0000-0000-0000-000000000000"


@dataclass(frozen=True)
class Ticket:
    """What a helpdesk knows of a failure."""

    opened: datetime
    resolved: datetime
    gpu: int


@dataclass(frozen=True)
class Site:
    """Eight GPUs on one node, sampled every half hour, with two tickets and an XID."""

    folder: Path
    server: FakePrometheus
    tickets: tuple[Ticket, ...]
    xid_at: datetime

    def assess(self, *more: str) -> Result:
        words = ["assess", "--prometheus", self.server.url, "--since", f"{DAYS}d", "--out", str(self.folder / "out")]
        words += ["--params", str(self.folder / "light.yaml"), "--events", str(self.folder / "helpdesk.csv")]
        return CliRunner().invoke(app, [*words, "--kernel-log", str(self.folder / "syslog.log"), *more])


@pytest.fixture(params=["helpdesk", "in other words"])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Site:
    now_ms = int(time.time()) // 1800 * HALF_HOUR_MS
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    server = FakePrometheus()
    for gpu in range(8):
        labels = {"Hostname": "node00", "gpu": str(gpu), "UUID": uuid(gpu), "modelName": "NVIDIA A100-SXM4-80GB"}
        labels["pci_bus_id"] = f"00000000:{0x10 + gpu:02X}:00.0"
        times = [now_ms - turn * HALF_HOUR_MS + gpu * 1000 for turn in range(1, 48 * DAYS)]
        server.add("DCGM_FI_DEV_GPU_TEMP", labels, [(at, 40.0 + at // HALF_HOUR_MS % 7) for at in times])
    day = timedelta(days=1)
    tickets = tuple(Ticket(now - (3 - number) * day, now - (2 - number) * day, 3 + number) for number in (0, 1))
    header, form = {
        "helpdesk": ("Ticket,Opened,Resolved,Host,Slot,Summary", "%Y-%m-%d %H:%M"),
        "in other words": ("Key,Created,Closed,Server,GPU Index,Description", "%Y-%m-%dT%H:%M:%S"),
    }[request.param]
    rows = [
        f"HD-{ticket.gpu},{ticket.opened.strftime(form)},{ticket.resolved.strftime(form)},node00,{ticket.gpu},"
        "GPU failed and was replaced"
        for ticket in tickets
    ]
    (tmp_path / "helpdesk.csv").write_text("\n".join([header, *rows]) + "\n")
    xid_at = now - timedelta(hours=29)
    line = "node00 kernel: NVRM: Xid (PCI:0000:15:00): 79, pid=1, GPU has fallen off the bus."
    (tmp_path / "syslog.log").write_text(f"{xid_at.strftime('%b %e %H:%M:%S')} {line}\n")
    (tmp_path / "light.yaml").write_text(LIGHT)
    return Site(tmp_path, server, tickets, xid_at)


def test_everything_is_asked_before_the_fetch_and_one_round_of_answers_is_enough(site: Site) -> None:
    with serving(site.server):
        first = site.assess()
        assert first.exit_code == 1, first.output
        assert not (site.folder / "out" / "dataset.live").exists(), "nothing was fetched"
        mapping = site.folder / "out" / "mapping.yaml"
        assert "timezone: UTC" in mapping.read_text(), "what is proposed is right here"
        second = site.assess("--mapping", str(mapping))
    assert second.exit_code == 0, second.output
    assert json.loads((site.folder / "out" / "assessment.json").read_text())["data"]["units"] == 8
    dataset = Dataset.open(site.folder / "out" / "dataset")
    assert dataset.meta.step == timedelta(minutes=30)
    events = dataset.events()
    found = {
        (row.timestamp.to_pydatetime(), row.type, row.gpu)
        for row in events.itertuples()
        if row.type in ("failure", "replacement", "repair", "xid")
    }
    expected = {(site.xid_at, "xid", uuid(5))}
    expected |= {(ticket.opened, "failure", uuid(ticket.gpu)) for ticket in site.tickets}
    expected |= {(ticket.resolved, "replacement", uuid(ticket.gpu)) for ticket in site.tickets}
    assert found == expected


def test_a_server_that_denies_access_is_reported_before_anything_is_written(site: Site) -> None:
    site.server.fault = lambda asked: error(401, "login required")
    with serving(site.server):
        done = site.assess()
    assert done.exit_code == 1
    assert "requires a login" in done.stderr
    assert not (site.folder / "out" / "dataset.live").exists()
