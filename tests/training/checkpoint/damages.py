"""Ways in which a file of a checkpoint may be altered."""

import random
from pathlib import Path


def truncate(path: Path, dice: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: dice.randrange(1, len(content))])


def drop_last_byte(path: Path, dice: random.Random) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_one_bit(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def zero_a_range(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = next(index for index in iter(lambda: dice.randrange(len(content)), None) if content[index])
    end = dice.randrange(start + 1, len(content) + 1)
    path.write_bytes(content[:start] + bytes(end - start) + content[end:])


def insert_a_byte(path: Path, dice: random.Random) -> None:
    content = path.read_bytes()
    at = dice.randrange(len(content) + 1)
    path.write_bytes(content[:at] + dice.randbytes(1) + content[at:])


def append(path: Path, dice: random.Random) -> None:
    path.write_bytes(path.read_bytes() + dice.choice([b"\n", b" ", b"\0", b"more"]))


def empty(path: Path, dice: random.Random) -> None:
    path.write_bytes(b"")


def delete(path: Path, dice: random.Random) -> None:
    path.unlink()


def replace_by_folder(path: Path, dice: random.Random) -> None:
    path.unlink()
    path.mkdir()


def replace_by_link_to_a_copy(path: Path, dice: random.Random) -> None:
    path.symlink_to(path.rename(path.parent.parent / "copy"))


def rename(path: Path, dice: random.Random) -> None:
    path.rename(path.with_name(f"{path.name}2"))


def add(path: Path, dice: random.Random) -> None:
    path.with_name(dice.choice(["ema.safetensors", ".hidden", "notes.txt", "complete"])).write_bytes(b"{}")


RANDOM = (truncate, flip_one_bit, zero_a_range, insert_a_byte)
CERTAIN = (drop_last_byte, append, empty, delete, replace_by_folder, replace_by_link_to_a_copy, rename, add)
