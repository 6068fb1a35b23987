"""deploy/dcgm-exporter/predrain-counters.csv is held to the catalogue and to the exporter's rules."""

from pathlib import Path

import pytest

from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.counters import (
    EXPORTER_FIELDS,
    LATER_FIELDS,
    STOCK_FIELDS,
    counter_line,
    counter_name,
    in_stock_file,
    missing_from,
    read_counter_file,
)
from telemetry.errors import InputError

FILE = Path(__file__).resolve().parents[3] / "deploy" / "dcgm-exporter" / "predrain-counters.csv"
DCGM = [channel for channel in CATALOGUE.values() if channel.dcgm_names]


def later_lines() -> str:
    marked = [line.removeprefix("#later ") for line in FILE.read_text().splitlines() if line.startswith("#later ")]
    return "\n".join(marked)


def test_the_exporter_would_start_with_it_as_it_is_and_with_the_later_lines() -> None:
    now = read_counter_file(FILE.read_text(), FILE.name)
    later = read_counter_file(later_lines(), FILE.name)
    fields = [line.field for line in (*now, *later)]
    assert len(fields) == len(set(fields))
    assert all(line.help for line in (*now, *later))
    # DCGM takes 128 fields a group at most.
    assert len(fields) < 100


def test_every_channel_that_dcgm_has_is_in_it_under_the_name_that_all_exporters_accept() -> None:
    lines = {line.field: line for line in read_counter_file(FILE.read_text() + later_lines() + "\n", FILE.name)}
    for channel in DCGM:
        name = counter_name(channel)
        assert name in lines, channel.name
        assert lines[name].type == ("counter" if channel.kind == "counter" else "gauge"), channel.name
        assert (counter_line(channel) or "").startswith(f"{name}, {lines[name].type}, ")


def test_nothing_is_in_it_that_predrain_does_not_read() -> None:
    ours = {name for channel in DCGM for name in channel.dcgm_names}
    ours |= set(EXPORTER_FIELDS) | {"DCGM_FI_DRIVER_VERSION", "DCGM_FI_DEV_SERIAL"}
    found = {line.field for line in read_counter_file(FILE.read_text() + later_lines() + "\n", FILE.name)}
    assert found <= ours


def test_names_that_stop_older_exporters_are_switched_off() -> None:
    fields = {line.field for line in read_counter_file(FILE.read_text(), FILE.name)}
    assert not fields & LATER_FIELDS
    assert {line.field for line in read_counter_file(later_lines(), FILE.name)} == LATER_FIELDS


def test_the_stock_file_leaves_out_what_the_vendor_and_we_go_by() -> None:
    left_out = {channel.name for channel in DCGM if not in_stock_file(channel)}
    assert {"ecc_sbe_volatile_total", "row_remap_pending", "nvlink_replay_total", "clocks_event_reasons"} <= left_out
    assert {name for channel in DCGM for name in channel.dcgm_names if in_stock_file(channel)} >= STOCK_FIELDS


def test_missing_channels_are_those_under_none_of_their_names() -> None:
    lines = read_counter_file("DCGM_FI_DEV_GPU_TEMP_CELSIUS, gauge, new name\n", "new.csv")
    missing = missing_from(lines, CATALOGUE)
    assert "gpu_temp_c" not in {channel.name for channel in missing}
    assert len(missing) == len(DCGM) - 1


def test_every_line_that_the_doctor_would_print_can_be_read() -> None:
    text = "\n".join(line for channel in DCGM if (line := counter_line(channel)))
    assert len(read_counter_file(text, "all.csv")) == len(DCGM)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("A, gauge", "the line has 2 fields, the exporter wants 3 (f.csv, line 2). Write FIELD, type, help."),
        (
            "A, gauge, hot, very",
            "the line has 4 fields, the exporter wants 3 (f.csv, line 2). Write FIELD, type, help.",
        ),
        ("A, gouge, x", "'gouge' is no type (f.csv, line 2). Use one of gauge, counter, label."),
        ('A, gauge, a "hot" one', "the line holds a quote (f.csv, line 2). Write the help without quotes."),
    ],
)
def test_what_the_exporter_would_not_start_with_is_refused(line: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_counter_file(f"# comment, with, commas\n{line}\n", "f.csv")
    assert str(caught.value) == message


def test_a_field_twice_is_refused() -> None:
    with pytest.raises(InputError, match="A stands there twice, first in line 1"):
        read_counter_file("A, gauge, x\n\nA, counter, y\n", "f.csv")
