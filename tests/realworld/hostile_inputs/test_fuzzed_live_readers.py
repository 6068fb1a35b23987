"""Ten thousand damaged inputs for each live reader: a counted reason or the reader's refusal, no other error."""

import contextlib
import io
import json
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import orjson
import pyarrow as pa
import pytest

from foundation.errors import InputError
from foundation.server.problems import RequestRefused
from telemetry.bounds import EARLIEST_MS, LATEST_MS, plausible_rows
from telemetry.collect.diagnostics import read_diagnostics
from telemetry.collect.gpud import read_events
from telemetry.collect.prometheus.client import read_matrix, split_samples
from telemetry.collect.remote_write.arrow_body import read_stream
from telemetry.collect.remote_write.decoding import RemoteWriteDecoder, decompress
from telemetry.collect.scraping.collector import ScrapeError
from telemetry.collect.series.exposition import LineReader
from telemetry.collect.series.identity import SeriesCatalogue
from telemetry.dataset.channels import CATALOGUE
from telemetry.staging.folder import lay_out
from tests.realworld.hostile import damaged
from tests.telemetry.collect.remote_write.encoding import block, labels, write_request

NOW = datetime(2026, 3, 1, tzinfo=UTC)
T0 = int(NOW.timestamp() * 1000)
INPUTS = 10_000
SERIES = SeriesCatalogue(CATALOGUE)


def read_exposition(body: bytes) -> None:
    reader = LineReader(lambda name, labels: (name, tuple(labels)))
    problems: Counter[str] = Counter()
    for openmetrics in (False, True):
        lines = body.decode("utf-8", "replace").split("\n")
        for _, value, ms in reader.read(lines * 2, openmetrics=openmetrics, problems=problems):
            assert isinstance(value, float)
            assert ms is None or EARLIEST_MS <= ms < LATEST_MS


def read_remote_write(body: bytes) -> None:
    with contextlib.suppress(RequestRefused):
        samples = RemoteWriteDecoder(SERIES, clock=lambda: NOW).decode(body, limit=1000)
        assert ((samples.ms >= EARLIEST_MS) & (samples.ms < LATEST_MS)).all()


def read_snappy(body: bytes) -> None:
    with contextlib.suppress(RequestRefused):
        assert len(decompress(body, 100_000)) <= 100_000


def read_prometheus(body: bytes) -> None:
    rest, arrays = split_samples(body)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        document = orjson.loads(rest)
        matrix = read_matrix(document["data"], arrays)
        assert len(matrix.ms) == len(matrix.values) == len(matrix.index)


def read_gpud(body: bytes) -> None:
    with contextlib.suppress(ScrapeError):
        for entry in read_events(body, "n1", lambda _: NOW).values():
            str(entry).encode()


def read_push(body: bytes) -> None:
    with contextlib.suppress(RequestRefused, ValueError, pa.ArrowException):
        table, _, _ = plausible_rows(read_stream(body, row_limit=100, byte_limit=100_000))
        table, _, _ = plausible_rows(lay_out("samples", table, CATALOGUE))
        table.to_pylist()  # every instant can be shown


def pushed() -> bytes:
    stamps = pa.array([T0, T0 + 1]).cast(pa.timestamp("ms", "UTC"))
    table = pa.table({"timestamp": stamps, "node": ["n1", "n2"], "gpu_temp_c": [40.0, 41.0]})
    body = io.BytesIO()
    with pa.ipc.new_stream(body, table.schema) as stream:
        stream.write_table(table)
    return body.getvalue()


def read_diag(body: bytes) -> None:
    try:
        verdicts = read_diagnostics(body.decode("utf-8", "replace"))
    except InputError:  # several runs
        return
    assert verdicts
    for verdict in verdicts:
        f"{verdict.index} {verdict.serial} {verdict.detail}".encode()  # it can be stored


PAGE = (
    b'# TYPE x gauge\nx{gpu="0",UUID="GPU-a"} 45 1772323200000\n'
    b'x_total{a="b"} 3 # {t="1"} 0.5 1772323200.5\ny 1e3\n# EOF\n'
)
ANSWER = (
    b'{"status":"success","data":{"resultType":"matrix","result":[{"metric":{"__name__":"x","a":"b"},'
    b'"values":[[1772323200,"45"],[1772323230.5,"NaN"]]},{"metric":{},"values":[]}]}}'
)
ENTRY = {"time": "2026-03-01T00:00:00Z", "name": "error_xid", "type": "Fatal", "message": "XID 79 PCI:0000:01:00"}
EVENTS = json.dumps([{"component": "accelerator-nvidia-error-xid", "events": [ENTRY, ENTRY | {"name": "x"}]}]).encode()
RESULT = {"entity_group": "GPU", "entity_id": 0, "status": "Fail"}
GPUS = [{"entity_group": "GPU", "entities": [{"entity_id": 0, "serial_num": "16522"}]}]
TESTS = [{"category": "Hardware", "tests": [{"name": "memory", "results": [RESULT]}]}]
DATA = Path(__file__).parents[2] / "data" / "dcgmi"
DIAG = json.dumps({"DCGM Diagnostic": {"test_categories": TESTS}, "entity_groups": GPUS}).encode()
REQUEST = write_request([(labels(), [(T0, 45.0), (T0 + 1, 46.0)]), (labels("node_load1"), [(T0, 1.0)])])
READERS: dict[str, tuple[Callable[[bytes], None], list[bytes]]] = {
    "exposition": (read_exposition, [PAGE]),
    "remote write": (read_remote_write, [REQUEST]),
    "snappy": (read_snappy, [block(REQUEST)]),
    "prometheus": (read_prometheus, [ANSWER]),
    "gpud": (read_gpud, [EVENTS]),
    "push": (read_push, [pushed()]),
    "dcgmi diag": (read_diag, [DIAG, (DATA / "dcgm3.json").read_bytes(), (DATA / "dcgm4.json").read_bytes()]),
}


@pytest.mark.parametrize("name", READERS)
def test_damaged_inputs_end_in_a_reason(name: str) -> None:
    read, seeds = READERS[name]
    for number in range(INPUTS):
        body = damaged(seeds, number)
        try:
            read(body)
        except Exception as error:
            pytest.fail(f"{name} {number}: {error!r} of {body[:300]!r}")
