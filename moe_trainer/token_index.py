"""Beginning of an .idx file, the index of a token file, for what needs no numpy: header and lengths of sequences."""

import struct
from array import array

from arguments.regular_file import regular_file

INDEX_HEADER = struct.Struct("<9sQBQQ")
"""Magic bytes, version, dtype, number of sequences, number of document boundaries."""
INDEX_MAGIC = b"MMIDIDX\x00\x00"


def read_sequence_lengths(path: str) -> array:
    """Return the lengths of the sequences of an .idx file.

    Raises:
        ValueError: if it is no such file, or is truncated.
    """
    with regular_file(path).open("rb") as file:
        head = file.read(INDEX_HEADER.size)
        if len(head) < INDEX_HEADER.size or not head.startswith(INDEX_MAGIC):
            raise ValueError(f"{path} is no index of token files")
        num_sequences = INDEX_HEADER.unpack(head)[3]
        lengths = array("i")
        data = file.read(num_sequences * lengths.itemsize)
    if len(data) < num_sequences * lengths.itemsize:
        raise ValueError(f"{path} is truncated: it holds fewer than its {num_sequences} sequences")
    lengths.frombytes(data)
    return lengths
