import pytest

from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.diagnosis import absent_on, absent_on_all


@pytest.mark.parametrize(
    ("model", "channel", "absent"),
    [
        ("NVIDIA L4", "nvlink_replay_total", True),
        ("NVIDIA H100 80GB HBM3", "nvlink_replay_total", False),
        ("NVIDIA A100-SXM4-80GB", "retired_pages_sbe_total", True),
        ("Tesla V100-SXM2-32GB", "row_remap_pending", True),
        ("Tesla V100-SXM2-32GB", "retired_pages_sbe_total", False),
        ("NVIDIA H100 80GB HBM3", "fabric_health", False),
        ("NVIDIA A100-SXM4-80GB", "fabric_health", True),
        ("NVIDIA H100 80GB HBM3", "fan_speed_pct", True),
        ("NVIDIA GeForce RTX 4090", "ecc_sbe_volatile_total", True),
        ("NVIDIA GeForce RTX 4090", "dram_active_ratio", True),
        ("NVIDIA L40S", "mem_temp_c", True),
        ("AMD Instinct MI300X", "retired_pages_sbe_total", False),
        ("Some Accelerator 9000", "ecc_sbe_volatile_total", False),
    ],
)
def test_what_boards_cannot_report(model: str, channel: str, absent: bool) -> None:
    assert channel in CATALOGUE
    assert (absent_on(model, channel) is not None) is absent


def test_a_fleet_lacks_what_none_of_its_boards_has() -> None:
    assert absent_on_all(["NVIDIA L4"], "nvlink_replay_total") == "NVIDIA L4 has no NVLink"
    assert absent_on_all(["NVIDIA L4", "Tesla T4"], "nvlink_replay_total") == "every board here has no NVLink"
    assert absent_on_all(["NVIDIA GeForce RTX 4090", "Tesla T4"], "row_remap_pending") == (
        "NVIDIA GeForce RTX 4090 has no ECC; Tesla T4 retires pages instead"
    )
    assert absent_on_all(["NVIDIA L4", "NVIDIA H100 80GB HBM3"], "nvlink_replay_total") is None
    assert absent_on_all([], "nvlink_replay_total") is None
