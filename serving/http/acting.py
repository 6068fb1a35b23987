"""Follows what the controller decided last, so that the scheduler extender acts no harder than the controller."""

import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

from serving.polling import Poller

_LOG = logging.getLogger(__name__)
_POLL_S: Final = 5.0


class ControllerDecisions:
    """Reads the newest decision in the controller's ledger.

    ``open_ledger``: opens a :class:`scheduler.ledger.reader.LedgerReader`. None: there is no ledger.
    ``out``: nodes that the decision keeps new work off, each with the end of the prediction behind it. Stage, breaker,
    budgets, opt-outs and the kill switch have all had their say in it. Empty where the ledger cannot be read: what is
    not known removes no node.
    """

    def __init__(self, open_ledger: Callable[[], Any] | None, poll_s: float = _POLL_S) -> None:
        self.out: Mapping[str, datetime] = {}
        self._open = open_ledger
        self._reader: Any = None
        self._problem: str | None = None
        self._poller = Poller("ledger", self.look, poll_s)

    def start(self) -> None:
        """Begin to follow the ledger, in a thread."""
        if self._open is not None:
            self._poller.start()

    def stop(self) -> None:
        """End the thread."""
        self._poller.stop()

    def look(self) -> None:
        """Read the newest decision."""
        assert self._open is not None
        try:
            self._reader = self._reader or self._open()  # kept open: opening checks the whole file
            self.out, problem = self._reader.out_of_service(), None
        except Exception as error:  # the file may be moved away, replaced or damaged at any time
            self.out, self._reader, problem = {}, None, f"{type(error).__name__}: {error}"
        if problem != self._problem:
            _LOG.warning("the extender removes no node, the ledger cannot be read: %s", problem or "it can again")
            self._problem = problem
