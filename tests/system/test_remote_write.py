"""A real Prometheus that remote-writes into the receiver: what is staged is what Prometheus itself has."""

import contextlib
import json
import shutil
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.http_server import Handler, serving
from tests.processes import PREDRAIN, running
from tests.system.prometheus_server import prometheus
from tests.waiting import free_port, wait

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus on this machine"),
]

Values = dict[tuple[str, int, str], float]
"""Value by (gpu, milliseconds, channel)."""

CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 400ms}}
remote_write:
  - url: http://127.0.0.1:{port}/api/v1/write
    authorization: {{credentials_file: {token}}}
    queue_config: {{batch_send_deadline: 200ms, min_backoff: 50ms, max_backoff: 500ms}}
"""


def get(url: str, **query: str) -> Any:
    target = f"{url}?{urllib.parse.urlencode(query)}" if query else url
    with urllib.request.urlopen(target, timeout=300) as answer:
        return answer.read()


class Receiving:
    """The receiver as a process that can be killed and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        arguments = ("collect", "receive", "--listen", f"127.0.0.1:{self.port}", "--dataset", self.folder / "fleet")
        self.process = self._stack.enter_context(running([*PREDRAIN, *arguments], self.folder / "log"))
        wait(lambda: get(f"http://127.0.0.1:{self.port}/readyz") == b"ready\n")

    @property
    def token(self) -> Path:
        """The file with the token that it made."""
        return self.folder / "fleet.receive-token"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(120)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(120)

    def staged(self) -> Values:
        """What has staged; a row may have staged twice, but never with two values."""
        values: Values = {}
        for path in (self.folder / "fleet.live" / "samples").glob("*.parquet"):
            for row in pq.read_table(path).to_pylist():
                at = round(row.pop("timestamp").timestamp() * 1000)
                assert row.pop("node") == "n1"
                gpu = row.pop("gpu")
                for channel, value in row.items():
                    if value is not None and channel != "mig_instance":
                        assert values.setdefault((gpu, at, channel), value) == value
        return values

    def __enter__(self) -> "Receiving":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class Exporter(Handler):
    turn = 0

    def do_GET(self) -> None:
        type(self).turn += 1
        lines = []
        for gpu in range(2):
            # The pod changes with every third page: to Prometheus each is another series, which ends with a marker.
            names = f'{{gpu="{gpu}",UUID="GPU-{gpu}",Hostname="n1",pod="job-{self.turn // 3}"}}'
            lines.append(f"DCGM_FI_DEV_GPU_TEMP{names} {40 + gpu + self.turn / 8}")
            lines.append(f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{names} {54_700_000_000 + self.turn}")
            lines.append(f"DCGM_FI_DEV_XID_ERRORS{names} {79 if self.turn > 5 else 0}")
            lines.append(f"acme_unknown{names} 1")
        self.reply(200, ("\n".join(lines) + "\n").encode(), {"Content-Type": "text/plain; version=0.0.4"})


@pytest.fixture
def exporter() -> Iterator[str]:
    with serving(Exporter) as address:
        yield address.removeprefix("http://")


NAMES = {
    "DCGM_FI_DEV_GPU_TEMP": "gpu_temp_c",
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "energy_mj",
    "DCGM_FI_DEV_XID_ERRORS": "xid_last",
}


def stored_by_prometheus(url: str, end_s: float) -> Values:
    """Raw samples with their own time stamps: a range selector in an instant query."""
    answer = json.loads(get(f"{url}/api/v1/query", query='{job="gpu",UUID!=""}[5m]', time=f"{end_s:.3f}"))
    return {
        (series["metric"]["UUID"], round(at * 1000), NAMES[series["metric"]["__name__"]]): float(value)
        for series in answer["data"]["result"]
        if series["metric"]["__name__"] in NAMES
        for at, value in series["values"]
    }


def test_scraped_samples_land_as_prometheus_has_them_though_the_receiver_is_killed(
    tmp_path: Path, exporter: str
) -> None:
    scraped = f"scrape_configs: [{{job_name: gpu, static_configs: [{{targets: ['{exporter}']}}]}}]"
    with (
        Receiving(tmp_path) as receiver,
        prometheus(tmp_path / "tsdb", config=CONFIG.format(port=receiver.port, token=receiver.token) + scraped) as url,
    ):
        wait(lambda: len(receiver.staged()) > 20)
        receiver.kill()
        before = receiver.staged()
        time.sleep(2)
        receiver.start()
        time.sleep(2)
        end_s = time.time()
        scraped_samples = stored_by_prometheus(url, end_s)
        last_ms = max(at for _, at, _ in scraped_samples)

        def staged() -> Values:
            return {key: value for key, value in receiver.staged().items() if key[1] <= last_ms}

        def due() -> Values:
            # what Prometheus scraped before its remote write had begun is not sent by it
            first_ms = min(at for _, at, _ in staged())
            return {key: value for key, value in scraped_samples.items() if key[1] >= first_ms}

        wait(lambda: staged() == due())
        assert len(due()) > 20
        assert before.items() <= staged().items()
        page = get(f"http://127.0.0.1:{receiver.port}/metrics").decode()
        assert 'left_out_total{reason="stale marker"' in page
        assert receiver.stop() == 0
