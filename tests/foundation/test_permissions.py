"""What a drain follows from is read only where nobody else may write."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation.errors import InputError
from foundation.permissions import refuse_other_writers


@pytest.mark.parametrize(("inner", "mode"), [(".", 0o757), ("a", 0o757), ("a/file", 0o646)])
def test_what_anyone_may_write_is_refused(tmp_path: Path, inner: str, mode: int) -> None:
    folder = tmp_path / "scores"
    (folder / "a").mkdir(parents=True)
    file = folder / "a" / "file"
    file.touch()
    refuse_other_writers(folder, (folder / "a", file))
    (folder / inner).chmod(mode)
    with pytest.raises(InputError, match="others may write it"):
        refuse_other_writers(folder, (folder / "a", file))
