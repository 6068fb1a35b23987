"""What the machines of a cluster share in the models room: a matrix in a folder, and a turn in each process."""

from __future__ import annotations

import threading
from pathlib import Path

from features.errors import InputError
from features.matrix.matrix import FeatureMatrix

SHARED = "Give every machine of the cluster the same folders under the same paths."
"""What to do about a machine that does not see a folder."""

TURN = threading.Lock()
"""Learners limit the threads of the whole process: one fit at a time in each."""


def open_shared(path: Path, digest: str) -> FeatureMatrix:
    """Open the matrix that another machine means.

    Raises ``InputError`` if this machine does not see it, or sees another one.
    """
    try:
        matrix = FeatureMatrix.open(path)
    except InputError as error:
        raise InputError(f"a worker cannot read the matrix: {error.what}", error.where, SHARED) from None
    if matrix.digest != digest:
        raise InputError("a worker sees another matrix", str(path), SHARED)
    return matrix
