"""TLS with a certificate that may be renewed while the service runs."""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path
from typing import Final, NoReturn

from features.errors import InputError

_LOG = logging.getLogger(__name__)
_LOOK_EVERY_S: Final = 5.0


class Tls:
    """A server's certificate, looked at every few seconds for a newer one.

    ``certificate``, ``key``: PEM files: the certificate with those that lead to its authority, and its private key
    without a password.
    ``context``: TLS 1.2 at least, with Python's own choice of ciphers.
    Raises ``InputError`` if they cannot be read, or do not belong together.
    """

    def __init__(self, certificate: Path, key: Path, look_every_s: float = _LOOK_EVERY_S) -> None:
        self._certificate, self._key = certificate, key
        self._look_every_s = look_every_s
        self._seen = self._stamps()
        self.context = _context(certificate, key)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tls", daemon=True)

    def start(self) -> None:
        """Begin to look, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def look(self) -> bool:
        """Take a newer certificate if there is one that can be used.

        Returns: whether connections to come get another one. Those that stand keep theirs. One that cannot be used is
        logged, and the one of before stays.
        """
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        try:
            _context(self._certificate, self._key)  # a pair that does not fit must not reach the one in use
            self.context.load_cert_chain(self._certificate, self._key, _no_password)
        except (InputError, OSError) as error:
            # Certificate and key are often replaced one after the other: what is half done is looked at again.
            _LOG.warning("the new certificate cannot be used, the one of before stays: %s", error)
            self._seen = stamps
            return False
        self._seen = stamps
        _LOG.info("the certificate has been renewed")
        return True

    def _stamps(self) -> tuple[object, ...]:
        return tuple(_stamp(path) for path in (self._certificate, self._key))

    def _run(self) -> None:
        while not self._stopped.wait(self._look_every_s):
            try:
                self.look()
            except Exception:  # the thread must live: without it the certificate would run out
                _LOG.exception("the certificate could not be looked at")


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for path, option in ((certificate, "--tls-cert"), (key, "--tls-key")):
        try:
            path.read_bytes()
        except OSError as error:
            raise InputError(
                f"{path} cannot be read: {error.strerror}", option, "Give a PEM file that this user may read."
            ) from None
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except (ssl.SSLError, ValueError) as error:
        raise InputError(
            f"the certificate and the key cannot be used: {getattr(error, 'reason', None) or error}",
            f"{certificate}, {key}",
            "Give PEM files that belong together, the key without a password.",
        ) from None
    return context


def _no_password() -> NoReturn:
    raise ValueError("the key has a password")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
