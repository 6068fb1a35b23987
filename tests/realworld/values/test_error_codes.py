"""Error codes that a collector writes in place of a value."""

from pathlib import Path

import pytest

from tests.telemetry.helpers import all_samples, run_import, samples_frame


@pytest.mark.parametrize("channel", ["gpu_temp_c", "mem_temp_c", "power_w", "fan_speed_pct"])
@pytest.mark.parametrize("code", [-1, -2147483648])
def test_an_error_code_is_no_value(tmp_path: Path, channel: str, code: int) -> None:
    frame = samples_frame(gpus=1).assign(**{channel: [50, 51, code, 53, 54, code]})
    result = run_import(tmp_path, samples=frame)
    assert all_samples(result)[channel].astype(object).where(lambda column: column.notna(), None).tolist() == [
        *(50, 51, None, 53, 54, None)
    ]
    assert not result.quarantined
    assert result.counts["values_not_supported"] == 2
