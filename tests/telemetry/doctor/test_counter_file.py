"""deploy/dcgm-exporter/predrain-counters.csv is held to the catalogue and to the exporter's rules."""

from pathlib import Path

from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.groups import (
    LATER_FIELDS,
    counter_line,
    counter_name,
)

FILE = Path(__file__).resolve().parents[3] / "deploy" / "dcgm-exporter" / "predrain-counters.csv"
DCGM = [channel for channel in CATALOGUE.values() if channel.dcgm_names]


def later_lines() -> str:
    marked = [line.removeprefix("#later ") for line in FILE.read_text().splitlines() if line.startswith("#later ")]
    return "\n".join(marked)


def types_of(text: str) -> dict[str, str]:
    """Read a counter file by the exporter's rules: it does not start with one that breaks them."""
    types: dict[str, str] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            assert '"' not in line
            field, kind, what = (each.strip(" ") for each in line.split(","))
            assert field not in types  # it would give a page with repeated lines
            assert kind in ("gauge", "counter", "label")
            assert what
            types[field] = kind
    return types


def all_lines() -> dict[str, str]:
    return types_of(FILE.read_text() + later_lines() + "\n")


def test_the_exporter_would_start_with_it_as_it_is_and_with_the_later_lines() -> None:
    # DCGM takes 128 fields a group at most.
    assert len(all_lines()) < 100


def test_every_channel_that_dcgm_has_is_in_it_under_the_name_that_all_exporters_accept() -> None:
    lines = all_lines()
    for channel in DCGM:
        name = counter_name(channel)
        assert name in lines, channel.name
        assert lines[name] == ("counter" if channel.kind == "counter" else "gauge"), channel.name
        assert (counter_line(channel) or "").startswith(f"{name}, {lines[name]}, ")


def test_nothing_is_in_it_that_predrain_does_not_read() -> None:
    ours = {name for channel in DCGM for name in channel.dcgm_names}
    ours |= {"DCGM_EXP_XID_ERRORS_COUNT", "DCGM_FI_DRIVER_VERSION", "DCGM_FI_DEV_SERIAL"}
    assert set(all_lines()) <= ours


def test_names_that_stop_older_exporters_are_switched_off() -> None:
    assert not types_of(FILE.read_text()).keys() & LATER_FIELDS
    assert types_of(later_lines()).keys() == LATER_FIELDS
