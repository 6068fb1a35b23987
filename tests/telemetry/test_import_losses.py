"""What an import may lose before it is refused, and times that are later than now."""

import gzip
from datetime import timedelta
from pathlib import Path

import pandas as pd
import pytest

from foundation.errors import InputError
from tests.telemetry.helpers import DAY, events_frame, gpu, inventory_frame, run_import, samples_frame, write_csv

NOW = DAY + timedelta(days=30)


def test_a_quote_that_is_not_closed_is_refused_with_the_file_and_its_share(tmp_path: Path):
    path = write_csv(tmp_path / "samples.csv", samples_frame(gpus=4, times=200))
    lines = path.read_text().splitlines(keepends=True)
    lines[20] = '"' + lines[20]
    path.write_text("".join(lines))
    with pytest.raises(InputError, match=r"samples\.csv.* lost \(9.*--max-loss"):
        run_import(tmp_path, samples=[path])
    assert not (tmp_path / "dataset").exists()


def test_every_file_and_column_that_loses_too_much_is_named_with_an_example(tmp_path: Path):
    frame = samples_frame(gpus=4, times=20).astype(object)
    frame["power_w"] = [f"{power} A" for power in range(len(frame))]
    frame.loc[:25, "timestamp"] = "yesterday"
    texts = ["column power_w", "54 of 54 lost (100%)", "'not a number'", "'26 A'", "`scale:`", "--max-loss"]
    with pytest.raises(InputError) as caught:
        run_import(tmp_path, samples=frame)
    for text in (*texts, "samples.csv, rows: 26 of 80", "'unreadable timestamp'"):
        assert text in str(caught.value)
    values = run_import(tmp_path, samples=frame, max_loss=1.0).accounting.tables["sample values"]
    assert values.left_out == {"not a number": 54}


def test_tickets_from_before_the_fleet_are_set_aside_and_are_no_loss(tmp_path):
    used, old = [("01:00", gpu(0), "xid", "79")] * 80, [("02:00", gpu(0), "xid", "48")] * 100
    frame = events_frame([*used, *old])
    frame.loc[80:, "timestamp"] = "2025-12-24T00:00:00Z"
    assert run_import(tmp_path, events=frame).quarantined == {"before installation": 100}
    frame.loc[70:79, "gpu"] = "GPU-unknown"  # a twentieth of the file, and an eighth of what is of this fleet
    with pytest.raises(InputError, match="10 of 80 lost"):
        run_import(tmp_path, events=frame)


def test_files_of_one_name_in_two_folders_have_a_budget_each(tmp_path: Path):
    paths = [tmp_path / name / "samples.csv" for name in ("good", "bad")]
    for path, times in zip(paths, (2000, 30), strict=True):
        path.parent.mkdir()
        frame = samples_frame(gpus=1, times=times).assign(gpu_temp_c=40, power_w=300).astype(object)
        frame.loc[:, "timestamp"] = frame["timestamp"] if times > 30 else "yesterday"
        write_csv(path, frame)
    with pytest.raises(InputError, match=r"bad/samples\.csv, rows: 30 of 30 lost"):
        run_import(tmp_path, samples=paths)


def test_samples_that_contradict_the_dataset_are_a_loss_and_those_it_has_rolled_up_are_none(tmp_path: Path):
    frame = samples_frame(gpus=2, times=40)
    run_import(tmp_path, samples=frame)
    with pytest.raises(InputError, match=r"80 of 80 lost .*'conflicting duplicate sample'"):
        run_import(tmp_path, samples=frame.assign(power_w=1.0))
    finer = samples_frame(gpus=2, times=400, every="1min").assign(gpu_temp_c=40, power_w=300)
    run_import(tmp_path, samples=finer, out="rolled")
    again = run_import(tmp_path, samples=finer.assign(power_w=1.0), out="rolled")
    assert again.quarantined == {"its step was rolled up by an earlier import": 800}


def test_a_small_loss_is_quarantined_and_counted(tmp_path: Path):
    frame = samples_frame(gpus=4, times=200).astype(object)
    frame.loc[:30, "power_w"] = "much"
    assert run_import(tmp_path, samples=frame).quarantined == {"not a number": 31}


def test_what_is_dated_in_the_future_is_quarantined_and_moves_no_span(tmp_path: Path):
    frame = samples_frame(gpus=4, times=10)
    frame.loc[3, "timestamp"] = "2099-01-01T00:00:00Z"
    rows = [("01:00", gpu(0), "xid", "79"), ("01:00", gpu(1), "xid", "79"), ("02:00", gpu(1), "xid", "48")]
    events = events_frame(rows)
    events["known_at"] = [None, None, "2098-01-01T00:00:00Z"]
    events.loc[1, "timestamp"] = "2097-01-01T00:00:00Z"
    starts, ends = ["2026-03-01T01:00:00Z", "2096-01-01T00:00:00Z"], ["2096-01-01T00:00:00Z", None]
    jobs = pd.DataFrame({"job": ["1", "2"], "node": "node-0", "started_at": starts, "ended_at": ends})
    jobs_file = write_csv(tmp_path / "jobs.csv", jobs)
    result = run_import(tmp_path, samples=frame, events=events, jobs=jobs_file, now=NOW, max_loss=1.0)
    assert result.quarantined == {"an impossible clock": 4}
    assert result.dataset.meta.span[1] < NOW
    held = result.dataset.jobs()
    assert held["job"].tolist() == ["1"]
    assert held["ended_at"].isna().all()


def test_a_stay_in_the_future_is_quarantined_and_an_end_in_the_future_is_none(tmp_path: Path):
    inventory = inventory_frame().assign(removed_at=["2099-12-31T00:00:00Z", None, None, None])
    inventory.loc[3, "installed_at"] = "2095-01-01T00:00:00Z"
    result = run_import(tmp_path, events=events_frame([("01:00", gpu(0), "xid", "79")]), inventory=inventory, now=NOW)
    assert result.quarantined == {"an impossible clock": 1}
    assert result.dataset.inventory()["removed_at"].isna().all()
    assert len(result.dataset.inventory()) == 3


def test_a_day_ahead_is_a_clock_or_a_zone(tmp_path: Path):
    frame = samples_frame(gpus=1, times=4)
    early = DAY - timedelta(hours=20)
    assert run_import(tmp_path, samples=frame, now=early).quarantined == {}


def test_an_observed_period_that_ends_in_the_future(tmp_path: Path):
    with pytest.raises(InputError, match="ends in the future"):
        run_import(
            tmp_path,
            events=events_frame([("01:00", gpu(0), "xid", "79")]),
            mapping="span: [2026-03-01T00:00:00Z, 2099-04-01T00:00:00Z]",
        )


def test_a_kernel_log_is_judged_by_the_share_of_its_lines(tmp_path: Path):
    log = tmp_path / "kernel.log"
    line = "{}-03-01T{:02d}:{:02d}:00+00:00 node-0 kernel: NVRM: Xid (PCI:0000:10:00): 74, pid=1, NVLink\n"
    old = [line.format(2019, hour, 0) for hour in range(22)]  # of a GPU that was here before
    log.write_text("".join(old + [line.format(2026, n // 60, n % 60) for n in range(900)]))
    result = run_import(tmp_path, samples=samples_frame(), events=[log])
    assert sum(result.quarantined.values()) == 22
    assert len(result.dataset.events()) == 900


def test_the_last_time_of_a_run_lies_within_a_minute_of_its_first(tmp_path: Path):
    events = events_frame([("01:00", gpu(0), "xid", "79")]).assign(count=40, last_at="2090-01-01T00:00:00Z")
    stored = run_import(tmp_path, samples=samples_frame(), events=events).dataset.events()
    assert stored["last_at"].tolist() == [stored["timestamp"][0] + timedelta(minutes=1)]
    assert stored["count"].tolist() == [40]


@pytest.mark.parametrize("name", ["node-0.log.gz", "samples.csv.gz", "jobs.json.gz"])
def test_a_download_that_was_cut_short_is_named_whatever_it_holds(tmp_path: Path, name: str):
    path = tmp_path / name
    path.write_bytes(gzip.compress(samples_frame(times=400).to_csv(index=False).encode())[:-2000])
    given = {"log": {"events": [path]}, "csv": {"samples": [path]}, "json": {"samples": samples_frame(), "jobs": path}}
    with pytest.raises(InputError, match=rf"cannot be read: (Truncated|Compressed file ended).*{name}"):
        run_import(tmp_path, **given[name.split(".")[1]])


def test_all_sources_may_be_compressed_and_a_log_is_still_of_the_node_in_its_name(tmp_path: Path):
    ends = ["2026-03-01", None]  # a day counts to its end
    jobs = pd.DataFrame({"job": ["1", "2"], "node": "node-0", "started_at": "2026-03-01", "ended_at": ends})
    frames = {"inventory": inventory_frame(), "samples": samples_frame(), "jobs": jobs}
    files = {name: tmp_path / f"{name}.csv.gz" for name in frames}
    for name, frame in frames.items():
        frame.to_csv(files[name], index=False)
    (log := tmp_path / "node-0.log.gz").write_bytes(
        gzip.compress(
            b"2026-03-01T01:00:00Z kernel: NVRM: Xid (PCI:0000:10:00): 79, pid=1, GPU has fallen off the bus\n"
        )
    )
    given = {"inventory": files["inventory"], "samples": [files["samples"]], "jobs": files["jobs"]}
    result = run_import(tmp_path, events=[log], **given, mapping="jobs: {time: {timezone: UTC}}")
    assert result.dataset.events()[["node", "gpu"]].to_numpy().tolist() == [["node-0", gpu(0)]]
    assert (result.quarantined, result.dataset.meta.counts["samples"]) == ({}, 24)
    held = result.dataset.jobs()
    assert [str(end) for end in held["ended_at"]] == ["2026-03-01 23:59:59.999000+00:00", "NaT"]
