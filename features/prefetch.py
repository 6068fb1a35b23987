"""Work on what comes next while the present is being worked on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_END: Any = object()


def prefetch(items: Iterable[T]) -> Iterator[T]:
    """Give the same items, each made by a thread of its own while the one before it is in use.

    What makes them should leave Python's lock alone for the most part, as Arrow and compiled kernels do. One item more
    is in memory than without.

    ``items``: gone through by one thread at a time, and never further than one item ahead.
    Yields: in the same order; what raises does so where its item is asked for.
    """
    made = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        coming = pool.submit(next, made, _END)
        while (item := coming.result()) is not _END:
            coming = pool.submit(next, made, _END)
            yield item
