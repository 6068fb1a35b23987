import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from foundation.errors import InputError
from telemetry.config import ChannelDeclaration
from telemetry.dataset.store import Dataset
from telemetry.importing.files.sources import expand_sources
from tests.telemetry.helpers import (
    DAY,
    all_samples,
    events_frame,
    gpu,
    inventory_frame,
    quarantine_of,
    run_import,
    samples_frame,
    write_csv,
)


def changed(frame: pd.DataFrame, row: int, **values: object) -> pd.DataFrame:
    frame = frame.astype(dict.fromkeys(values, object))
    for name, value in values.items():
        frame.loc[row, name] = value
    return frame


def refused(folder: Path, *texts: str, **given: Any) -> None:
    """The import fails with each of the texts, and leaves nothing behind but its sources."""
    with pytest.raises(InputError) as caught:
        run_import(folder, **given)
    for text in texts:
        assert text in str(caught.value), str(caught.value)
    assert not (folder / "dataset").exists()
    assert not list(folder.glob(".dataset*"))


def test_csv_and_parquet_in_any_order_are_one_dataset(tmp_path: Path):
    frame = samples_frame()
    whole = run_import(tmp_path, samples=frame, out="whole")
    shuffled = frame.sample(frac=1.0, random_state=3)
    first, second = tmp_path / "one.parquet", tmp_path / "two.parquet"
    shuffled[:10].to_parquet(first, index=False)
    shuffled[10:].to_parquet(second, index=False)
    parts = run_import(tmp_path, samples=[second, first], out="parts")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_csv(folder / "rows.csv.gz", shuffled)
    packed = run_import(tmp_path, samples=[folder], out="packed")
    assert whole.dataset.digest == parts.dataset.digest == packed.dataset.digest
    assert whole.dataset.meta.counts["samples"] == 24
    assert whole.quarantined == {}
    samples = all_samples(whole)
    assert samples["gpu_temp_c"].tolist() == frame["gpu_temp_c"].tolist()
    assert samples["clocks_event_reasons"].tolist() == frame["clocks_event_reasons"].tolist()


def test_a_mapping_of_columns_units_and_times(tmp_path: Path):
    frame = samples_frame()
    frame["timestamp"] = [pd.Timestamp(text).timestamp() for text in frame["timestamp"]]
    frame["milliwatts"] = frame.pop("power_w") * 1000
    frame["kelvin"] = frame.pop("gpu_temp_c") + 273.15
    frame["remark"] = "x"
    rules = """
        samples:
          columns: {milliwatts: power_w, kelvin: gpu_temp_c, remark: null}
          time: {unit: s}
          scale: {power_w: 0.001}
          offset: {gpu_temp_c: -273.15}
    """
    result = run_import(tmp_path, samples=frame, mapping=rules)
    assert all_samples(result)["power_w"].tolist() == samples_frame()["power_w"].tolist()
    assert np.allclose(all_samples(result)["gpu_temp_c"], samples_frame()["gpu_temp_c"], atol=1e-4)


def test_one_file_a_metric(tmp_path: Path):
    keys = ["timestamp", "node", "gpu"]
    frame = samples_frame()
    files = [
        write_csv(tmp_path / f"{name}.csv", frame[[*keys, name]])
        for name in ("power_w", "gpu_temp_c", "clocks_event_reasons")
    ]
    result = run_import(tmp_path, samples=files)
    assert result.quarantined == {}
    assert result.dataset.meta.counts["samples"] == 24
    assert all_samples(result)["power_w"].tolist() == frame["power_w"].tolist()
    assert all_samples(result)["clocks_event_reasons"].tolist() == frame["clocks_event_reasons"].tolist()


UNUSABLE: list[tuple[dict[str, object], str]] = [
    ({"timestamp": None}, "missing timestamp"),
    ({"timestamp": "2026-03-01T00:00:00"}, "naive timestamp"),
    ({"gpu": None}, "missing gpu"),
    ({"gpu": "GPU-unknown", "node": None}, "unknown gpu"),
    ({"timestamp": "2025-12-31T23:59:59Z", "node": None}, "before installation"),
]


def test_a_row_that_cannot_be_used_is_set_aside(tmp_path: Path):
    frame = samples_frame()
    for row, (values, _) in enumerate(UNUSABLE):
        frame = changed(frame, row, **values)
    result = run_import(tmp_path, samples=frame)
    assert result.quarantined == result.dataset.meta.quarantine == {reason: 1 for _, reason in UNUSABLE}
    assert result.dataset.meta.counts["samples"] == 24 - len(UNUSABLE)
    aside = quarantine_of(result).sort_values("row")
    assert aside[["table", "file", "row", "reason"]].to_numpy().tolist() == [
        ["samples", "samples.csv", row, reason] for row, (_, reason) in enumerate(UNUSABLE, 1)
    ]
    for row, (text, (values, _)) in enumerate(zip(aside["content"], UNUSABLE, strict=True)):
        assert json.loads(text).items() >= {**values, "power_w": str(frame.loc[row, "power_w"])}.items()


@pytest.mark.parametrize(
    ("values", "reason", "detail"),
    [
        ({"power_w": 70000}, "value out of range", "power_w = 70000"),
        ({"power_w": -7}, "value out of range", "power_w = -7"),
        ({"power_w": "inf"}, "value out of range", "power_w = inf"),
        ({"power_w": "much"}, "not a number", "power_w = much"),
        ({"clocks_event_reasons": 1.5}, "not an integer", "clocks_event_reasons = 1.5"),
    ],
)
def test_a_value_that_cannot_be_true_is_nulled_and_kept_aside(values, reason, detail, tmp_path):
    result = run_import(tmp_path, samples=changed(samples_frame(), 7, **values))
    assert result.quarantined == {reason: 1}
    assert quarantine_of(result).iloc[0]["detail"] == detail
    assert all_samples(result)[next(iter(values))].isna().tolist() == [index == 7 for index in range(24)]


def test_values_that_mean_not_supported_are_null_and_counted(tmp_path: Path):
    frame = changed(samples_frame(), 7, ecc_sbe_volatile_total=9223372036854775794, power_w="")
    result = run_import(tmp_path, samples=frame)
    assert (result.quarantined, result.counts["values_not_supported"]) == ({}, 1)
    assert all_samples(result).loc[7, ["ecc_sbe_volatile_total", "power_w"]].isna().all()


def test_duplicates(tmp_path: Path):
    frame = samples_frame()
    again = frame.iloc[[3, 4]]
    conflict = changed(frame.iloc[[5]].reset_index(drop=True), 0, power_w=1.0)
    result = run_import(tmp_path, samples=pd.concat([frame, again, conflict]))
    assert result.counts["samples_repeated"] == 2
    assert result.quarantined == {"conflicting duplicate sample": 1}
    row = quarantine_of(result).iloc[0]
    assert row["row"] == 27
    assert json.loads(row["content"])["power_w"] == 1.0
    assert all_samples(result)["power_w"].tolist() == frame["power_w"].tolist()


def test_rows_with_too_many_fields(tmp_path: Path):
    file = write_csv(tmp_path / "s.csv", samples_frame())
    lines = file.read_text().splitlines()
    lines.insert(5, lines[5] + ",more")
    lines.insert(3, "torn")
    file.write_text("\n".join(lines))
    result = run_import(tmp_path, samples=[file])
    assert result.quarantined == {"malformed row": 2}
    quarantined = quarantine_of(result)
    assert quarantined["row"].tolist() == [3, 6]
    assert quarantined["content"].tolist()[0] == "torn"
    assert result.dataset.meta.counts["samples"] == 24


def test_finer_samples_are_rolled_up(tmp_path: Path):
    result = run_import(tmp_path, samples=samples_frame(times=60, every="1min"))
    samples = all_samples(result)
    assert list(result.dataset.meta.channels)[:5] == [
        "gpu_temp_c",
        "gpu_temp_c_min",
        "gpu_temp_c_max",
        "power_w",
        "power_w_min",
    ]
    first = samples[samples["gpu"] == gpu(1)].iloc[1]
    assert first["timestamp"] == DAY + timedelta(minutes=10)
    assert (first["sample_count"], first["power_w"], first["power_w_max"]) == (10, 355.0, 400.0)
    assert (first["ecc_sbe_volatile_total"], first["ecc_sbe_volatile_total_rise"]) == (10.0, 10.0)
    assert first["clocks_event_reasons"] == 3
    assert result.dataset.meta.span[1] == (DAY + timedelta(hours=1)).to_pydatetime()


def test_coarse_and_irregular_sources_are_taken_as_they_come(tmp_path: Path):
    daily = samples_frame(times=3, every="1D")
    daily["timestamp"] = daily["timestamp"].str.replace("00:00:00", "00:03:21")
    samples = all_samples(run_import(tmp_path, samples=daily))
    assert "sample_count" not in samples
    assert set(samples["timestamp"].dt.strftime("%M:%S")) == {"03:21"}


def test_channels_of_ones_own(tmp_path: Path):
    frame = samples_frame()[["timestamp", "node", "gpu"]].assign(bus_errors_total=range(24), humidity=40.5)
    refused(tmp_path, "2 unknown columns: 'bus_errors_total'", "channels:", "`null`", samples=frame)
    declared = {
        "bus_errors_total": ChannelDeclaration(kind="counter"),
        "humidity": ChannelDeclaration(kind="gauge", unit="%", range=(0, 100)),
    }
    result = run_import(tmp_path, samples=frame, declared=declared)
    assert Dataset.open(tmp_path / "dataset").meta.channels["humidity"].high == 100
    assert all_samples(result)["bus_errors_total"].tolist() == list(range(24))


@pytest.mark.parametrize("missing", ["timestamp", "gpu"])
def test_a_missing_column(missing: str, tmp_path: Path):
    texts = (f"missing column {missing!r}", "samples.csv", "Its columns are", f"columns: {{SOURCE: {missing}}}")
    refused(tmp_path, *texts, samples=samples_frame().drop(columns=missing))


@pytest.mark.parametrize(
    ("channel", "values", "unit", "scale"),
    [
        ("sm_clock_mhz", [0, 0.21, *[1.41] * 28], "GHz", 1000),
        ("gpu_util_pct", [0.5 + index / 100 for index in range(30)], "fractions", 100),
    ],
)
def test_values_of_another_unit_are_refused_with_the_scale(tmp_path, channel, values, unit, scale):
    frame = samples_frame(gpus=1, times=30).assign(**{channel: values})
    refused(tmp_path, f"{channel!r}", f"seem to be {unit}", f"scale: {{{channel}: {scale}}}", samples=frame)


def test_no_rows(tmp_path: Path):
    refused(tmp_path, "the sample files have no rows", "samples.csv", "period", samples=samples_frame()[:0])
    strange = samples_frame().assign(gpu="GPU-unknown", node=None)
    texts = ("no sample row can be used: 24 were quarantined", "'unknown gpu'", "samples.csv, row 1", "inventory")
    refused(tmp_path, *texts, samples=strange)


def test_files_that_are_none(tmp_path: Path):
    refused(tmp_path, "does not exist", "nowhere.csv", samples=[tmp_path / "nowhere.csv"])
    (tmp_path / "s.parquet").write_text("PAR0")
    refused(tmp_path, "cannot be read", "s.parquet", samples=[tmp_path / "s.parquet"])
    (tmp_path / "s.csv").write_bytes(b"")
    refused(tmp_path, "the file is empty", "s.csv", samples=[tmp_path / "s.csv"])
    (tmp_path / "s.xlsx").write_bytes(b"x")
    refused(tmp_path, "'.xlsx'", "Parquet, CSV", samples=[tmp_path / "s.xlsx"])


@pytest.mark.parametrize(
    ("rules", "texts"),
    [
        ("sample: {}", ["sample", "Did you mean 'samples'?"]),
        ("samples: {scales: {power_w: 1}}", ["samples.scales", "Did you mean 'scale'?"]),
        ("samples: {columns: {watts: power_w}}", ["names a source column 'watts' that is not there"]),
        ("samples: {columns: {power_w: pow_w}}", ["unknown target column 'pow_w'", "Did you mean 'power_w'?"]),
        ("samples: {columns: {node: gpu, gpu: gpu}}", ["two source columns map to 'gpu'"]),
        ("samples: {time: {timezone: Mars}}", ["invalid timezone: Mars"]),
        ("span: [2026-03-02T00:00:00Z, 2026-03-01T00:00:00Z]", ["span is empty"]),
    ],
)
def test_mappings_that_are_wrong(rules: str, texts: list[str], tmp_path: Path):
    refused(tmp_path, *texts, samples=samples_frame(), mapping=rules)


def test_nodes_are_the_unit_where_no_gpu_is_named(tmp_path: Path):
    inventory = pd.DataFrame({"node": ["a", "b"], "installed_at": "2026-01-01T00:00:00Z"})
    frame = pd.DataFrame({"timestamp": ["2026-03-01T00:00:00Z"] * 3, "node": ["b", "a", "c"], "power_w": [1, 2, 3]})
    result = run_import(tmp_path, samples=frame, inventory=inventory)
    assert (result.dataset.meta.unit, result.quarantined) == ("node", {"unknown node": 1})
    samples = all_samples(result)
    assert samples["node"].tolist() == ["a", "b"]
    assert samples["gpu"].isna().all()


def test_mig_instances_fold_into_their_gpu(tmp_path: Path):
    names = [
        "MIG-11111111-2222-3333-4444-555555555555",
        f"MIG-{gpu(1)}/3/0",
        "MIG-99999999-2222-3333-4444-555555555555",
    ]
    inventory = inventory_frame(2)
    instances = inventory.iloc[[0, 0, 0]].assign(gpu=names)
    instances.iloc[2, instances.columns.get_loc("pci_bus_id")] = "0000:77:00.0"
    inventory = pd.concat([inventory, instances], ignore_index=True)
    units = [names[0], names[1], gpu(1), gpu(1)]
    frame = pd.DataFrame({"timestamp": "2026-03-01T00:00:00Z", "gpu": units, "GPU_I_ID": [None, None, "3", "4"]})
    frame["power_w"] = [100, 20, 30, 25]
    events = events_frame([("00:01", names[0], "xid", "79")])
    result = run_import(tmp_path, samples=frame, events=events, inventory=inventory)
    assert result.quarantined == {"MIG instance without a known parent": 1}
    samples = all_samples(result)
    assert (samples["gpu"].tolist(), samples["power_w"].tolist()) == ([gpu(0), gpu(1)], [100, 30])
    assert result.dataset.events()["gpu"].tolist() == [gpu(0)]
    assert len(result.dataset.inventory()) == 2


def test_progress_goes_up_to_its_total(tmp_path: Path):
    reported: list[tuple[int, int]] = []
    run_import(tmp_path, samples=samples_frame(), progress=lambda done, total: reported.append((done, total)))
    assert reported == sorted(reported)
    rows = len(samples_frame())
    assert reported[0][0] == 0
    assert rows in [done for done, _ in reported]  # read, and not yet written
    assert reported[-1] == (2 * rows, 2 * rows)


def test_a_glob_that_no_shell_expanded_stands_for_the_files_that_it_matches(tmp_path):
    frame = samples_frame()
    parts = [frame.iloc[:10], frame.iloc[10:]]
    files = [tmp_path / f"part-{number}.csv.gz" for number in range(2)]
    for part, file in zip(parts, files, strict=True):
        write_csv(file, part)
    assert expand_sources((tmp_path / "part-*.csv.gz",), "samples") == files
    result = run_import(tmp_path, samples=[tmp_path / "part-*.csv.gz"])
    assert result.accounting.tables["samples"].read == len(frame)
    with pytest.raises(InputError, match="does not exist"):
        expand_sources((tmp_path / "none-*.csv",), "samples")


@pytest.mark.parametrize("content", [b"PAR1\x15\xc0\n\xff,1\n", b"n\x81de,time\n1\n"])
def test_a_csv_that_is_no_utf8_text_is_refused_by_its_beginning(tmp_path: Path, content: bytes):
    (tmp_path / "smi.csv").write_bytes(content)
    refused(tmp_path, "not UTF-8 text", "smi.csv", samples=[tmp_path / "smi.csv"])


@pytest.mark.parametrize(
    ("when", "text"),
    [
        ("03/01/2026 12:10 PM", "time: {order: dmy}"),
        ("yesterday", "time: {format: "),
        ("1985-03-01T00:00:00Z", "between 1990 and 2099"),
    ],
)
def test_instants_of_which_none_can_be_used_are_refused_with_what_to_write(tmp_path: Path, when: str, text: str):
    refused(tmp_path, text, samples=samples_frame().assign(timestamp=when))
