"""A stored Parquet file that cannot be read: one clear error in place of Arrow's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from telemetry.errors import InputError


@contextmanager
def damage_told(where: object, do: str) -> Iterator[None]:
    """Turn what Arrow raises for a file that was cut off or overwritten into an InputError.

    Parameters
    ----------
    where : object
        The file, as it is to be named.
    do : str
        What its reader can do, such as "Import the sources of the dataset again."

    Raises
    ------
    InputError
        For content that is no Parquet or ends too early. What the operating system says (a file that is not there, a
        disk that fails) passes through.
    """
    try:
        yield
    except pa.ArrowInvalid as error:
        raise _damaged(error, where, do) from error
    except OSError as error:
        if error.errno is not None or isinstance(error, FileNotFoundError):
            raise
        raise _damaged(error, where, do) from error  # Arrow's own words for bytes that it cannot decode


def _damaged(error: Exception, where: object, do: str) -> InputError:
    said = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return InputError(f"the file is damaged: {said}", str(where), do)
