"""The examples of docs/reference/http.md work as they are written."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from serving.service import Service
from tests.serving.http.world import routes_of, running, small_fleet, token_line
from tests.serving.score_folder import write_scores

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "http.md").read_text()
TOKEN = "documented-token-0123456789"


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_examples_work_as_written(tmp_path: Path) -> None:
    write_scores(tmp_path / "scores", small_fleet())
    tokens = tmp_path / "tokens"
    tokens.write_text(token_line("read", TOKEN))
    requests = [code for code in examples("sh") if "curl" in code]
    assert len(requests) == 2
    with running(tmp_path / "scores", tokens=tokens) as service:
        environment = os.environ | {"TOKEN": TOKEN}
        for language, code in [*(("sh", command) for command in requests), ("python", examples("python")[0])]:
            text = code.replace("127.0.0.1:8080", f"127.0.0.1:{service.port}").replace("curl ", "curl -f ")
            command = ["bash", "-ec", text] if language == "sh" else [sys.executable, "-c", text]
            run = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment, check=False)
            assert run.returncode == 0, run.stderr
            assert "17,700" in run.stdout or '"tier":"high"' in run.stdout


def test_the_documented_way_to_make_a_token_makes_one(tmp_path: Path) -> None:
    (making,) = [code for code in examples("sh") if "openssl" in code]
    code = f'{making}\nprintf %s "$TOKEN"'
    run = subprocess.run(["bash", "-ec", code], capture_output=True, text=True, timeout=30, cwd=tmp_path, check=True)
    write_scores(tmp_path / "scores", small_fleet())
    with running(tmp_path / "scores", tokens=tmp_path / "tokens.txt") as service:
        assert service.client(run.stdout).get("/v1/nodes")["total"] == 5
        assert service.client().send("GET", "/v1/nodes")[0] == 401


def test_every_route_and_metric_and_limit_of_the_page_is_the_services_own(tmp_path: Path) -> None:
    write_scores(tmp_path, small_fleet())
    with running(tmp_path) as started:
        service: Service = started.service
        for route in [*routes_of(service.api), *routes_of(service.extender)]:
            assert re.sub(r"{(\w+)}", lambda name: name[1].upper(), route.path_format) in PAGE
        metrics = set(re.findall(r"# TYPE (\w+)", started.client().get("/metrics").decode()))
        written = set(re.findall(r"`(predrain_\w+)`", PAGE))
        assert metrics <= written
        model = {name for name in written if name.startswith("predrain_model_")}
        assert written <= metrics | model | {"predrain_scores_model_age_seconds"}
        limits = {field.name: getattr(service.settings, field.name) for field in fields(service.settings)}
    for row in (
        f"| {limits['body_bytes'] >> 20} MiB; {limits['decoded_bytes'] >> 20} MiB |",
        f"| {limits['held_bytes'] >> 20} MiB |",
        f"| {limits['rows']:,} |",
        f"| {limits['concurrent_reads']}; {limits['concurrent_pages']}; {limits['concurrent_anonymous']} |",
        f"| {limits['head_timeout_s']:g} s; {limits['body_timeout_s']:g} s; "
        f"{limits['body_timeout_s'] + limits['work_timeout_s']:g} s |",
    ):
        assert row in PAGE
