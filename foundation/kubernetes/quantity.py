"""Quantities of Kubernetes resources, such as ``2``, ``500m``, ``8Gi`` or ``1e3``."""

import re
from decimal import Decimal
from typing import Final

_QUANTITY: Final = re.compile(r"(\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})(?:[eE]([+-]?\d{1,2})|([numkMGTPE]|[KMGTPE]i)?)")
_POWERS_OF_TEN: Final = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_FACTORS: Final = {
    "": Decimal(1),
    **{suffix: Decimal(10) ** power for suffix, power in _POWERS_OF_TEN.items()},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}


def parse_quantity(value: object) -> Decimal | None:
    """Return the amount in base units (cores, bytes, devices); None if the value is no quantity, or is negative."""
    match = _QUANTITY.fullmatch(str(value).strip())
    if match is None:
        return None
    return Decimal(match[1]) * Decimal(10) ** int(match[2] or 0) * _FACTORS[match[3] or ""]
