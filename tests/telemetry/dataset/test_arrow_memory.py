"""Where Arrow takes its memory: from the C library, or from where the user said."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("said", "taken"), [(None, "system"), ("jemalloc", "jemalloc")])
def test_arrow_takes_memory_from_the_c_library_unless_told_otherwise(said, taken):
    environment = {name: value for name, value in os.environ.items() if name != "ARROW_DEFAULT_MEMORY_POOL"}
    if said is not None:
        environment["ARROW_DEFAULT_MEMORY_POOL"] = said
    program = "import features.matrix.building, pyarrow; print(pyarrow.default_memory_pool().backend_name)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == taken
