"""Read Zstandard files, and notice when one ends too early.

The library's own stream reader takes a truncated file for a whole one, and text would be lost in silence.
"""

import io
from typing import Any, BinaryIO

_BLOCK = 1 << 14  # compressed bytes at a time; a block may grow a thousandfold


class ZstdReader(io.RawIOBase):
    """The decompressed bytes of ``raw``, any number of frames. EOFError where the last is incomplete."""

    def __init__(self, raw: BinaryIO):
        import zstandard

        self._raw = raw
        self._library: Any = zstandard
        self._frame: Any = None  # the decompressor inside a frame, None between frames
        self._ready = memoryview(b"")
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._left or self._raw.read(_BLOCK)
            self._left = b""
            if not block:
                if self._frame is not None:
                    raise EOFError("the compressed file ends early")
                return 0
            if self._frame is None:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            self._ready = memoryview(self._frame.decompress(block))
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
