"""What general compressors reach on a text, in bits per byte: the yardstick beside a language model's."""

import gzip
import lzma
from collections.abc import Iterable

LIMIT = 16 << 20  # xz -9 takes about a second for each megabyte; longer texts are judged by their beginning


def compressed(parts: Iterable[bytes]) -> dict[str, float | int]:
    """Bits per byte of ``gzip -9`` and ``xz -9`` on the parts joined, up to LIMIT bytes; and how many those were."""
    text = bytearray()
    for part in parts:
        text += part
        if len(text) >= LIMIT:
            break
    whole = bytes(text[:LIMIT])
    return {
        "gzip_bits_per_byte": 8 * len(gzip.compress(whole, 9, mtime=0)) / len(whole),
        "xz_bits_per_byte": 8 * len(lzma.compress(whole, preset=9)) / len(whole),
        "compressed_bytes": len(whole),
    }
