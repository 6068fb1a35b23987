"""Reading of catalogues next to modules: CSV with ``#`` comments."""

import csv
from pathlib import Path


def read_table(name: str, beside: str = __file__) -> list[dict[str, str]]:
    """Return the rows of a catalogue; ``beside``: path of a module in its folder."""
    lines = Path(beside).with_name(name).read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))
