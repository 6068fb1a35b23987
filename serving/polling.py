"""Looks at something that changes, again and again, in a thread of its own."""

import logging
import threading
from collections.abc import Callable

_LOG = logging.getLogger(__name__)


class Poller:
    """Call ``look`` immediately and after each pause until stopped; log exceptions and continue.

    Without that thread the service would grow stale in silence.
    """

    def __init__(self, name: str, look: Callable[[], object], pause_s: float) -> None:
        self._look, self._pause_s = look, pause_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, wait_s: float = 5.0) -> None:
        """End the thread; a look that takes longer is not waited for."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._look()
            except Exception:
                _LOG.exception("%s: polling failed", self._thread.name)
            self._stopped.wait(self._pause_s)
