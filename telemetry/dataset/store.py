"""The validated store: what reads a dataset and what writes one."""

from __future__ import annotations

import os

import pyarrow as pa

from telemetry.dataset.dataset import Dataset
from telemetry.dataset.meta import DatasetMeta
from telemetry.dataset.place import Place
from telemetry.dataset.writer import DatasetWriter


def take_from_c_library() -> None:
    """Let Arrow take memory from the C library, unless ``ARROW_DEFAULT_MEMORY_POOL`` names another source.

    Several threads read buckets and give them up at once; giving back their pages costs Arrow's own allocators a sixth
    of a build's CPU.
    """
    if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        pa.set_memory_pool(pa.system_memory_pool())


__all__ = ["Dataset", "DatasetMeta", "DatasetWriter", "Place"]

take_from_c_library()
