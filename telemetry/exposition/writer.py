"""Metrics in Prometheus' text format 0.0.4, as every process of ours shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MEDIA: Final = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of the format."""

_ESCAPED: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def family(name: str, kind: str, text: str, values: Mapping[str, float]) -> str:
    """Return one metric's lines.

    ``name``: without the prefix ``predrain_``.
    ``kind``: ``counter`` or ``gauge``.
    ``values``: by labels as :func:`labels` writes them; "": without labels.
    """
    full = f"predrain_{name}"
    lines = [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
    lines += [f"{full}{given} {float(value)!r}" for given, value in values.items()]
    return "\n".join(lines) + "\n"


def labels(**given: str) -> str:
    """Write labels with their braces, values escaped."""
    return "{" + ",".join(f'{name}="{value.translate(_ESCAPED)}"' for name, value in given.items()) + "}"
