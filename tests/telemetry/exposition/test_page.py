"""Pages of exporters, NVIDIA's and AMD's, old and new, as rows."""

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from telemetry.channels import resolve_channels
from telemetry.collect.series.identity import SeriesCatalogue
from telemetry.collect.series.rows import SENTINEL
from telemetry.exposition.page import NO_DEVICE, PageReader
from telemetry.exposition.scanned import CUT, Limits
from telemetry.landing.tables import LANDED_INVENTORY
from tests.telemetry.exposition.page_texts import gpu_uuid, labels_of, page

REAL_PAGE = Path(__file__).parents[4] / "shared" / "data" / "dcgm-exporter" / "l4-driver-580.prom"
AT_MS = 1_700_000_000_123
AT = datetime(2023, 11, 14, 22, 13, 20, 123000, tzinfo=UTC)


@pytest.fixture(scope="module")
def catalogue() -> SeriesCatalogue:
    return SeriesCatalogue(resolve_channels({}))


def rows_of(table: pa.Table) -> list[dict[str, object]]:
    return [{name: value for name, value in row.items() if value is not None} for row in table.to_pylist()]


def test_a_page_becomes_one_row_a_gpu(catalogue: SeriesCatalogue) -> None:
    rows = PageReader(catalogue).read(page([[31, 250.5, 0], [32, 260, 3]]), AT_MS)
    key = {"timestamp": AT, "node": "node-1"}
    assert rows_of(rows.samples) == [
        {**key, "gpu": gpu_uuid(0), "gpu_temp_c": 31.0, "power_w": 250.5, "ecc_dbe_volatile_total": 0.0},
        {**key, "gpu": gpu_uuid(1), "gpu_temp_c": 32.0, "power_w": 260.0, "ecc_dbe_volatile_total": 3.0},
    ]
    assert rows.inventory.schema.equals(LANDED_INVENTORY)
    assert rows_of(rows.inventory)[0] == {
        "gpu": gpu_uuid(0),
        "node": "node-1",
        "slot": "0",
        "pci_bus_id": "00000000:10:00",
        "model": "NVIDIA H100 80GB HBM3",
        "driver": "550.54.15",
        "seen_at": AT,
    }
    assert rows.channels_per_gpu == {gpu_uuid(0): 3, gpu_uuid(1): 3}
    assert (rows.complete, rows.problems, rows.unexplained, rows.xid_counts) == (True, {}, (), [])


@pytest.mark.skipif(not REAL_PAGE.exists(), reason="the real exporter page is not beside this checkout")
def test_the_real_page_is_read_with_nothing_unexplained(catalogue: SeriesCatalogue) -> None:
    body = REAL_PAGE.read_bytes()
    rows = PageReader(catalogue).read(body, AT_MS)
    (row,) = rows_of(rows.samples)
    assert (row["gpu"], row["node"]) == ("GPU-c2f76b33-7953-256e-8f33-1343419b1a1c", "i-030791dc5a37cd257")
    assert (row["gpu_temp_c"], row["energy_mj"], row["fb_free_mib"]) == (31.0, 4742776.0, 22563.0)
    samples = [line for line in body.decode().splitlines() if not line.startswith("#")]
    # All but the licence of virtual GPUs, which telemetry.collect.series.unused explains.
    assert rows.channels_per_gpu == {str(row["gpu"]): len(samples) - 1}
    assert (rows.complete, rows.problems, rows.unexplained) == (True, {}, ())


def test_the_same_values_again_are_recognised(catalogue: SeriesCatalogue) -> None:
    reader = PageReader(catalogue)
    body = page([[31, 250.5, 0], [32, "NaN", 3]])
    go = b"go_goroutines %d\n"
    same = [
        reader.read(each, AT_MS + turn).same_as_before
        for turn, each in enumerate(
            [body, body, body + go % 1, body + go % 2, page([[31, 250.5, 0], [32, "NaN", 4]]), body[: len(body) // 2]]
        )
    ]
    assert same == [False, True, True, True, False, False]
    assert PageReader(catalogue).read(b"", AT_MS).same_as_before is False


def test_a_page_whose_blocks_change_places_is_the_same(catalogue: SeriesCatalogue) -> None:
    first, second = page([[31, 250, 0]]), page([[1200, 4]], ["DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_PSTATE"])
    reader = PageReader(catalogue)
    one, two = reader.read(first + second, AT_MS), reader.read(second + first, AT_MS)
    assert two.same_as_before
    assert rows_of(one.samples) == rows_of(two.samples)


def test_old_and_new_names_and_labels_mean_the_same(catalogue: SeriesCatalogue) -> None:
    old = f"DCGM_FI_DEV_GPU_TEMP{{{labels_of(0)}}} 40\n"
    new = old.replace("GPU_TEMP", "GPU_TEMP_CELSIUS").replace("Hostname", "hostname").replace("UUID", "uuid")
    assert new != old
    rows = [rows_of(PageReader(catalogue).read(text.encode(), AT_MS).samples) for text in (old, new)]
    assert rows[0] == rows[1] != []


def test_mig_instances_have_rows_of_their_own(catalogue: SeriesCatalogue) -> None:
    mig = [labels_of(0, extra=f',GPU_I_PROFILE="1g.10gb",GPU_I_ID="{number}"') for number in (7, 9)]
    body = (
        f"DCGM_FI_DEV_GPU_TEMP{{{labels_of(0)}}} 40\n"
        f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{mig[0]}}} 0.5\n"
        f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{mig[1]}}} 0.25\n"
    )
    rows = PageReader(catalogue).read(body.encode(), AT_MS)
    key = {"timestamp": AT, "node": "node-1", "gpu": gpu_uuid(0)}
    assert rows_of(rows.samples) == [
        {**key, "gpu_temp_c": 40.0},
        {**key, "mig_instance": "7", "gr_engine_active_ratio": 0.5},
        {**key, "mig_instance": "9", "gr_engine_active_ratio": 0.25},
    ]
    assert rows.channels_per_gpu == {gpu_uuid(0): 2}
    assert rows.inventory.num_rows == 1


def test_nvlink_rows_are_summed_over_the_links(catalogue: SeriesCatalogue) -> None:
    body = "".join(
        f'DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL{{nvlink="{link}",nvswitch="0",gpu_uuid="{gpu_uuid(0)}",'
        f'model_name="H100",hostname="node-1"}} {count}\n'
        for link, count in enumerate((1, 20, 300))
    )
    (row,) = rows_of(PageReader(catalogue).read(body.encode(), AT_MS).samples)
    assert 321.0 in row.values()


def test_sentinels_are_no_values(catalogue: SeriesCatalogue) -> None:
    rows = PageReader(catalogue).read(
        page([[31, 9223372036854775794, 2147483632], [32, 140737488355328, "NaN"], [9223372036854775793] * 3]), AT_MS
    )
    assert rows.channels_per_gpu == {gpu_uuid(0): 1, gpu_uuid(1): 1}
    assert rows.samples.num_rows == 2
    assert rows.problems == {SENTINEL: 6}


def test_flags_are_exact_and_time_stamps_on_lines_are_kept(catalogue: SeriesCatalogue) -> None:
    body = (
        f"DCGM_FI_DEV_CLOCKS_EVENT_REASONS{{{labels_of(0)}}} {2**53 + 1}\n"
        f"DCGM_FI_DEV_GPU_TEMP{{{labels_of(0)}}} 40 1600000000000\n"
        f"DCGM_FI_DEV_GPU_TEMP{{{labels_of(1)}}} 41 1600000000000\n"
    ).encode()
    reader = PageReader(catalogue)
    then = datetime(2020, 9, 13, 12, 26, 40, tzinfo=UTC)
    for turn in range(2):
        rows = reader.read(body, AT_MS)
        assert rows_of(rows.samples) == [
            {"timestamp": then, "node": "node-1", "gpu": gpu_uuid(0), "gpu_temp_c": 40.0},
            {"timestamp": AT, "node": "node-1", "gpu": gpu_uuid(0), "clocks_event_reasons": 2**53 + 1},
            {"timestamp": then, "node": "node-1", "gpu": gpu_uuid(1), "gpu_temp_c": 41.0},
        ]
        assert rows.same_as_before is bool(turn)
        assert rows.channels_per_gpu == {gpu_uuid(0): 2, gpu_uuid(1): 1}
    later = reader.read(body.replace(b"1600000000000", b"1600000060000"), AT_MS)
    assert later.same_as_before is False


def test_a_page_with_many_times_is_read_as_a_dump_is(catalogue: SeriesCatalogue) -> None:
    body = "".join(f"DCGM_FI_DEV_GPU_TEMP{{{labels_of(0)}}} {turn} {1600000000000 + turn}\n" for turn in range(40))
    rows = PageReader(catalogue).read(body.encode(), AT_MS)
    assert rows.samples["gpu_temp_c"].to_pylist() == [float(turn) for turn in range(40)]
    assert rows.channels_per_gpu == {gpu_uuid(0): 1}


def test_pods_that_share_a_gpu_do_not_make_two_of_it(catalogue: SeriesCatalogue) -> None:
    pods = [labels_of(0, extra=f',pod="{pod}",namespace="ml",container="main"') for pod in ("a", "b")]
    body = "".join(f"DCGM_FI_DEV_GPU_TEMP{{{pod}}} 40\n" for pod in pods)
    rows = PageReader(catalogue).read(body.encode(), AT_MS)
    assert (rows.samples["gpu_temp_c"].to_pylist(), rows.problems) == ([40.0], {})


def test_the_exporters_counts_of_xids_are_told(catalogue: SeriesCatalogue) -> None:
    body = "".join(
        f'DCGM_EXP_XID_ERRORS_COUNT{{{labels_of(gpu)},window_size_in_ms="300000",xid="{xid}"}} {count}\n'
        for gpu, xid, count in ((0, 79, 2), (1, 0, 1))
    )
    rows = PageReader(catalogue).read(body.encode(), AT_MS)
    assert rows.xid_counts == [(gpu_uuid(0), "node-1", 79, 2.0), (gpu_uuid(1), "node-1", 0, 1.0)]
    assert rows.samples.num_rows == 0


def amd_page(prefix: str) -> bytes:
    """As the documentation of AMD's exporter lists metrics and labels, for a GPU that is not partitioned."""
    labels = (
        'card_model="0xc34",card_series="AMD Instinct MI300X",card_vendor="AMD",driver_version="6.8.5",gpu_id="0",'
        'gpu_partition_id="0",gpu_uuid="0beb0a09-4200-4242-0e05-67bf583b4c72",hostname="amd-1",'
        'serial_number="692251001124",pod="",namespace="",container=""'
    )
    clocks = "".join(
        f'{prefix}gpu_clock{{{labels},clock_index="{index}",clock_type="GPU_CLOCK_TYPE_{kind}"}} {value}\n'
        for index, kind, value in ((0, "SYSTEM", 132), (1, "SYSTEM", 140), (8, "MEMORY", 900), (9, "VIDEO", 29))
    )
    return (
        f"{prefix}gpu_junction_temperature{{{labels}}} 41\n{prefix}gpu_package_power{{{labels}}} 137\n"
        f"{prefix}gpu_power_usage{{{labels}}} 130\n{prefix}gpu_used_vram{{{labels}}} 285\n{clocks}"
    ).encode()


@pytest.mark.parametrize("prefix", ["", "amd_"])
def test_amds_exporter_is_read(catalogue: SeriesCatalogue, prefix: str) -> None:
    reader = PageReader(catalogue)
    for _ in range(2):
        rows = reader.read(amd_page(prefix), AT_MS)
        (row,) = rows_of(rows.samples)
        assert row.pop("node") == "amd-1"
        del row["timestamp"], row["gpu"]
        assert row == {
            "gpu_temp_c": 41.0,
            "power_w": 137.0,
            "fb_used_mib": 285.0,
            "sm_clock_mhz": 132.0,
            "mem_clock_mhz": 900.0,
        }
        assert (rows.problems, rows.unexplained) == ({}, ())
    (seen,) = rows_of(rows.inventory)
    assert (seen["serial"], seen["driver"], seen["slot"]) == ("692251001124", "6.8.5", "0")


def test_what_is_not_ours_is_named_and_what_cannot_be_placed_is_counted(catalogue: SeriesCatalogue) -> None:
    body = page([[31, 250.5, 0]]) + b"go_threads 7\nfan_of_the_rack 3\nDCGM_FI_DEV_GPU_TEMP 31\n"
    rows = PageReader(catalogue).read(body, AT_MS)
    assert rows.unexplained == ("fan_of_the_rack",)
    assert rows.problems == {NO_DEVICE: 1}


def test_a_page_that_is_cut_keeps_what_came_and_says_so(catalogue: SeriesCatalogue) -> None:
    body = page([[31, 250.5, 0]])
    rows = PageReader(catalogue).read(body[:-3], AT_MS, whole=False)
    assert rows.channels_per_gpu == {gpu_uuid(0): 2}
    assert (rows.complete, rows.problems) == (False, {CUT: 1})
    assert not PageReader(catalogue).read(body, AT_MS, openmetrics=True).complete


def test_a_label_bomb_does_not_grow_the_reader(catalogue: SeriesCatalogue) -> None:
    reader = PageReader(catalogue, limits=Limits(series=50))
    for turn in range(40):
        bomb = b"".join(b'pods{id="%d"} 1\n' % (turn * 30 + number) for number in range(30))
        rows = reader.read(page([[31, 250.5, turn]]) + bomb, AT_MS)
        assert rows.samples["ecc_dbe_volatile_total"].to_pylist() == [float(turn)]
        assert len(reader._identities) <= 150


def test_nothing_of_it_is_an_empty_page(catalogue: SeriesCatalogue) -> None:
    rows = PageReader(catalogue).read(b"", AT_MS)
    assert (rows.samples.num_rows, rows.inventory.num_rows, rows.complete) == (0, 0, True)
