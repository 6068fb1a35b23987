"""What a value in text means: units, separators, digits of other bases, words for no value, sentinels."""

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.values.numbers import conversion, is_sentinel, read_numbers


def number(text: str, unit: str = "W", **options: object) -> float:
    """Return the number of one text; NaN if it means no value; raises if it cannot be read."""
    numbers = read_numbers(pa.chunked_array([pa.array([text])]), unit, **options)
    if numbers.unreadable[0]:
        raise ValueError(text)
    return float(numbers.values[0])


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        (" 350.12 W", "W", 350.12),
        ("350120 mW", "W", 350.12),
        ("0.35 kW", "W", 350.0),
        ("1024 MiB", "MiB", 1024.0),
        ("16 GiB", "MiB", 16384.0),
        ("17179869184 B", "MiB", 16384.0),
        ("98 %", "%", 98.0),
        ("98%", "%", 98.0),
        ("45 C", "C", 45.0),
        ("113 °F", "C", 45.0),
        ("45 ℃", "C", 45.0),
        ("45 degC", "C", 45.0),
        ("8 Gb/s", "B/s", 1e9),
        ("8 Mbps", "B/s", 1e6),
        ("8 Gbit/s", "B/s", 1e9),
        ("8 GB/s", "B/s", 8e9),
        ("318.15 K", "C", 45.0),
        ("1410 MHz", "MHz", 1410.0),
        ("1.41 GHz", "MHz", 1410.0),
        ("12.5 J", "mJ", 12500.0),
        ("3 MB/s", "B/s", 3e6),
        ("3 MBps", "B/s", 3e6),
        ("P0", "P-state", 0.0),
        ("P12", "P-state", 12.0),
        ("x16", "lanes", 16.0),
        ("16x", "lanes", 16.0),
        ("Gen4", "generation", 4.0),
        ("16.0 GT/s PCIe", "generation", 4.0),
        ("0x0000000000000004", "bitmask", 4.0),
        ("SW Power Cap", "bitmask", 4.0),
        ("HW Slowdown, HW Thermal Slowdown", "bitmask", 72.0),
        ("sw_thermal_slowdown|sw_power_cap", "bitmask", 36.0),
        ("nvmlClocksEventReasonHwPowerBrakeSlowdown", "bitmask", 128.0),
        ("None", "bitmask", 0.0),
        ("Not Active", "bitmask", 0.0),
        ("Active", "bool", 1.0),
        ("Drain and Reset", "action", 4.0),
        ("[Reboot]", "action", 2.0),
        ("Not Active", "bool", 0.0),
        ("Enabled", "bool", 1.0),
        ("No", "bool", 0.0),
        ("1,234", "W", 1234.0),
        ("1,234,567.5", "mJ", 1234567.5),
        ("1 234", "mJ", 1234.0),
        ("1'234'567", "mJ", 1234567.0),
        ("350,12", "W", 350.12),
        ("1.234,5", "W", 1234.5),
        ("+5", "W", 5.0),
        ("\u22125", "C", -5.0),
        ("1.5e3", "W", 1500.0),
        ("350,12 W", "W", 350.12),
        ("1 350,5 W", "W", 1350.5),
        ("1\u2019350 W", "W", 1350.0),
        ("45 deg C", "C", 45.0),
        ("3.4 MJ", "mJ", 3.4e9),
        ("0.5 MWh", "mJ", 1.8e12),
    ],
)
def test_a_number_is_read_in_the_unit_of_its_channel(text: str, unit: str, value: float) -> None:
    assert number(text, unit) == pytest.approx(value)


@pytest.mark.parametrize(
    "text",
    [
        *("[N/A]", " [N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "[GPU requires reset]", "ERR!", "-", "--"),
        *(
            "[Insufficient Permissions]",
            "#N/A",
            "unsupported",
            "nan",
            "null",
            "<nil>",
            "<<<NULL>>>",
            "[Some word of a later driver]",
            "(null)",
        ),
        *("not_supported", "NotSupported", "[Invalid Argument]", "Uninitialized", "#DIV/0!", "\u2014", "n.a."),
        *("2147483632", "2147483647", "2147483648.0", "4294967295", "4294967296.0", "140737488355328", "1.8e19"),
        *("9223372036854775792", "9223372036854775807", "18446744073709551615"),
    ],
)
def test_words_and_sentinels_are_no_values_and_no_errors(text: str) -> None:
    assert math.isnan(number(text))


@pytest.mark.parametrize("text", ["5 C", "12 foo", "A100", "1.2.3", "[", "0xZZ", "12 34.5.6 W", "W", "five"])
def test_what_is_no_number_is_unreadable(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        number(text)


@pytest.mark.parametrize("text", ["Active", "SW Power Cap, Something New", "HW Slowdown 4", "yes"])
def test_a_reason_that_is_not_known_is_unreadable(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        number(text, "bitmask")


@pytest.mark.parametrize(
    ("texts", "decimal", "values"),
    [
        (["1,234", "2,500"], ",", [1.234, 2.5]),
        (["1,234", "2,500"], ".", [1234.0, 2500.0]),
        (["1,234", "2,50"], ".", [1.234, 2.5]),
        (["1,234,567", "2,500"], ",", [1234567.0, 2500.0]),
    ],
)
def test_a_comma_is_what_the_column_shows_and_else_what_the_file_has(texts, decimal, values):
    assert read_numbers(pa.chunked_array([pa.array(texts)]), "W", decimal=decimal).values.tolist() == values


def test_bytes_of_memory_reach_what_is_a_sentinel_of_32_bits() -> None:
    assert number("4294967296", "MiB", header_unit="B") == 4096.0
    assert math.isnan(number("9223372036854775807", "MiB", header_unit="B"))


def test_only_the_lost_say_that_the_gpu_is_lost() -> None:
    column = pa.chunked_array([pa.array(["[GPU is lost]", "[N/A]", "5", None, "GPU is lost"])])
    assert read_numbers(column, "W").lost.tolist() == [True, False, False, False, True]


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e9, 1e9), st.sampled_from(["W", "mW", "kW", " W", "  mW "]))
def test_text_and_number_agree(value: float, unit: str) -> None:
    factor = {"W": 1.0, "mW": 1e-3, "kW": 1e3}[unit.strip()]
    assert number(f"{value!r}{unit}") == pytest.approx(value * factor)


@pytest.mark.parametrize(("one", "other"), [("C", "K"), ("C", "F"), ("MiB", "B"), ("mJ", "kWh"), ("%", "ratio")])
def test_conversions_are_each_other_s_inverse(one: str, other: str) -> None:
    there, back = conversion(one, other), conversion(other, one)
    assert (42 * there.scale + there.offset) * back.scale + back.offset == pytest.approx(42)


def test_a_sentinel_survives_float32() -> None:
    for blank in (2147483632, 2147483647, 4294967295, 2**63 - 16, 2**64 - 1, 140737488355328):
        assert is_sentinel(np.array([blank], np.float64).astype(np.float32).astype(np.float64)).all()
    assert not is_sentinel([0.0, 5e10, 2147483631.0, 4294967297.0, np.nan, np.inf]).any()
