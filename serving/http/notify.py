"""Tells a supervisor how the service stands, in the way of sd_notify(3): a datagram to the socket that it names."""

from __future__ import annotations

import logging
import os
import socket

_LOG = logging.getLogger(__name__)
_VARIABLE = "NOTIFY_SOCKET"


def notify(state: str) -> bool:
    """Send a state, such as ``READY=1``.

    ``state``: assignments as sd_notify(3) has them, one a line.
    Returns: whether it was sent; False where nobody asked for it.
    """
    address = os.environ.get(_VARIABLE, "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):  # an abstract name
        address = f"\0{address[1:]}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(1.0)
            sender.sendto(state.encode(), address)
    except OSError as error:  # a supervisor that cannot be told is no reason to serve nobody
        _LOG.warning("the supervisor cannot be told %s: %s", state, error)
        return False
    return True
