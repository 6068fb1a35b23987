"""Snappy's block format, as remote write uses it, decompressed only after its size was checked."""

from __future__ import annotations

import cramjam

# A copy of three bytes makes 64 at most, so that no honest block grows more.
_MOST_GROWTH = 22
_LONGEST_VARINT = 5


class BlockError(ValueError):
    """Bytes that are no snappy block."""


class BlockTooLarge(ValueError):
    """A block whose header announces more bytes than are allowed."""


def announced_size(block: bytes) -> int:
    """Return the decompressed size that a block's header announces, in bytes.

    Raises ``BlockError`` if the header is no varint of 32 bits.
    """
    size = 0
    for place, byte in enumerate(block[:_LONGEST_VARINT]):
        size |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            if size >= 2**32:
                break
            return size
    raise BlockError("the body does not begin like a snappy block")


def decompress(block: bytes, limit: int) -> bytes:
    """Decompress a block.

    ``limit``: most bytes that may come out.
    Raises ``BlockTooLarge`` if the header announces more than ``limit``; nothing was decompressed.
    Raises ``BlockError`` if the block is damaged.
    """
    size = announced_size(block)
    if size > limit:
        raise BlockTooLarge(f"the body would decompress to {size} bytes")
    if size > len(block) * _MOST_GROWTH:
        raise BlockError(f"a body of {len(block)} bytes announces {size}")
    try:
        return bytes(cramjam.snappy.decompress_raw(block))
    except cramjam.DecompressionError as error:
        raise BlockError(f"the body is no snappy block: {error}") from error
