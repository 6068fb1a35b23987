"""Names under which a service without tokens answers: a browser must not be led to it under a name of somebody else.

A page from anywhere may have its own name resolve to 127.0.0.1 (DNS rebinding) and then read, as its own, what listens
there. The name stands in the request's ``Host``, which the page cannot change. An address cannot be rebound.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Final

_FORM: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:/@\s]+)(?::\d{1,5})?")
_REMEMBERED: Final = 64


class AllowedHosts:
    """Tells whether a request was meant for this service. Lives in the event loop.

    ``names``: names beside ``localhost``, such as that of a proxy before the service, without port.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self._seen: set[str] = set()

    def allows(self, header: str | None) -> bool:
        """Tell whether a ``Host`` header names this service; none at all comes from no browser."""
        if header is None or header in self._seen:
            return True
        form = _FORM.fullmatch(header)
        if form is None or not self._own(form.group(1).strip("[]").lower().rstrip(".")):
            return False
        if len(self._seen) < _REMEMBERED:
            self._seen.add(header)
        return True

    def _own(self, name: str) -> bool:
        if name == "localhost" or name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
