"""What a board can report at all, told by its model's name, so that nobody is sent to switch on what is not there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final

_REMAP: Final = (
    "row_remap_uncorrectable_total",
    "row_remap_correctable_total",
    "row_remap_pending",
    "row_remap_failure",
)
_INFERENCE: Final = r"T4G?|P40|P4|A2|A10[GM]?|A16|L4|L20|L40S?"
_HOPPER_ON: Final = r"H20|H100|H200|H800|B[123]00|G[HB]\d{3}"

# Channels, boards, why they do not have them. Boards before Ampere retire pages, later ones remap rows. The boards'
# names are those of NVML.
_RULES: Final[tuple[tuple[tuple[str, ...], str, str], ...]] = (
    (
        ("retired_pages_*",),
        rf"\b(?:A(?:2|10|16|30|40|100|800)[GMX]?|L4|L20|L40S?|{_HOPPER_ON}|RTX (?:A\d{{4}}|\d{{4}} Ada|PRO))\b",
        "remaps rows instead",
    ),
    (_REMAP, r"\b(?:Tesla [KMPVT]\d+|P100|P40|P4|V100S?|T4G?|Quadro)\b", "retires pages instead"),
    (
        ("ecc_sbe_sram_volatile_total", "ecc_dbe_sram_volatile_total", "sram_threshold_exceeded"),
        r"\b(?:Tesla [KMPVT]\d+|P100|P40|P4|V100S?|T4G?|Quadro)\b",
        "is older than Ampere",
    ),
    (("nvlink_*",), rf"\b(?:{_INFERENCE}|RTX PRO|RTX \d{{4}} Ada|GeForce)\b", "has no NVLink"),
    (("fabric_health",), rf"^(?!.*\b(?:{_HOPPER_ON})\b)", "is on no NVSwitch fabric that reports its health"),
    (("fan_speed_pct",), rf"SXM|\b(?:{_INFERENCE}|A30|A40|A100|A800|{_HOPPER_ON})\b", "is cooled passively"),
    (("mem_temp_c", "memory_margin_c"), rf"\b(?:{_INFERENCE}|A40|RTX|GeForce)\b", "has no sensor in its memory"),
    (("*_ratio", "pcie_tx_bytes_s", "pcie_rx_bytes_s"), r"\b(?:GeForce|TITAN)\b", "has no profiling counters for DCGM"),
    (("ecc_*", "sram_threshold_exceeded", *_REMAP, "retired_pages_*"), r"\b(?:GeForce|GTX)\b", "has no ECC"),
)
_AMD: Final = re.compile(r"Instinct|\bMI\d{2,3}[AX]?\b|Radeon|\bAMD\b", re.IGNORECASE)


def absent_on(model: str, channel: str) -> str | None:
    """Say why a board cannot report a channel.

    ``model``: the board's model as exporters and the inventory name it, such as ``NVIDIA H100 80GB HBM3``.
    Returns: the reason, a clause; None if it can, or it is not known (AMD's boards among them).
    """
    if _AMD.search(model):
        return None
    for patterns, boards, reason in _RULES:
        if any(fnmatchcase(channel, each) for each in patterns) and re.search(boards, model, re.IGNORECASE):
            return reason
    return None


def absent_on_all(models: Iterable[str], channel: str) -> str | None:
    """Say why no board of a fleet can report a channel; None if one can, or it is not known, or there are none.

    Examples
    --------
    >>> absent_on_all(["NVIDIA L4"], "nvlink_replay_total")
    'NVIDIA L4 has no NVLink'
    """
    reasons: dict[str, str] = {}
    for model in models:
        reason = absent_on(model, channel)
        if reason is None:
            return None
        reasons[model] = reason
    if len(reasons) > 1 and len(set(reasons.values())) == 1:
        return f"every board here {next(iter(reasons.values()))}"
    return "; ".join(f"{model} {reason}" for model, reason in reasons.items()) or None
