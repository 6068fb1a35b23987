"""Group commit: requests wait together until one file holds what all of them brought.

A request is answered only when its samples are on the disk, and yet not every request makes a file. The first request
of a group starts a timer; the file is written when it ends, or when enough has gathered.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from telemetry.collect.remote_write.decoding import Samples
from telemetry.collect.remote_write.problems import Refused
from telemetry.errors import InputError

MIB = 2**20


@dataclass(frozen=True, slots=True)
class ReceiverSettings:
    """Limits of the receiver.

    ``tokens``: file of bearer tokens, one a line; None takes requests of anybody who can reach the port.
    ``held_bytes``: most bytes of bodies in memory at a time, those beyond it are answered 503; one body is always
    taken.
    ``flush_interval_s``: samples of several requests become one landed file; the first of them waits this long at most.
    ``flush_samples``: a file is written at once when so many samples wait.
    ``held_samples``: most samples in memory; beyond it requests are answered 503 until a file was written.
    ``body_timeout_s``: longest time in which a client must have sent its body.
    ``head_timeout_s``: longest time in which a client must have sent the head of a request; its connection is closed
    then.
    ``concurrency``: most requests at a time, those beyond it are answered 503.
    ``retry_after_s``: what 503 asks a client to wait.
    ``inventory_every_s``: a GPU whose labels say nothing new is noted in the inventory this often.
    """

    tokens: Path | None = None
    body_bytes: int = 32 * MIB
    held_bytes: int = 256 * MIB
    decoded_bytes: int = 64 * MIB
    request_rows: int = 1_000_000
    flush_interval_s: float = 1.0
    flush_samples: int = 250_000
    held_samples: int = 4_000_000
    body_timeout_s: float = 30.0
    head_timeout_s: float = 10.0
    concurrency: int = 512
    retry_after_s: int = 5
    inventory_every_s: float = 3600.0


_LOG = logging.getLogger(__name__)

Land = Callable[[Sequence[Samples]], tuple[int, Counter[str]]]
"""Writes batches to the disk, as :meth:`telemetry.collect.remote_write.sample_writer.SampleWriter.land` does."""


class GroupCommit:
    """Gathers batches and lands them together. Lives in one event loop.

    ``land``: writes a group; called in ``executor``, one call at a time.
    ``landed``: told of each group that has landed: samples, rows, problems.
    """

    def __init__(
        self,
        land: Land,
        settings: ReceiverSettings,
        executor: Executor,
        landed: Callable[[int, int, Counter[str]], None],
    ) -> None:
        self._land = land
        self._settings = settings
        self._executor = executor
        self._landed = landed
        self._waiting: list[tuple[Samples, asyncio.Future[None]]] = []
        self._gathered = 0
        self._writer: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self.held = 0
        """Samples in memory: gathered, and being written."""
        self.failing = False
        """Whether the last group could not be written."""

    async def add(self, batch: Samples) -> None:
        """Wait until a batch is on the disk.

        Raises ``Refused``: 503 if too much is in memory or the disk does not take it.
        """
        self._reserve(len(batch))
        landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((batch, landed))
        self._gathered += len(batch)
        if self._gathered >= self._settings.flush_samples:
            self._hurry.set()
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())
        # A client that goes away must not cancel what the others of its group wait for.
        await asyncio.shield(landed)

    def check_room(self) -> None:
        """Refuse a request before its body is decoded, when memory is used up.

        Raises ``Refused``: 503.
        """
        if self.held >= self._settings.held_samples:
            raise self._busy("too many samples wait to be written", "memory")

    async def close(self) -> None:
        """Write what waits, at once."""
        while self._writer is not None:
            self._hurry.set()
            await asyncio.shield(self._writer)

    def _reserve(self, samples: int) -> None:
        # A request above the bound is taken when nothing else is held: else it could never be.
        if self.held and self.held + samples > self._settings.held_samples:
            raise self._busy("too many samples wait to be written", "memory")
        self.held += samples

    def _busy(self, detail: str, reason: str) -> Refused:
        return Refused(503, detail, reason, retry_after_s=self._settings.retry_after_s)

    async def _write(self) -> None:
        try:
            while self._waiting:
                if self._gathered < self._settings.flush_samples:
                    try:
                        async with asyncio.timeout(self._settings.flush_interval_s):
                            await self._hurry.wait()
                    except TimeoutError:
                        pass
                group, self._waiting = self._waiting, []
                size, self._gathered = self._gathered, 0
                self._hurry.clear()
                await self._write_group(group, size)
        finally:
            self._writer = None

    async def _write_group(self, group: list[tuple[Samples, asyncio.Future[None]]], size: int) -> None:
        batches = [batch for batch, _ in group]
        failure: Refused | None = None
        try:
            rows, problems = await asyncio.get_running_loop().run_in_executor(self._executor, self._land, batches)
        except (InputError, OSError) as error:
            if not self.failing:
                _LOG.error("samples cannot be landed: %s", error)
            failure = self._busy(f"samples cannot be stored now: {error}", "disk")
        except Exception:  # the requests of the group must be answered whatever happened
            if len(group) > 1:
                # One request that cannot be landed must not hold up the others of its group for ever.
                for batch, landed in group:
                    await self._write_group([(batch, landed)], len(batch))
                return
            _LOG.exception("samples cannot be landed")
            failure = self._busy("samples cannot be stored now: see the receiver's log", "internal")
        else:
            if self.failing:
                _LOG.info("samples land again")
            self._landed(size, rows, problems)
        self.failing = failure is not None
        self.held -= size
        for _, landed in group:
            if landed.cancelled():
                continue
            if failure is None:
                landed.set_result(None)
            else:
                landed.set_exception(failure)
                landed.exception()  # a client that has gone away does not fetch it
