"""Cut a document into pieces at places that depend on its bytes alone.

Every tokenizer and context then sees the same pieces, so two runs can read the same text in the same
order. A cut is due at each multiple of ``piece_bytes`` and moves forward a little to a natural place.
"""

from collections.abc import Iterable, Iterator


def cut(chunks: Iterable[bytes], piece_bytes: int) -> Iterator[tuple[bytes, bool]]:
    """Yield (piece, is_last) for the UTF-8 bytes of one document, streamed; nothing for an empty one.

    From a multiple of ``piece_bytes`` a cut moves to just after the next newline, or failing that just
    before the next space (so that a word keeps the space before it), or failing that to the next
    character's start. It looks at most an eighth of ``piece_bytes`` ahead.
    """
    reach = piece_bytes // 8
    buffer = bytearray()
    start = 0  # offset in the document of the buffer's first byte
    for chunk in chunks:
        buffer += chunk
        done = 0
        while True:
            due = ((start + done) // piece_bytes + 1) * piece_bytes - start
            if due + reach + 4 >= len(buffer):  # a later chunk may still change this cut
                break
            stop = _place(buffer, due, reach)
            yield bytes(buffer[done:stop]), False
            done = stop
        del buffer[:done]
        start += done
    done = 0
    while done < len(buffer):
        due = ((start + done) // piece_bytes + 1) * piece_bytes - start
        stop = _place(buffer, due, reach) if due < len(buffer) else len(buffer)
        yield bytes(buffer[done:stop]), stop == len(buffer)
        done = stop


def _place(buffer: bytearray, due: int, reach: int) -> int:
    newline = buffer.find(b"\n", due - 1, due + reach)
    if newline >= 0:
        return newline + 1
    space = buffer.find(b" ", due, due + reach)
    if space >= 0:
        return space
    while due < len(buffer) and buffer[due] & 0xC0 == 0x80:  # inside a character
        due += 1
    return due
