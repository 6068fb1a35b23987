import pytest

from foundation.errors import InputError
from telemetry.config import ChannelDeclaration
from telemetry.dataset.channels import CATALOGUE, by_source_name, resolve_channels, with_rollups


def test_field_ids_and_source_names_are_unique_and_ranges_sane():
    for channel in CATALOGUE.values():
        assert channel.help
        assert channel.low is None or channel.high is None or channel.low < channel.high
    ids = [channel.dcgm_id for channel in CATALOGUE.values() if channel.dcgm_id is not None]
    names = [name for channel in CATALOGUE.values() for name in channel.dcgm_names]
    assert len(ids) == len(set(ids))
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("source", "ours"),
    [
        ("DCGM_FI_DEV_GPU_TEMP", "gpu_temp_c"),
        ("DCGM_FI_DEV_GPU_TEMP_CELSIUS", "gpu_temp_c"),
        ("150", "gpu_temp_c"),
        ("gpu_ecc_uncorrect_umc", "ecc_dbe_dram_volatile_total"),
        ("power_w", "power_w"),
    ],
)
def test_old_new_and_amd_names_lead_to_one_channel(source: str, ours: str):
    assert by_source_name()[source] == ours


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("power_w", 16.4, 16365.0),
        ("gpu_temp_c", 31.0, 304.15),
        ("fb_used_mib", 81559.0, 85520809984.0),
    ],
)
def test_the_usual_wrong_unit_falls_out_of_the_range(name: str, right: float, wrong: float):
    channel = CATALOGUE[name]
    assert channel.low <= right <= channel.high
    assert not channel.low <= wrong <= channel.high


def test_rollups():
    names = list(with_rollups({"power_w": CATALOGUE["power_w"], "energy_mj": CATALOGUE["energy_mj"]}))
    assert names == ["power_w", "power_w_min", "power_w_max", "energy_mj", "energy_mj_rise"]
    assert [made.kind for made in CATALOGUE["energy_mj"].rollups()] == ["gauge"]


def test_declared_channels_join_and_override_the_catalogue():
    declared = {
        "flaps_total": ChannelDeclaration(kind="counter", unit="flaps", range=(0, 100)),
        "power_w": ChannelDeclaration(kind="gauge", range=(0, 20000)),
    }
    channels = resolve_channels(declared)
    assert (channels["flaps_total"].kind, channels["flaps_total"].high) == ("counter", 100)
    assert (channels["power_w"].high, channels["power_w"].dcgm_id, channels["power_w"].unit) == (20000, 155, "W")


@pytest.mark.parametrize(
    ("name", "kind", "parts"),
    [
        ("Bad Name", "gauge", ["'Bad Name' cannot be a channel name", "channels.Bad Name", "lower-case"]),
        ("timestamp", "gauge", ["'timestamp' is a key column"]),
        ("power_w_max", "gauge", ["'power_w_max'", "roll-up of 'power_w'", "Rename it"]),
    ],
)
def test_a_declaration_that_cannot_be(name: str, kind: str, parts: list[str]):
    with pytest.raises(InputError) as caught:
        resolve_channels({name: ChannelDeclaration(kind=kind)})
    for part in parts:
        assert part in str(caught.value)
