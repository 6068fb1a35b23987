"""What a running collector serves of itself."""

import urllib.error
import urllib.request

import pytest

from foundation.errors import InputError
from telemetry.accounting import Accounting
from telemetry.collect.exposure import exposing
from tests.waiting import free_port


def test_a_collector_serves_its_account_and_whether_it_can_write() -> None:
    address = f"127.0.0.1:{free_port()}"
    accounting, problems = Accounting(), [None, "the disk is full"]
    accounting.take("jobs", 3, {"has not started": 1})
    with exposing(address, lambda: accounting, problem=lambda: problems[-1]):
        page = urllib.request.urlopen(f"http://{address}/metrics", timeout=30).read().decode()
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://{address}/healthz", timeout=30)
        problems.pop()
        assert urllib.request.urlopen(f"http://{address}/healthz", timeout=30).read() == b"ok\n"
        with pytest.raises(InputError, match="cannot listen"), exposing(address, lambda: accounting):
            pass
    assert 'predrain_ingest_used_total{table="jobs"} 2.0' in page
    assert 'predrain_ingest_left_out_total{reason="has not started",table="jobs"} 1.0' in page
