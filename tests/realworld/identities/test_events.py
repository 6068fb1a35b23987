"""Events that write the UUID of their GPU otherwise than the inventory."""

from __future__ import annotations

import pandas as pd
import pytest

from telemetry.kernel_log.importing import COLUMNS
from telemetry.xids.locating import locate

UUID = "GPU-0a1b2c3d-0000-4000-8000-00000000000b"


@pytest.mark.parametrize(
    "written",
    [UUID, UUID.upper(), UUID.removeprefix("GPU-"), f"nvidia.com/gpu={UUID.lower()}", UUID[4:].replace("-", "")],
)
def test_the_gpu_of_an_event_is_found_in_each_spelling(written: str):
    day = pd.Timestamp("2026-03-01", tz="UTC")
    stays = pd.DataFrame(
        [{"gpu": UUID, "node": "n0", "pci_bus_id": "0000:1b:00.0", "installed_at": day, "removed_at": pd.NaT}]
    )
    events = pd.DataFrame([[day, "n7", written, None, "xid", "79", None, "log"]], columns=list(COLUMNS))
    located, nowhere = locate(events, stays.assign(removed_at=pd.to_datetime(stays["removed_at"], utc=True)))
    assert located[["gpu", "node"]].to_numpy().tolist() == [[UUID, "n0"]]
    assert nowhere == 0


def test_a_mig_instance_is_not_the_gpu_of_the_same_digits():
    day = pd.Timestamp("2026-03-01", tz="UTC")
    stays = pd.DataFrame(
        [{"gpu": UUID, "node": "n0", "pci_bus_id": "0000:1b:00.0", "installed_at": day, "removed_at": day}]
    )
    mig = UUID.replace("GPU", "MIG")
    events = pd.DataFrame([[day, "n0", mig, None, "xid", "79", None, "log"]], columns=list(COLUMNS))
    assert locate(events, stays)[1] == 1
