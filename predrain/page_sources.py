"""What ``predrain serve`` gives its pages: a dataset's reader, and the controller's ledger."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.pages.dataset_reader import DatasetReader


def page_reader(scores: Path, dataset: Path, ledger: Path | None) -> DatasetReader:
    """Return what reads a dataset for the pages, in processes of its own.

    Raises ``InputError`` if there is no dataset.
    """
    from predrain.page_reader import command
    from serving.pages.dataset_reader import DatasetReader
    from telemetry.errors import InputError

    if not (dataset / "dataset.json").is_file():
        raise InputError("there is no dataset here", str(dataset), "Give a folder that `predrain import` wrote.")
    watched = [scores / "latest.json", dataset / "dataset.json", *([] if ledger is None else [ledger])]
    return DatasetReader(command(scores, dataset, ledger), watched)


class LedgerFile:
    """The ledger of a controller, opened anew for each question: it may be made, or moved away, meanwhile.

    ``path``: need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def why(self, node: str, most: int) -> list[dict[str, Any]]:
        """Tell what was decided about a node, the newest first.

        Raises ``InputError`` if nothing is recorded about it, or there is no ledger.
        """
        from scheduler.ledger.reader import LedgerReader

        with contextlib.closing(LedgerReader(self._path)) as reader:
            return reader.why(node, most)

    def rounds(self, most: int) -> list[dict[str, Any]]:
        """List the newest decisions, the newest first.

        Raises ``InputError`` if there is no ledger.
        """
        from scheduler.ledger.reader import LedgerReader

        with contextlib.closing(LedgerReader(self._path)) as reader:
            return reader.rounds(most)
