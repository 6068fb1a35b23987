"""Where Arrow takes its memory from."""

from __future__ import annotations

import os

import pyarrow as pa


def take_from_c_library() -> None:
    """Let Arrow take memory from the C library, unless ``ARROW_DEFAULT_MEMORY_POOL`` names another source.

    Several threads read buckets and give them up at once; giving back their pages costs Arrow's own allocators a sixth
    of a build's CPU.
    """
    if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        pa.set_memory_pool(pa.system_memory_pool())
