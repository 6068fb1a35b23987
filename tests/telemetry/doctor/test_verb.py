"""``predrain doctor`` as it is called."""

import json
from pathlib import Path

import pytest

from telemetry.dataset.channels import CATALOGUE
from tests.processes import invoke
from tests.telemetry.doctor.looks import page

ROOT = Path(__file__).resolve().parents[3]
HEALTHY = {name: 1.0 for name, channel in CATALOGUE.items() if channel.dcgm_names}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_page_with_everything_exits_with_0() -> None:
    Path("page.prom").write_text(page())
    assert "OK: the source has all channels" in invoke("doctor", "page.prom").stdout


def test_a_page_that_lacks_what_precedes_failures_exits_with_1_and_says_what_to_add() -> None:
    Path("page.prom").write_text(page({name: 1.0 for name in HEALTHY if name != "ecc_sbe_volatile_total"}))
    out = invoke("doctor", "page.prom", code=1).stdout
    assert "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL, counter, corrected memory errors since driver load" in out
    assert "The channels of the model are unknown: no bundle was given." in out


def test_a_bundle_beside_says_what_the_model_uses() -> None:
    Path("data/models/candidate").mkdir(parents=True)
    features = [{"group": "telemetry", "channel": "gpu_temp_c", "name": "f"}]
    Path("data/models/candidate/manifest.json").write_text(json.dumps({"features": features}))
    Path("page.prom").write_text(page({"gpu_temp_c": 40.0}))
    assert "gpu_temp_c*" in invoke("doctor", "page.prom").stdout
    shown = json.loads(invoke("doctor", "page.prom", "--json").stdout)
    assert shown["channels"]["gpu_temp_c"]["status"] == "ok"


def test_the_page_of_channels_is_up_to_date() -> None:
    text = (ROOT / "docs" / "reference" / "channels.md").read_text()
    assert invoke("doctor", "--channels").output == text, "run: python -m tests.reference_pages"


@pytest.mark.parametrize("arguments", [(), ("page.prom", "--channels"), ("page.prom", "--timeout", "soon")])
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...]) -> None:
    Path("page.prom").write_text(page())
    invoke("doctor", *arguments, code=2)


def test_a_dataset_that_only_staged_files_wait_for() -> None:
    Path("fleet.live").mkdir()
    err = invoke("doctor", "fleet", code=1).stderr
    assert "the dataset does not exist yet; there are only staged files (fleet). Compact it first" in err


def test_a_word_that_is_no_file_may_have_been_meant_for_one() -> None:
    err = invoke("doctor", "127.0.0.1/fleet", code=1).stderr
    assert "there is no file or folder '127.0.0.1/fleet', and it is not the address of an exporter: no response" in err
