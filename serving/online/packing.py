"""Columns of samples packed without loss: every value comes back bit for bit, in as few bytes as its range needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from telemetry.block import Series

Form = Literal["empty", "offset", "run", "table", "raw"]

_EXACT = 2.0**53  # whole numbers up to here are exact in float64
_CODES = (np.uint8, np.uint16, np.uint32)


@dataclass(frozen=True, slots=True)
class Packed:
    """One column of a frame.

    ``form``: ``empty``: no value at all. ``offset``: ``base[0] + scale * (code - 1)``. ``run``: the same with one base
    a run of rows (a unit's). ``table``: ``base[code - 1]``. ``raw``: as given.
    ``codes``: Unsigned, 0 where missing; of shape (1,) where all rows have the same one. For ``raw`` the values.
    ``base``: float64; uint64 for ``table``.
    ``scale``: of ``offset``.
    ``valid``: for ``raw``, where there is a value; of shape (1,) where all or none have one. Empty for the other forms.
    """

    form: Form
    codes: NDArray[Any]
    base: NDArray[Any]
    scale: int
    valid: NDArray[np.bool_]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.codes.nbytes + self.base.nbytes + self.valid.nbytes

    def unpack(self, rows: NDArray[np.int64], runs: NDArray[np.int64], dtype: np.dtype[Any]) -> Series:
        """Give back some rows.

        ``rows``, ``runs``: positions of the rows, and the number of each one's run; shape (n,).
        Returns: zero where missing.
        """
        if self.form == "empty":
            return Series(np.zeros(rows.size, dtype), np.zeros(rows.size, dtype=np.bool_))
        codes = self.codes[rows] if self.codes.size != 1 else np.broadcast_to(self.codes, rows.shape)
        if self.form == "raw":
            valid = self.valid[rows] if self.valid.size != 1 else np.full(rows.size, self.valid[0])
            return Series(np.array(codes, dtype=dtype), valid)
        valid = codes > 0
        if self.form == "table":
            return Series(np.where(valid, self.base[np.maximum(codes, 1) - 1], 0).astype(dtype), valid)
        base = self.base[0] if self.form == "offset" else self.base[runs]
        values = base + self.scale * (codes.astype(np.float64) - 1.0)
        return Series(np.where(valid, values, 0.0).astype(dtype), valid)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Give the arrays by name, for a file."""
        return {"codes": self.codes, "base": self.base, "valid": self.valid}

    @classmethod
    def of_arrays(cls, form: Form, scale: int, arrays: Mapping[str, NDArray[Any]]) -> Packed:
        """Undo :meth:`arrays`."""
        return cls(form, arrays["codes"], arrays["base"], scale, arrays["valid"])


def pack(series: Series, starts: NDArray[np.int64], *, unit_scale: int = 1) -> Packed:
    """Pack a column.

    ``series``: values of any number type, finite where valid.
    ``starts``: where each run of rows begins; the first is 0.
    ``unit_scale``: a spacing that the values may have from the smallest (the step of times).

    Whole numbers are kept as their distance from the smallest of the column, or of the run where that is shorter: a
    counter at 17 million that rises by one does so here. The distance is taken only where its largest fits the codes,
    so nothing is ever rounded. What is not whole stays as it is.
    """
    values, valid = series.values, series.valid
    nothing = np.zeros(0, dtype=np.bool_)
    if not valid.any():
        return Packed("empty", np.zeros(0, np.uint8), np.zeros(0), 1, nothing)
    if values.dtype == np.uint64:
        return _pack_masks(values, valid)
    numbers = values.astype(np.float64)
    known = numbers[valid]
    low, high = float(known.min()), float(known.max())
    if bool((known == np.rint(known)).all()) and max(abs(low), abs(high)) < _EXACT:
        scale = unit_scale if unit_scale > 1 and bool(((known - low) % unit_scale == 0).all()) else 1
        kind = _smallest((high - low) / scale, values.dtype)
        if values.dtype == np.float64 and (kind is None or kind is _CODES[-1]):
            least = np.minimum.reduceat(np.where(valid, numbers, np.inf), starts)
            least = np.where(np.isfinite(least), least, 0.0)
            sizes = np.diff(np.append(starts, numbers.size))
            moved = np.where(valid, numbers - np.repeat(least, sizes), 0.0)
            narrow = _smallest(float(moved.max()), values.dtype)
            if narrow is not None and narrow is not kind:
                return Packed("run", _same(_coded(moved, valid, narrow)), least, 1, nothing)
        if kind is not None:
            moved = np.where(valid, (numbers - low) / scale, 0.0)
            return Packed("offset", _same(_coded(moved, valid, kind)), np.array([low]), scale, nothing)
    kept = np.where(valid, values, np.zeros(1, values.dtype))
    return Packed("raw", _same(kept), np.zeros(0), 1, _same(valid))


def _pack_masks(values: NDArray[Any], valid: NDArray[np.bool_]) -> Packed:
    table, code = np.unique(values[valid], return_inverse=True)
    kind = _smallest(float(table.size - 1), values.dtype)
    if kind is None or kind is _CODES[-1]:
        kept = np.where(valid, values, np.uint64(0))
        return Packed("raw", _same(kept), np.zeros(0), 1, _same(valid.copy()))
    codes = np.zeros(values.size, dtype=kind)
    codes[valid] = code + 1
    return Packed("table", _same(codes), table, 1, np.zeros(0, dtype=np.bool_))


def _smallest(span: float, dtype: np.dtype[Any]) -> type[np.unsignedinteger[Any]] | None:
    """Give the narrowest type of codes for distances up to ``span`` that is narrower than the values' own."""
    for kind in _CODES:
        if span + 1 <= np.iinfo(kind).max:
            return kind if np.dtype(kind).itemsize < dtype.itemsize else None
    return None


def _coded(
    moved: NDArray[np.float64], valid: NDArray[np.bool_], kind: type[np.unsignedinteger[Any]]
) -> NDArray[np.unsignedinteger[Any]]:
    return np.where(valid, moved + 1.0, 0.0).astype(kind)


def _same(codes: NDArray[Any]) -> NDArray[Any]:
    return codes[:1].copy() if bool((codes == codes[0]).all()) else codes
