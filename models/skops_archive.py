"""skops archives without skops: a zip of a JSON schema and NumPy arrays, of which only arrays and numbers are taken.

No type that an archive names is looked up and nothing in it is run, so neither skops nor scikit-learn is imported.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from typing import Any, Final

import numpy as np

MOST_BYTES: Final = 2**31
"""Bytes that an archive unpacks to at most."""

_MAGIC: Final = b"\x93NUMPY"


class SkopsArchive:
    """An open archive; what is wrong with it comes out as whatever its readers raise."""

    def __init__(self, content: bytes) -> None:
        self._zip = zipfile.ZipFile(io.BytesIO(content))
        if sum(each.file_size for each in self._zip.infolist()) > MOST_BYTES:
            raise ValueError("it unpacks to more than 2 GiB")
        self.root: dict[str, Any] = json.loads(self._zip.read("schema.json"))

    def array(self, node: Any) -> np.ndarray:
        """Give an array, after checking that its bytes are as many as its header says.

        Raises ``ValueError, KeyError, TypeError`` if the node is none, or it holds objects or is cut off.
        """
        if node["__loader__"] != "NdArrayNode" or node["type"] != "numpy":
            raise ValueError("an array is stored in another way than NumPy's")
        content = self._zip.read(node["file"])
        stream = io.BytesIO(content)
        if not content.startswith(_MAGIC):
            raise ValueError("an array is not in NumPy's format")
        version = np.lib.format.read_magic(stream)
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, by_column, kind = header(stream)
        if kind.hasobject:
            raise ValueError("an array holds objects")
        rest = content[stream.tell() :]
        if len(rest) != math.prod(shape) * kind.itemsize:
            raise ValueError("an array is cut off")
        return np.frombuffer(rest, kind).reshape(shape, order="F" if by_column else "C")


def kind_of(node: Any) -> tuple[str, str]:
    """Give class and module that an object of the schema says it is of."""
    return node["__class__"], node["__module__"]


def fields_of(node: Any) -> dict[str, Any]:
    """Give the attributes of an object of the schema.

    Raises ``TypeError, KeyError`` if it is none.
    """
    found = node["content"]["content"]
    if not isinstance(found, dict):
        raise TypeError("its schema is not that of an object")
    return found


def plain_of(node: Any) -> Any:
    """Give a number, text, truth value or null of the schema.

    Raises ``ValueError, TypeError, KeyError`` if it is none.
    """
    if node["__loader__"] != "JsonNode":
        raise ValueError("a plain value is stored in another way than as JSON")
    return json.loads(node["content"])
