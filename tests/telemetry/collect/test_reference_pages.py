from pathlib import Path

import pytest

from telemetry.collect.reference_pages import pages

FOLDER = Path(__file__).parents[3] / "docs" / "reference"


@pytest.mark.parametrize("name", sorted(pages()))
def test_the_pages_of_catalogues_are_up_to_date(name: str) -> None:
    made_by = "run: python -m telemetry.collect.reference_pages docs/reference"
    assert (FOLDER / name).read_text() == pages()[name], made_by
