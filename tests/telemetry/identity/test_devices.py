import pytest

from telemetry.identity.devices import (
    GpuNames,
    device_key,
    is_placeholder,
    normalise_pci_bus_id,
    parent_of_mig,
    place_identity,
)

UUID = "GPU-0A1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "N/A", "[N/A]", "[Not Supported]", "Not Specified", "unknown", "Unknown Error", "none", "null", "-"),
        *("GPU-00000000-0000-0000-0000-000000000000", "00000000-0000-0000-0000-000000000000", "0", "0000000000000"),
        *("GPU-ffffffff-ffff-ffff-ffff-ffffffffffff", "FFFFFFFF", "0xFFFFFFFF", "System Serial Number"),
        *("To be filled by O.E.M.", "To Be Filled By O.E.M.", "Default string", "XXXXXXXX", "0123456789", "0x", "NaN"),
        *("GPU-unknown", "<unknown>", "DCGM_FI_DEV_UUID", "SerNum", "TBD", "(null)", "12345678", "0123456789ABCDEF"),
        *("03000200-0400-0500-0006-000700080009", "Fill By OEM", "No Asset Tag", "System manufacturer", "-1"),
        *("GPU is lost", "Insufficient Permissions", "4294967295", "Missing"),
    ],
)
def test_a_placeholder_identifies_nothing(text: str):
    assert is_placeholder(text)


@pytest.mark.parametrize(
    "text", [UUID, UUID[4:], "1650922004321", "gpu-0", "a", "g0", "3", "MIG-" + UUID[4:], "PF0001", "1234568", "tag-1"]
)
def test_uuids_serial_numbers_and_an_operators_names_are_identities(text: str):
    assert not is_placeholder(text)


@pytest.mark.parametrize(
    "text", [UUID, UUID.lower(), UUID.upper(), UUID[4:], "nvidia.com/gpu=" + UUID, UUID[4:].replace("-", "")]
)
def test_a_uuid_is_one_in_each_spelling(text: str):
    assert device_key(text) == "0a1b2c3d4e5f60718293a4b5c6d7e8f9"
    assert GpuNames([UUID]).find(text) == UUID


def test_a_mig_instance_is_not_the_gpu_of_the_same_digits():
    assert device_key("MIG-" + UUID[4:]) != device_key(UUID)
    assert parent_of_mig(f"MIG-{UUID}/1/0") == "GPU-" + UUID[4:].lower()
    assert parent_of_mig("MIG-" + UUID[4:]) is None


def test_what_two_gpus_share_identifies_neither():
    names = GpuNames(
        ["GPU-a", "GPU-b", "gpu-c", "GPU-C"], {"SN1": "GPU-a", "SN2": "GPU-a", "sn2": "GPU-b", "0": "GPU-a"}
    )
    assert [names.find(name) for name in ("sn1", "SN2", "0", "GPU-C", "Gpu-c", "gpu-A", "x")] == [
        *("GPU-a", None, None, "GPU-C", None, "GPU-a", None)
    ]


def test_a_place_stands_for_a_gpu_without_identity():
    assert place_identity("n0", pci_bus_id="00000000:3b:00", slot="0") == "n0@00000000:3b:00"
    assert place_identity("n0", slot="0") == "n0@slot-0"
    assert place_identity("n0") is None


@pytest.mark.parametrize(
    "text",
    [
        *("00000000:3B:00.0", "0000:3b:00.0", "PCI:0000:3b:00", "3b:00", "3B:0.0", " 0:3b:00 ", "pci-0000:3b:00.0"),
        *("0x0000:0x3B:0x00.0x0", "0x3b:0x0", "PCI 0000:3B:00.0", "/sys/bus/pci/devices/0000:3b:00.0", "pcie:3b:00.0"),
        *("0000_3b_00.0", "pci-0000-3b-00-0"),
    ],
)
def test_an_address_is_one_in_each_form(text: str):
    assert normalise_pci_bus_id(text) == "00000000:3b:00"


@pytest.mark.parametrize(
    "text", ["", "GPU-0", "3b", "0000:3b", "0000:3b:00.9", "zz:00", "1:2:3:4", "1:2:3:4:5", "2026-11-28", "a:b:c:d"]
)
def test_other_texts_are_no_address(text: str):
    assert normalise_pci_bus_id(text) is None


def test_domains_of_32_bits_are_kept():
    assert normalise_pci_bus_id("00000001:00:00.0") == normalise_pci_bus_id("PCI:0001:00:00") == "00000001:00:00"
    assert normalise_pci_bus_id("47505500:00:00.0") == "47505500:00:00"
