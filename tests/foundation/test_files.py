"""What may be read: no pipes, no devices, and nothing that drains follow from and others may write."""

import os
from pathlib import Path

import pytest

from foundation.errors import InputError
from foundation.files import check_regular, read_small, refuse_other_writers


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


@pytest.mark.parametrize(("inner", "mode"), [(".", 0o757), ("a", 0o757), ("a/file", 0o646)])
def test_what_anyone_may_write_is_refused(tmp_path: Path, inner: str, mode: int) -> None:
    folder = tmp_path / "scores"
    (folder / "a").mkdir(parents=True)
    file = folder / "a" / "file"
    file.touch()
    refuse_other_writers(folder, (folder / "a", file))
    (folder / inner).chmod(mode)
    with pytest.raises(InputError, match="other users can write to this path"):
        refuse_other_writers(folder, (folder / "a", file))


@pytest.mark.parametrize("path", ["pipe", "large"])
def test_a_small_file_is_read_whole_or_refused(tmp_path: Path, path: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"12345")
    assert read_small(tmp_path / "large", 5) == b"12345"
    with pytest.raises(InputError):
        read_small(tmp_path / path, 4)
