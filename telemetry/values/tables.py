"""Reads the catalogues beside the modules: CSV with ``#`` comments."""

from __future__ import annotations

import csv
from pathlib import Path


def read_table(name: str) -> list[dict[str, str]]:
    """Return the rows of a catalogue of this folder."""
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))
