"""The service that most tests of the HTTP API ask."""

from collections.abc import Iterator

import pytest

from tests.serving.http.world import Client, Running, running, small_fleet
from tests.serving.score_folder import write_scores


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("scores")
    write_scores(folder, small_fleet())
    with running(folder) as started:
        yield started


@pytest.fixture
def client(service: Running) -> Client:
    return service.client()
