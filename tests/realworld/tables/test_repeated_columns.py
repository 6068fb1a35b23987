"""Columns that a header has several times: labels and comments of tickets, averages beside values."""

from pathlib import Path

import pytest

from foundation.errors import InputError
from tests.telemetry.helpers import gpu, run_import, samples_frame

MAPPING = "events: {columns: {Host: node, Work: type}, ignore_others: true}\n"


def tickets(folder: Path, header: str, *rows: str) -> list[Path]:
    (folder / "tickets.csv").write_text("\n".join([header, *rows]) + "\n")
    return [folder / "tickets.csv"]


@pytest.mark.parametrize(
    "header",
    [
        "timestamp,Host,Work,Labels,Labels,Labels",
        "timestamp,Host,Work,Comment,Comment,",
        "timestamp, Host, Work,Sprint,Sprint ,,",
    ],
)
def test_columns_that_nobody_uses_may_repeat(tmp_path: Path, header: str) -> None:
    cells = header.count(",") - 2
    given = tickets(tmp_path, header, "2026-03-01T01:00:00Z,node-0,repair" + "".join(f",x{n}" for n in range(cells)))
    events = run_import(tmp_path, samples=samples_frame(), events=given, mapping=MAPPING).dataset.events()
    assert events[["node", "type"]].to_numpy().tolist() == [["node-0", "repair"]]


def test_a_used_column_that_repeats_has_the_value_that_is_there(tmp_path: Path) -> None:
    given = tickets(
        tmp_path,
        "timestamp,Host,Work,gpu,gpu",
        f"2026-03-01T01:00:00Z,node-0,repair,,{gpu(1)}",
        f"2026-03-01T03:00:00Z,node-0,repair,{gpu(0)},{gpu(0)}",
    )
    events = run_import(tmp_path, samples=samples_frame(), events=given, mapping=MAPPING).dataset.events()
    assert events["gpu"].tolist() == [gpu(1), gpu(0)]


def test_a_used_column_with_two_values_in_a_row_is_refused_with_both(tmp_path: Path) -> None:
    given = tickets(tmp_path, "timestamp,Host,Work,gpu,gpu", f"2026-03-01T01:00:00Z,node-0,repair,{gpu(0)},{gpu(1)}")
    with pytest.raises(InputError, match=f"'gpu'.*{gpu(0)}.*{gpu(1)}|{gpu(0)}.*{gpu(1)}.*'gpu'"):
        run_import(tmp_path, samples=samples_frame(), events=given, mapping=MAPPING)


def test_two_names_of_one_channel_are_one_column(tmp_path: Path) -> None:
    path = tmp_path / "smi.csv"
    path.write_text(f"timestamp,uuid,power.draw [W],power.draw.average [W]\n2026-03-01T00:00:00Z,{gpu(0)},300,290\n")
    result = run_import(tmp_path, samples=[path])
    rows = [result.dataset.read_bucket(number).to_pandas() for number in result.dataset.buckets()]
    assert [row["power_w"][0] for row in rows if len(row)] == [300]
