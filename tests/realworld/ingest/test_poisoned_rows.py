"""One poisoned row among staged rows: every other row reaches the dataset, and the poisoned one is a counted reason."""

from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from telemetry.dataset.store import Dataset
from telemetry.staging.folder import STAGED_EVENTS, STAGED_INVENTORY, Kind
from telemetry.staging.staged import Waiting
from tests.telemetry.helpers import DAY, gpu
from tests.telemetry.staging_world import NOW, compact_settings, compacted, raw, samples_of, stage_frame, staging

MS = int(DAY.timestamp() * 1000)
INSTANTS = (2**53, 2**62, -(2**62), 0, -1, 2**43, 253402300800000, MS + 10**12)


def as_staged(schema: pa.Schema, rows: list[dict[str, object]]) -> pa.Table:
    """Lay rows out as staged, whatever their instants: milliseconds that no datetime can hold included."""
    arrays = []
    for field in schema:
        values = [row.get(field.name) for row in rows]
        if pa.types.is_timestamp(field.type):
            arrays.append(pa.array(values, pa.int64()).cast(field.type))
        elif field.type == pa.string() and any(isinstance(value, bytes) for value in values):
            raw_bytes = [value.encode() if isinstance(value, str) else value for value in values]
            arrays.append(pa.array(raw_bytes, pa.binary()).view(pa.string()))
        else:
            arrays.append(pa.array(values, field.type))
    return pa.table(arrays, schema=pa.schema([field.with_nullable(True) for field in schema]))


def stage(folder: Path, kind: Kind, table: pa.Table, name: str) -> None:
    path = staging(folder).root / kind / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def an_event(number: int, **poison: object) -> dict[str, object]:
    ms = MS + 60_000 * number
    return {
        "timestamp": ms,
        "known_at": ms,
        "node": "node-0",
        "gpu": gpu(0),
        "type": "xid",
        "code": str(number),
    } | poison


@pytest.mark.parametrize("column", ["timestamp", "known_at"])
def test_an_instant_out_of_range_stops_no_compaction(tmp_path: Path, column: str) -> None:
    stage_frame(tmp_path, raw(gpus=2))
    poisoned = [an_event(2 + place, **{column: instant}) for place, instant in enumerate(INSTANTS)]
    stage(tmp_path, "events", as_staged(STAGED_EVENTS, [an_event(1), *poisoned, an_event(98)]), "a")
    stage(tmp_path, "events", as_staged(STAGED_EVENTS, [an_event(99)]), "b")
    result = compacted(tmp_path)
    codes = set(Dataset.open(tmp_path / "dataset").events()["code"])
    before_the_event = [str(2 + place) for place, instant in enumerate(INSTANTS) if 631152000000 <= instant < MS]
    kept = before_the_event if column == "known_at" else []
    assert codes == {"1", *kept, "98", "99"}
    account = result.accounting.tables["events"]
    lost = len(INSTANTS) - len(kept)
    assert (account.read, account.used, account.left_out.total()) == (3 + len(INSTANTS), 3 + len(kept), lost)
    assert account.unaccounted == 0
    stage_frame(tmp_path, raw(gpus=2, start=DAY.ceil("D")))
    assert compacted(tmp_path).compacted == {"samples": 1}


POISON: list[dict[str, object]] = [
    *({"node": b"node-\xed\xa0\x80"}, {"detail": b"\xff\xfe"}, {"gpu": b"GPU-\x80"}),
    *({"detail": "x" * 3_000_000}, {"type": "1"}, {"code": None}),
]


def test_text_that_cannot_be_stored_costs_its_own_row_only(tmp_path: Path) -> None:
    stage_frame(tmp_path, raw(gpus=1))
    rows = [an_event(1), *(an_event(2, **poison) for poison in POISON), an_event(3)]
    stage(tmp_path, "events", as_staged(STAGED_EVENTS, rows), "a")
    account = compacted(tmp_path).accounting.tables["events"]
    assert set(Dataset.open(tmp_path / "dataset").events()["code"]) == {"1", "3"}
    assert (account.read, account.used, account.unaccounted) == (2 + len(POISON), 2, 0)


def test_an_observation_at_an_impossible_time_makes_no_installation(tmp_path: Path) -> None:
    stage_frame(tmp_path, raw(gpus=1))
    seen = [
        {"gpu": gpu(number), "node": "node-0", "seen_at": ms} for number, ms in ((0, MS), (7, 2**53), (8, -(2**62)))
    ]
    stage(tmp_path, "inventory", as_staged(STAGED_INVENTORY, seen), "a")
    account = compacted(tmp_path).accounting.tables["observations"]
    assert set(Dataset.open(tmp_path / "dataset").inventory()["gpu"]) == {gpu(0)}
    assert (account.read, account.used, account.left_out.total()) == (3, 1, 2)


def test_samples_with_impossible_instants_and_numbers_leave_the_others(tmp_path: Path) -> None:
    good = raw(gpus=2, times=60)
    stage_frame(tmp_path, good)
    path = staging(tmp_path).waiting("samples")[0]
    table = pq.read_table(path)
    stamps = table.column("timestamp").cast(pa.int64()).to_pylist()
    power = [float(value) for value in table.column("power_w").to_pylist()]
    stamps[3], stamps[7], power[11] = 2**53, -(2**62), float("inf")
    poisoned = table.set_column(0, "timestamp", pa.array(stamps, pa.int64()).cast(table.schema.types[0]))
    place = poisoned.column_names.index("power_w")
    pq.write_table(poisoned.set_column(place, "power_w", pa.array(power, pa.float32())), path)
    account = compacted(tmp_path).accounting.tables["samples"]
    assert (account.read, account.used, account.left_out.total(), account.unaccounted) == (120, 118, 2, 0)
    assert samples_of(tmp_path)["sample_count"].sum() == 118


def test_a_damaged_file_does_not_stop_the_next(tmp_path: Path) -> None:
    stage_frame(tmp_path, raw(gpus=1))
    for kind in ("samples", "events", "inventory", "jobs"):
        path = staging(tmp_path).root / kind / "0-damaged.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"PAR1" + bytes(range(200)) + b"PAR1")
    result = compacted(tmp_path)
    assert result.compacted == {"samples": 1}
    assert result.accounting.tables["staged files"].left_out == {"cannot be read": 4}


def test_ten_thousand_poisoned_rows_are_all_accounted_for(tmp_path: Path) -> None:
    """Every staged table in one compaction of random rows: the reader of staged tables never raises."""
    turn = Random(1)
    texts = 9 * [None, "", "node-0", gpu(0), b"\xff", b"\xed\xa0\x80", "\0", "\u2028", "NaN", "1e400"] + ["x" * 70_000]
    known = ["xid", "failure", "repair", "maintenance", "drain", "other", "explosion", None, b"\xfe"]
    instants = [*INSTANTS, None, *(MS + 1000 * number for number in range(20))]
    rows = [
        {field.name: turn.choice(texts) for field in STAGED_EVENTS}
        | {"timestamp": turn.choice(instants), "known_at": turn.choice(instants), "type": turn.choice(known)}
        for _ in range(8_000)
    ]
    table = as_staged(STAGED_EVENTS, rows)
    settings = compact_settings()
    waiting = Waiting(staging(tmp_path), settings.channels, settings.telemetry.step or DAY - DAY, NOW, settings.delay)
    good = waiting.read_events(Path("fuzz"), table)
    account = waiting.quarantine.tables["events"]
    assert account.read == 8_000
    assert account.read == len(good) + account.left_out.total()
    assert good["timestamp"].between(DAY - DAY.resolution, NOW).all()
    seen = [
        {field.name: turn.choice(texts) for field in STAGED_INVENTORY} | {"seen_at": turn.choice(instants)}
        for _ in range(2_000)
    ]
    usable = waiting._usable("inventory", Path("fuzz"), as_staged(STAGED_INVENTORY, seen), "seen_at")
    account = waiting.quarantine.tables["observations"]
    assert (account.read, account.used) == (2_000, usable.num_rows)
    assert account.unaccounted == 0
