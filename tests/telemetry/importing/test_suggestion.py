"""Guesses of unknown columns: one listing, a mapping to check, and nothing imported by a guess."""

import tempfile
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.errors import InputError
from telemetry.dataset.channels import CATALOGUE
from telemetry.importing.mapping import ImportMapping, load_mapping
from telemetry.importing.suggestion.guesses import Guess, suggest
from telemetry.importing.suggestion.questions import mapping_text
from tests.telemetry.helpers import inventory_frame, run_import, samples_frame, write_csv

SMI = {
    "timestamp": "Datetime",
    "node": "host_name",
    "gpu": "gpu_uuid_text",
    "gpu_temp_c": "gpu temperature",
    "power_w": "board_power_mw",
    "ecc_sbe_volatile_total": "corrected_volatile_ecc_errors_total",
    "clocks_event_reasons": "ClocksEventReasons",
    "xid_last": "XID (last)",
}
PIECES = ["temp", "gpu", "mem", "power", "mw", "ecc", "sbe", "dbe", "total", "util", "%", "clock", "uuid", "time", "x9"]


def guesses_of(path: Path, role: str = "samples") -> dict[str, Guess]:
    return {guess.column: guess for guess in suggest({role: [path]}, ImportMapping(), CATALOGUE)}


def test_a_file_of_other_names_and_units_imports_by_its_suggested_mapping_as_under_our_names(tmp_path: Path) -> None:
    frame = samples_frame()
    renamed = frame.assign(power_w=frame["power_w"] * 1000).rename(columns=SMI)
    path = write_csv(tmp_path / "smi.csv", renamed)
    found = guesses_of(path)
    assert {column: guess.target for column, guess in found.items()} == {SMI[name]: name for name in SMI}
    assert all(guess.sure for guess in found.values())
    text = mapping_text(list(found.values()), ["samples"], None)
    theirs = run_import(tmp_path, samples=renamed, mapping=text, out="theirs")
    ours = run_import(tmp_path, samples=frame, out="ours")
    for one, two in zip(theirs.dataset.buckets(), ours.dataset.buckets(), strict=True):
        pd.testing.assert_frame_equal(
            theirs.dataset.read_bucket(one).to_pandas(), ours.dataset.read_bucket(two).to_pandas()
        )


def test_what_is_known_needs_no_mapping(tmp_path: Path) -> None:
    names = [channel.dcgm_names[0] for channel in CATALOGUE.values() if channel.dcgm_names]
    frame = pd.DataFrame(
        {"timestamp": ["2026-01-01T00:00:00Z"], "Hostname": "n0", "UUID": "g"} | dict.fromkeys(names, 1)
    )
    assert guesses_of(write_csv(tmp_path / "dcgm.csv", frame)) == {}


@settings(max_examples=25)
@given(st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("_".join), min_size=1, unique=True))
def test_no_two_columns_are_guessed_to_be_one_and_the_file_can_be_loaded(names: list[str]) -> None:
    frame = pd.DataFrame({name: [1.0, 2.0] for name in names} | {"power_w": [300.0, 310.0]})
    with tempfile.TemporaryDirectory() as folder:
        path = write_csv(Path(folder) / "some.csv", frame)
        found = guesses_of(path)
        targets = [guess.target for guess in found.values() if guess.target]
        assert len(set(targets)) == len(targets)
        assert "power_w" not in targets
        mapping = Path(folder) / "mapping.yaml"
        mapping.write_text(mapping_text(list(found.values()), ["samples"], None))
        columns = load_mapping(mapping).samples.columns
        assert columns == {guess.column: guess.target if guess.sure else None for guess in found.values()}


def test_the_unit_is_seen_from_the_values_where_the_name_does_not_tell_and_is_not_sure(tmp_path: Path) -> None:
    frame = pd.DataFrame({"power": [310_000, 320_000], "gpu_utilisation": [97, 98]})
    found = guesses_of(write_csv(tmp_path / "a.csv", frame))
    assert (found["power"].target, found["power"].scale, found["power"].sure) == ("power_w", 0.001, False)
    assert (found["gpu_utilisation"].target, found["gpu_utilisation"].sure) == ("gpu_util_pct", True)


def test_values_that_no_unit_makes_fit_are_no_sure_guess(tmp_path: Path) -> None:
    found = guesses_of(write_csv(tmp_path / "a.csv", pd.DataFrame({"gpu temperature": [-40_000, 90_000]})))
    assert not found["gpu temperature"].sure


def test_a_given_mapping_is_kept_and_what_is_new_added(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", pd.DataFrame({"watts_in": [300.0], "gpu temperature": [50.0]}))
    given_file = tmp_path / "given.yaml"
    given_file.write_text(
        "samples: {columns: {watts_in: power_w}, scale: {power_w: 2.0}}\nkernel_log: {timezone: UTC}\n"
    )
    found = suggest({"samples": [path]}, load_mapping(given_file), CATALOGUE)
    (tmp_path / "new.yaml").write_text(mapping_text(found, ["samples"], given_file))
    new = load_mapping(tmp_path / "new.yaml")
    assert new.samples.columns == {"watts_in": "power_w", "gpu temperature": "gpu_temp_c"}
    assert (new.samples.scale, str(new.kernel_log.timezone)) == ({"power_w": 2.0}, "UTC")


def test_the_unit_of_instants_and_the_types_of_tickets_are_guessed_and_what_is_not_is_named(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "t.csv",
        pd.DataFrame(
            {
                "Opened": 1_767_225_600_000,
                "Host": "n0",
                "Category": ["GPU fell off the bus", "RMA done", "Node rebooted", "xid", "lunch"],
                "When": "2026-01-01 10:00",
            }
        ),
    )
    found = suggest({"events": [path]}, ImportMapping(), CATALOGUE)
    file = tmp_path / "mapping.yaml"
    file.write_text(mapping_text(found, ["events"], None))
    assert load_mapping(file).events.values == {
        "type": {
            "GPU fell off the bus": "failure",
            "Node rebooted": "other",
            "RMA done": "replacement",
        }
    }
    assert "# CHECK: values without a guess are `other`: lunch; null drops the row" in file.read_text()


@pytest.mark.parametrize(("factor", "unit"), [(1, "s"), (1_000, "ms"), (10**6, "us"), (10**9, "ns")])
def test_instants_that_are_numbers_say_their_unit_by_their_size(tmp_path: Path, factor: int, unit: str) -> None:
    path = write_csv(tmp_path / "s.csv", pd.DataFrame({"ts": [1_767_225_600 * factor], "host": "n0", "watts": 300.0}))
    file = tmp_path / "mapping.yaml"
    file.write_text(mapping_text(suggest({"samples": [path]}, ImportMapping(), CATALOGUE), ["samples"], None))
    assert load_mapping(file).samples.time.unit == unit


def test_further_columns_of_an_inventory_stay_facts_of_their_own(tmp_path: Path) -> None:
    frame = inventory_frame().assign(cooling="liquid", serial_number="17")
    assert guesses_of(write_csv(tmp_path / "i.csv", frame), "inventory") == {}


def test_every_unknown_column_of_every_file_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"3 unknown columns: 'gpu temperature' \(gpu_temp_c\), 'odd'.*'colour'"):
        run_import(
            tmp_path,
            samples=samples_frame().rename(columns={"gpu_temp_c": "gpu temperature"}).assign(odd=1),
            events=pd.DataFrame(
                {"timestamp": ["2026-03-01T00:00:00Z"], "node": "node-0", "type": "repair", "colour": "r"}
            ),
        )


def test_the_index_that_pandas_writes_is_left_out(tmp_path: Path) -> None:
    frame = samples_frame()
    frame.index = frame.index + 5
    frame.to_parquet(tmp_path / "a.parquet")
    frame.iloc[1:].to_parquet(tmp_path / "b.parquet")
    frame.to_csv(tmp_path / "c.csv")
    assert all(guesses_of(tmp_path / name) == {} for name in ("a.parquet", "b.parquet", "c.csv"))
    result = run_import(tmp_path, samples=frame.reset_index(names="__index_level_0__"))
    assert result.dataset.meta.counts["samples"] == len(frame)


def test_files_with_different_columns_are_imported_by_one_mapping(tmp_path: Path) -> None:
    frame = samples_frame()
    later = frame.assign(timestamp=[text.replace("03-01", "03-02") for text in frame["timestamp"]])
    one = write_csv(tmp_path / "a.csv", frame.rename(columns={"gpu_temp_c": "temp_gpu"}))
    other = write_csv(tmp_path / "b.csv", later.rename(columns={"power_w": "watts"}))
    guesses = {guess.column: guess for guess in suggest({"samples": [one, other]}, ImportMapping(), CATALOGUE)}
    assert guesses["temp_gpu"].target == "gpu_temp_c", "what another file has takes nothing from it"
    mapping = "samples: {columns: {temp_gpu: gpu_temp_c, watts: power_w}}"
    result = run_import(tmp_path, samples=[one, other], mapping=mapping)
    assert result.accounting.tables["samples"].read == 2 * len(frame)
    with pytest.raises(InputError, match="a source column 'wats' that is not there"):
        run_import(tmp_path, samples=[one, other], mapping=mapping.replace("watts", "wats"), out="none")


@pytest.mark.parametrize(
    ("values", "kind"),
    [([*range(40)], "counter"), ([0, 1, 4, 8] * 10, "flags"), ([0, 3, 5, 6] * 10, "enum"), ([0.2, 0.1] * 20, "gauge")],
)
def test_a_column_that_nothing_is_like_says_of_what_kind_its_values_are(tmp_path: Path, values, kind: str) -> None:
    path = write_csv(tmp_path / "s.csv", pd.DataFrame({"timestamp": "2026-03-01T00:00:00Z", "gpu": "a", "qqq": values}))
    assert f"{kind}?" in guesses_of(path)["qqq"].why
