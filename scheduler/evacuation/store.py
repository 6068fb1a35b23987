"""The progress of evacuations as this process knows it, and its place in the scheduler."""

from __future__ import annotations

from scheduler.acting import LeaseLostError
from scheduler.evacuation.ports import Workloads
from scheduler.evacuation.progress import Progress, progress_of, progress_text
from scheduler.failures import SchedulerError


class ProgressStore:
    """Loads and keeps it.

    ``progress``: as last read or kept.
    ``known``: whether it could ever be read in this process.
    """

    def __init__(self, workloads: Workloads) -> None:
        self._workloads = workloads
        self._version = ""
        self._kept = Progress()
        self.progress = Progress()
        self.known = False

    def load(self) -> str | None:
        """Read it anew; gives what was wrong with it, in words.

        Raises ``SchedulerError`` if it cannot be read.
        """
        stored = self._workloads.load_progress()
        trouble, progress = None, Progress()
        if stored.text is not None:
            try:
                progress = progress_of(stored.text)
            except ValueError as error:
                trouble = f"evacuations are begun anew, for {error}"
        self._version, self._kept, self.progress, self.known = stored.version, progress, progress, True
        return trouble

    def save(self, progress: Progress) -> str | None:
        """Keep it, where it differs from what is kept; gives why it is not sure to be kept, or None.

        Raises ``LeaseLostError`` if another process wrote it in between.
        """
        self.progress = progress
        if progress == self._kept:
            return None
        try:
            text = progress_text(progress)
        except ValueError as error:
            return str(error)
        answer = self._workloads.save_progress(text, self._version)
        if answer.confirmed:
            self._version, self._kept = answer.version or self._version, progress
            return None
        if answer.kind == "conflict":
            raise LeaseLostError(f"another process wrote how far nodes are emptied: {answer.words}")
        try:
            found = self._workloads.load_progress()
        except SchedulerError as error:
            return f"how far nodes are emptied may not be kept: {error}"
        if found.text == text:
            self._version, self._kept = found.version, progress
            return None
        return f"how far nodes are emptied is not kept: {answer.kind} {answer.words}"
