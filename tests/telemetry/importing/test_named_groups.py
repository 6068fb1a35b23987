"""Places that one text holds become columns of their own."""

from pathlib import Path

import pandas as pd
import pytest

from foundation.errors import InputError
from tests.telemetry.helpers import events_frame, gpu, run_import

PLACES = ["c12-3c1s7n2", "c12-3c2s0n1", "c3-0c0s11n3", None]
PATTERN = r"(?P<rack>c(?P<column>\\d+)-\\d+)c(?P<cage>\\d)s(?P<blade>\\d+)n\\d"
ONE = events_frame([("01:00", gpu(0), "failure", "DBE")])


def installations() -> pd.DataFrame:
    return pd.DataFrame(
        {"SN": [gpu(number) for number in range(4)], "node": [f"node-{number // 2}" for number in range(4)],
         "place": PLACES, "insert": "2026-01-01T00:00:00Z"}
    )  # fmt: skip


def imported(folder: Path, parts: str, inventory: pd.DataFrame | None = None):
    mapping = f"""
inventory:
  columns: {{SN: gpu, insert: installed_at, place: null}}
  parts: {parts}
"""
    return run_import(
        folder, events=ONE, inventory=installations() if inventory is None else inventory, mapping=mapping
    )


def test_named_groups_become_columns_of_ours_or_further_ones(tmp_path: Path):
    named = imported(tmp_path, f'{{place: "{PATTERN}"}}').dataset.inventory().sort_values("gpu", ignore_index=True)
    assert named["rack"].tolist()[:3] == ["c12-3", "c12-3", "c3-0"]
    assert named["rack"].isna().tolist() == [False, False, False, True]
    for name, values in {"column": [12, 12, 3], "cage": [1, 2, 0], "blade": [7, 0, 11]}.items():
        assert pd.to_numeric(named[name])[:3].tolist() == values


def test_a_value_that_does_not_match_has_no_parts_and_a_pattern_that_matches_nothing_is_refused(tmp_path: Path):
    odd = installations()
    odd.loc[1, "place"] = "in the workshop"
    named = imported(tmp_path, f'{{place: "{PATTERN}"}}', odd).dataset.inventory().sort_values("gpu")
    assert named["rack"].isna().tolist() == [False, True, False, True]
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match=r"no value of column 'place' matches .*`parts` in the mapping"):
        imported(tmp_path / "other", '{place: "rack (?P<rack>[0-9]+)"}')


@pytest.mark.parametrize(
    ("parts", "texts"),
    [
        ('{plce: "(?P<rack>.*)"}', r"parts of column 'plce', which does not exist .*Did you mean 'place'"),
        ('{place: "(?P<node>.*)"}', r"takes 'node' out of 'place', and there is a column of that name"),
        ('{place: "(.*)"}', r"the pattern has no named group"),
        ('{place: "(?P<rack>"}', r"should be a valid regular expression"),
    ],
)
def test_a_pattern_that_cannot_be_used_says_why(tmp_path: Path, parts: str, texts: str):
    with pytest.raises(InputError, match=texts):
        imported(tmp_path, parts)
