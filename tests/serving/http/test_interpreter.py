"""A process that serves lets its event loop go on while a decision is computed."""

import gc
import sys

from serving.server import be_responsive


def test_the_interpreter_switches_threads_often_and_walks_the_heap_seldom() -> None:
    before = sys.getswitchinterval(), gc.get_threshold()
    try:
        be_responsive()
        assert sys.getswitchinterval() <= 0.001
        assert gc.isenabled()
        assert gc.get_threshold()[0] > before[1][0]
    finally:
        sys.setswitchinterval(before[0])
        gc.set_threshold(*before[1])
