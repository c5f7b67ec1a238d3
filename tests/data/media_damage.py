"""Ways in which a file of images or clips may be damaged, and what came of reading a damaged one."""

import random


def mutated(content: bytes, draw: random.Random) -> bytes:
    """The bytes of a file, damaged in one place."""
    data = bytearray(content)
    at, length = draw.randrange(len(data)), draw.choice([1, 10, 200])
    kind = draw.choice(["truncate", "bytes", "zero", "drop", "insert"])
    if kind == "truncate":
        del data[at:]
    elif kind == "drop":
        del data[at : at + length]
    elif kind == "insert":
        data[at:at] = draw.randbytes(length)
    else:
        patch = bytes(length) if kind == "zero" else draw.randbytes(length)
        data[at : at + length] = patch[: len(data) - at]
    return bytes(data)
