"""The service as a process: its imports, its end, scores swapped under load, and TLS."""

import http.client
import json
import shutil
import signal
import socket
import ssl
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from foundation.errors import InputError
from serving.http.limits import ServiceSettings
from serving.logs import AccessLog
from serving.server import Tls, serve
from serving.service import Service
from tests.http_server import certify
from tests.processes import ROOT, answers, invoke, printed_by, serving
from tests.serving.http.world import DECIDED, Client, record, routes_of, running, small_fleet
from tests.serving.score_folder import write_scores
from tests.waiting import wait

EXTENDER = ROOT / "deploy" / "kubernetes" / "kube-scheduler-extender.yaml"


def test_the_command_answers_and_ends_orderly(tmp_path: Path) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    write_scores(tmp_path / "scores", small_fleet(now), now)
    log = tmp_path / "log"
    with serving(tmp_path, "--extender-listen", "127.0.0.1:0") as (process, port):
        client = Client(port)
        wait(lambda: client.send("GET", "/readyz")[0] == 200)
        assert client.get("/v1/nodes/n1")["tier"] == "high"
        client.connection.close()
        # A request whose body is still under way is answered though the process is asked to leave.
        with socket.create_connection(("127.0.0.1", port), timeout=20) as slow:
            body = json.dumps({"nodes": ["n1"]}).encode()
            head = "POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:5])
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            wait(lambda: not answers(port))
            slow.sendall(body[5:])
            response = http.client.HTTPResponse(slow)
            response.begin()
            assert response.status == 200
            assert json.loads(response.read())["nodes"][0]["node"] == "n1"
        assert process.wait(20) == 0
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert [line["message"] for line in lines if line.get("level")] == [
            f"serving on 127.0.0.1:{port}, extender on {lines[0]['message'].split()[-1]}",
            f"serving decision {now:%Y%m%dT%H%M%SZ}: 9 units on 5 nodes",
            "SIGTERM: shutting down after in-flight requests finish",
        ]
        requests = [line for line in lines if "route" in line]
        assert (requests[-1]["route"], requests[-1]["status"]) == ("/v1/predict", 200)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--listen", "0.0.0.0:0"], "any client that reaches 0.0.0.0 could read risks (--listen without --tokens)."),
        (["--model", "bundle", "--state", "s"], "only the champion's bundle is cached"),
        (["--tokens", "nowhere"], "the token file cannot be read: No such file or directory (nowhere)."),
    ],
)
def test_what_the_command_cannot_start_with_is_reported(tmp_path: Path, options: list[str], message: str) -> None:
    ports = ("--listen", "127.0.0.1:0", "--extender-listen", "127.0.0.1:0")
    run = invoke("serve", "--scores", tmp_path, *ports, *options, code=1)
    assert run.stderr.startswith(f"predrain: error: {message}")


def test_a_port_that_is_taken_is_reported(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for ports, option in (((port, 0), "--listen"), ((0, port), "--extender-listen")):
            service = Service(tmp_path, log=AccessLog(None))
            with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1:{port}: .* \\({option}\\)"):
                serve(service, "127.0.0.1", ports[0], extender_port=ports[1])


def test_looking_nodes_up_imports_neither_pandas_nor_mlflow_nor_a_learner(tmp_path: Path) -> None:
    write_scores(tmp_path, small_fleet())
    code = f"""
import sys
from pathlib import Path
from tests.serving.http.world import running
from tests.waiting import free_port, wait
with running(Path({str(tmp_path)!r})) as service:
    client = service.client()
    for path in ("/v1/nodes", "/v1/nodes/n1", "/metrics", "/openapi.json", "/", "/outcomes"):
        assert client.send("GET", path)[0] == 200, path
    client.post("/v1/predict", {{"nodes": ["n1"] * 500}}), client.post("/v1/predict", {{"gpus": ["GPU-n1-0"]}})
    service.extender().post("/scheduler/filter", {{"NodeNames": ["n1", "n2"]}})
    print(client.get("/readyz")["status"], sorted({HEAVY!r} & sys.modules.keys()))
"""
    assert printed_by(code) == "ready []\n"


HEAVY = {"pandas", "mlflow", "lightgbm", "xgboost", "sklearn", "numpy", "pyarrow", "numba"}


def test_scores_are_swapped_under_load_without_a_wrong_answer(tmp_path: Path) -> None:
    """Each decision has its own risk and its own nodes; an answer that mixes two of them shows."""

    def fleet_of(number: int) -> tuple[list[Any], datetime]:
        decided = DECIDED + timedelta(minutes=number)
        risk = number / 100
        nodes = range(30 + number % 3)
        return [record(f"g{node}", f"n{node}", risk, "watch", decided=decided) for node in nodes], decided

    write_scores(tmp_path, *fleet_of(1))
    decided = {fleet_of(number)[1].strftime("%Y%m%dT%H%M%SZ"): number for number in range(1, 40)}
    failures: list[object] = []
    decisions: set[str] = set()
    stop = threading.Event()
    answers = [0]

    def ask(client: Client, paths: list[str]) -> None:
        try:
            while not stop.is_set():
                for path in paths:
                    status, content, _ = client.send("GET", path)
                    number = decided.get(content.get("decision", ""), 0)
                    decisions.add(content.get("decision", ""))
                    nodes = content.get("nodes", [content])
                    complete = "nodes" not in content or content["total"] == len(nodes) == 30 + number % 3
                    if status != 200 or not complete or any(abs(node["risk"] - number / 100) > 1e-12 for node in nodes):
                        failures.append((path, status, content))
                    answers[0] += 1
        except Exception as error:
            failures.append(error)

    with running(tmp_path, settings=ServiceSettings(poll_s=0.005)) as service:
        paths = ["/v1/nodes?limit=100", "/v1/nodes/n3"]
        threads = [threading.Thread(target=ask, args=(service.client(), paths)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(2, 40):
            if number % 10 == 0:  # a damaged decision in between is never served
                name = write_scores(tmp_path, *fleet_of(number))
                path = tmp_path / "decisions" / name / "risks.jsonl"
                path.write_bytes(path.read_bytes()[:777])
            else:
                write_scores(tmp_path, *fleet_of(number))
            time.sleep(0.03)
        last = wait(lambda: decided[service.service.score_cache.served.fleet.scores.decision] == 39)
        stop.set()
        for thread in threads:
            thread.join(20)
    assert last
    assert failures == []
    assert len(decisions) > 10
    assert answers[0] > 100


def test_the_shipped_scheduler_configuration_lets_pods_run_without_us() -> None:
    content = yaml.safe_load(EXTENDER.read_text())
    assert content["kind"] == "KubeSchedulerConfiguration"
    (extender,) = content["extenders"]
    assert (extender["ignorable"], extender["httpTimeout"], extender["nodeCacheCapable"]) == (True, "200ms", True)
    assert extender["managedResources"] == [{"name": "nvidia.com/gpu", "ignoredByScheduler": False}]
    routes = {route.path_format for route in routes_of(Service(Path("nowhere"), log=AccessLog(None)).extender)}
    assert {f"/scheduler/{extender[verb]}" for verb in ("filterVerb", "prioritizeVerb")} <= routes


pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


def ask(port: int, trusted: Path) -> str:
    """Ask over TLS; returns the name in the certificate."""
    context = ssl.create_default_context(cafile=str(trusted))
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=60)
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200
    subject = connection.sock.getpeercert()["subject"][0][0][1]
    connection.close()
    return str(subject)


def test_answers_are_encrypted_and_a_renewed_certificate_is_taken_up(tmp_path: Path) -> None:
    write_scores(tmp_path / "scores", small_fleet())
    certificate, key = certify(tmp_path, "first")
    later, later_key = certify(tmp_path, "later")
    with running(tmp_path / "scores", tls=Tls(certificate, key, 0.02)) as service:
        port = service.port
        assert ask(port, certificate) == "first"
        with pytest.raises(ssl.SSLError):
            ask(port, later)
        plain = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        plain.request("GET", "/healthz")
        with pytest.raises((http.client.HTTPException, OSError)):
            plain.getresponse()
        shutil.copy(later, certificate)  # for a while the two do not belong together
        shutil.copy(later_key, key)
        wait(lambda: renewed(port, later))


def renewed(port: int, trusted: Path) -> bool:
    try:
        return ask(port, trusted) == "later"
    except ssl.SSLError:
        return False


def test_a_certificate_that_cannot_be_used_leaves_the_one_of_before(tmp_path, caplog):
    certificate, key = certify(tmp_path, "first")
    other_certificate, _ = certify(tmp_path, "other")
    content = certificate.read_bytes()
    tls = Tls(certificate, key)
    assert tls.context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert not tls.refresh()
    for broken in (b"", b"garbage", other_certificate.read_bytes()):
        certificate.write_bytes(broken)
        assert not tls.refresh()
        assert "the previous one stays in use" in caplog.messages[-1]
    assert not tls.refresh()
    assert len(caplog.messages) == 3, "each is said once"
    certificate.unlink()
    assert not tls.refresh()
    certificate.write_bytes(content)
    assert tls.refresh()


def test_an_unusable_certificate_or_key_is_reported_at_the_start(tmp_path: Path) -> None:
    certificate, key = certify(tmp_path, "first")
    locked, locked_key = certify(tmp_path, "locked", "-passout", "pass:secret")
    _, foreign = certify(tmp_path, "foreign")
    for pair, message in (
        ((tmp_path / "none", key), "No such file or directory (--tls-cert"),
        ((certificate, tmp_path / "none"), "No such file or directory (--tls-cert"),
        ((certificate, foreign), "KEY_VALUES_MISMATCH"),
        ((locked, locked_key), "the key has a password"),
    ):
        with pytest.raises(InputError) as error:
            Tls(*pair)
        assert message in str(error.value)
