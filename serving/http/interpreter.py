"""Settings of the interpreter for a process that answers in milliseconds while another thread computes for seconds."""

from __future__ import annotations

import gc
import sys
from typing import Final

SWITCH_S: Final = 0.0005
"""How long a thread that computes may hold the interpreter while the event loop waits for it; Python's own is 5 ms, and
a look-up waits several times."""

GARBAGE: Final = (50_000, 20, 100)
"""Thresholds of the collector of cycles. A decision makes hundreds of thousands of objects, none of them in cycles;
with Python's own thresholds the whole heap was walked again and again, each time for up to 200 ms without an answer."""


def be_responsive() -> None:
    """Set both, for the whole process."""
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(*GARBAGE)
