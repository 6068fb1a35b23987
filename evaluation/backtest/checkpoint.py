"""Finished folds on disk, so that a backtest that was killed goes on where it stood."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from evaluation.backtest.frames import Fold
from evaluation.drift.verdict import CheckFindings
from features.engine import source_digest
from foundation.errors import InputError
from foundation.files import replacing

_KEY = b"predrain.fold"
_FINDINGS: TypeAdapter[CheckFindings | None] = TypeAdapter(CheckFindings | None)
_LIBRARIES = ("numpy", "pandas", "pyarrow", "scipy", "scikit-learn", "lightgbm", "xgboost-cpu")
ROOMS = ("evaluation", "features", "foundation", "models", "policy", "telemetry")
"""Rooms whose code shapes predictions."""


def digest_of(**inputs: Any) -> str:
    """Digest everything that a fold's predictions depend on.

    Returns: 16 hexadecimal digits; differs when an input, a library's version or the rooms' code differs.
    """
    libraries = {name: version(name) for name in _LIBRARIES}
    content = {"code": source_digest(*ROOMS), "libraries": libraries, "inputs": inputs}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


class FoldStore:
    """One Parquet file a finished fold, and one JSON file a check for drift, in a folder named by the inputs' digest.

    ``folder``: where checkpoints are kept; folds of other inputs are left alone.
    ``digest``: from :func:`digest_of`.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        self._folder = folder / digest

    def forget_others(self, but: Path) -> None:
        """Remove folds of other inputs, or of other code, and all else that lies beside them but one folder."""
        for entry in self._folder.parent.iterdir() if self._folder.parent.is_dir() else ():
            if entry not in (self._folder, but):
                shutil.rmtree(entry, ignore_errors=True)

    def load(self, fold: int) -> Fold | None:
        """Read a finished fold; None if it is not there or not readable."""
        try:
            table = pq.read_table(self._path(fold))
        except (FileNotFoundError, pa.ArrowInvalid):
            return None
        facts = (table.schema.metadata or {}).get(_KEY)
        return None if facts is None else Fold(table, json.loads(facts))

    def save(self, fold: int, done: Fold) -> None:
        """Write a finished fold: the whole file appears, or nothing.

        Raises ``InputError`` if it cannot be written, as on a full disk; earlier folds stay.
        """
        stamped = done.table.replace_schema_metadata({_KEY: json.dumps(done.facts, sort_keys=True).encode()})
        with self._appearing(self._path(fold), f"the finished fold {fold}") as temporary:
            pq.write_table(stamped, temporary, compression="zstd")

    def load_check(self, fold: int) -> tuple[CheckFindings | None] | None:
        """Read what the check before a fold found (None: it had nothing to compare with); None if it is not there."""
        try:
            return (_FINDINGS.validate_python(json.loads(self._check_path(fold).read_bytes())),)
        except (FileNotFoundError, ValueError):
            return None

    def save_check(self, fold: int, found: CheckFindings | None) -> None:
        """Write what the check before a fold found, as :meth:`save` does."""
        with self._appearing(self._check_path(fold), f"the check before fold {fold}") as temporary:
            temporary.write_text(json.dumps(None if found is None else found.to_json()), encoding="utf-8")

    @contextmanager
    def _appearing(self, path: Path, what: str) -> Iterator[Path]:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                yield temporary
        except OSError as error:
            do = "Free some space" if error.errno == errno.ENOSPC else "Make the folder writable"
            raise InputError(
                f"cannot write {what}: {error.strerror or error}",
                str(path.parent),
                f"{do} and run again; the folds before it are kept.",
            ) from error

    def _path(self, fold: int) -> Path:
        return self._folder / f"fold-{fold:04d}.parquet"

    def _check_path(self, fold: int) -> Path:
        return self._folder / f"check-{fold:04d}.json"
