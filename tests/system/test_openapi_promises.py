"""schemathesis against the running service: each operation with a token, without one, and with one that may not.

What it makes up fits the OpenAPI document or contradicts it. Answers must be those that the document promises: status,
media type and shape; what fits is taken, what contradicts is refused, nothing is a 500, and what needs a token is not
had without.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.http.model_world import scoring
from tests.serving.http.world import Running, running, small_fleet, token_line
from tests.serving.score_folder import write_scores

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed"),
]
SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
TOKENS = {"read": "read-token-0123456789", "write": "write-token-0123456789", "admin": "admin-token-0123456789"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("promises")
    write_scores(folder / "scores", small_fleet())
    (folder / "tokens").write_text("".join(token_line(scope, token) for scope, token in TOKENS.items()))
    return folder


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[Running]:
    with running(folder / "scores", tokens=folder / "tokens") as service:
        yield service


def probe(service: Running, scope: str | None, folder: Path, *more: str) -> str:
    """Run schemathesis, which must find nothing; returns what it wrote."""
    headers = [] if scope is None else ["-H", f"Authorization: Bearer {TOKENS[scope]}"]
    run = subprocess.run(
        [
            *(SCHEMATHESIS, "run", f"http://127.0.0.1:{service.port}/openapi.json", "--no-color"),
            *("--seed", "1", "--generation-deterministic", *headers, *more),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    return run.stdout


def test_an_operator_finds_every_operation_as_it_is_described(guarded: Running, tmp_path: Path) -> None:
    output = probe(guarded, "admin", tmp_path, "--max-examples", "6", "--phases", "coverage,fuzzing,stateful")
    described = guarded.client().get("/openapi.json")["paths"]
    count = sum(len(methods) for methods in described.values()) - 1  # all but the document itself
    assert f"{count} selected / {count} total" in output


def test_who_may_not_is_refused_as_it_is_described(guarded: Running, tmp_path: Path) -> None:
    probe(guarded, None, tmp_path, "--phases", "coverage")


def test_a_model_answers_as_it_is_described(folder: Path, tmp_path: Path) -> None:
    with scoring(folder, tokens=folder / "tokens") as service:
        paths = [word for path in ("/invocations", "/v1/predict", "/ping") for word in ("--include-path", path)]
        # Which features a row may have is the bundle's affair: the document cannot say it.
        more = ("--max-examples", "6", "--phases", "coverage,fuzzing", "--exclude-checks", "positive_data_acceptance")
        probe(service, "read", tmp_path, *paths, *more)
