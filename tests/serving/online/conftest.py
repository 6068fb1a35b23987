"""What several tests of the online state share."""

from __future__ import annotations

import pytest

from tests.serving.online.online_world import World, make_raw_world


@pytest.fixture(scope="session")
def raw_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Samples every minute, and the dataset that an import makes of them; nobody changes it."""
    return make_raw_world(tmp_path_factory.mktemp("raw"))
