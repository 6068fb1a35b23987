"""A stored Parquet file that cannot be read: one clear error in place of Arrow's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from telemetry.errors import InputError

_OF_CONTENT = re.compile(r"parquet|thrift|corrupt|decompress|deserializ|end of stream|page header", re.IGNORECASE)
"""In what Arrow raises as an OSError without a number, this is about the bytes of a file and not about reaching it."""


@contextmanager
def damage_told(where: object, do: str) -> Iterator[None]:
    """Turn what is raised for a file that was cut off or overwritten into an InputError.

    ``do``: what its reader can do, such as "Import the sources of the dataset again."
    Raises ``InputError`` for content that is no Parquet, ends too early, has other columns, or text that is none. What
    the operating system or a storage says (a file that is not there, a disk that fails) passes through.
    """
    try:
        yield
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise _damaged(error, where, do) from error
    except KeyError as error:
        raise InputError(f"the file is damaged: it has no column {error}", str(where), do) from error
    except OSError as error:
        if error.errno is not None or not _OF_CONTENT.search(str(error)):
            raise
        raise _damaged(error, where, do) from error


def _damaged(error: Exception, where: object, do: str) -> InputError:
    said = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return InputError(f"the file is damaged: {said}", str(where), do)
