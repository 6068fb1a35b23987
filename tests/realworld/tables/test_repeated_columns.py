"""Columns that a header has several times: labels and comments of tickets, averages beside values."""

from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foundation.errors import InputError
from tests.telemetry.helpers import all_samples, gpu, run_import, samples_frame

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


def with_two_gpus(folder: Path, kind: str, *pairs: tuple[str, str]) -> list[Path]:
    """A table of repairs that gives the GPU twice."""
    times = [f"2026-03-01T0{2 * number + 1}:00:00Z" for number in range(len(pairs))]
    rows = [(time, "node-0", "repair", *pair) for time, pair in zip(times, pairs, strict=True)]
    names = ("timestamp", "Host", "Work", "gpu", "gpu")
    path = folder / f"repairs.{kind.partition(' ')[0]}"
    if kind == "csv":
        path.write_text("\n".join(map(",".join, [names, *rows])) + "\n")
    elif kind == "parquet":
        arrays = [pa.array([cell or None for cell in column]) for column in zip(*rows, strict=True)]
        pq.write_table(pa.Table.from_arrays(arrays, names), path)
    elif kind == "table":
        lines = [names, tuple("-" * 40 for _ in names), *rows]
        path.write_text("".join(" ".join(f"{cell:<40}" for cell in line) + "\n" for line in lines))
    else:
        form = '{{"timestamp":"{}","Host":"{}","Work":"{}",' + {
            "json": '"gpu":"{}","gpu":"{}"}}',
            "jsonl": '"gpu":"{}", "gpu ":"{}"}}',
            "json nested": '"gpu":{{"uuid":"{}","uuid":"{}"}}}}',
            "json list": '"gpu.uuid":"{}","gpu":{{"uuid":"{}"}}}}',
        }[kind]  # fmt: skip
        lines = [form.format(*row) for row in rows]
        path.write_text("\n".join(lines) if kind == "jsonl" else f"[{','.join(lines)}]")
    return [path]


KINDS = ["csv", "parquet", "table", "json", "jsonl", "json nested", "json list"]
JSON_MAPPING = MAPPING.replace("Work: type", "Work: type, gpu.uuid: gpu")


def mapping_of(kind: str) -> str:
    return JSON_MAPPING if " " in kind else MAPPING


@pytest.mark.parametrize("kind", KINDS)
def test_a_used_column_that_repeats_has_the_value_that_is_there(tmp_path: Path, kind: str) -> None:
    given = with_two_gpus(tmp_path, kind, ("", gpu(1)), (gpu(0), gpu(0)), (gpu(1), ""))
    events = run_import(tmp_path, samples=samples_frame(), events=given, mapping=mapping_of(kind)).dataset.events()
    assert events["gpu"].tolist() == [gpu(1), gpu(0), gpu(1)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_used_column_with_two_values_in_a_row_is_refused_with_both(tmp_path: Path, kind: str) -> None:
    given = with_two_gpus(tmp_path, kind, (gpu(0), gpu(1)))
    with pytest.raises(InputError, match=f"{gpu(0)}.*{gpu(1)}.*'gpu"):
        run_import(tmp_path, samples=samples_frame(), events=given, mapping=mapping_of(kind))


@pytest.mark.parametrize("values", [("40", "40"), ("40", "50")])
def test_a_column_of_dmon_that_repeats(tmp_path: Path, values: tuple[str, str]) -> None:
    line = "2026-03-01T00:00:00Z {:8} {} {}\n"
    (tmp_path / "dmon.txt").write_text(line.format("#Entity", "TMPTR", "TMPTR") + line.format("GPU 0", *values))
    with pytest.raises(InputError, match="'40' and '50'") if len({*values}) > 1 else nullcontext():
        given = [tmp_path / "dmon.txt"]
        result = run_import(tmp_path, samples=given, mapping="samples: {constants: {node: n}}\n")
        assert all_samples(result)["gpu_temp_c"].tolist() == [40]


def test_two_names_of_one_channel_are_one_column(tmp_path: Path) -> None:
    path = tmp_path / "smi.csv"
    path.write_text(f"timestamp,uuid,power.draw [W],power.draw.average [W]\n2026-03-01T00:00:00Z,{gpu(0)},300,290\n")
    result = run_import(tmp_path, samples=[path])
    assert all_samples(result)["power_w"].tolist() == [300]
