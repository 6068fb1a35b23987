"""Pipes, devices and what the kernel serves are refused before anything reads them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from foundation.errors import InputError
from foundation.files import check_regular


def test_a_pipe_without_a_writer_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError):
        check_regular(tmp_path / "pipe")


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self/status"])
def test_devices_and_files_of_the_kernel_are_refused(path: str) -> None:
    with pytest.raises(InputError):
        check_regular(Path(path))


def test_files_folders_and_missing_files_pass(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("1")
    for path in (tmp_path / "file", tmp_path, tmp_path / "missing"):
        check_regular(path)
