"""Folders of real images, written by the tests that read them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from diffsynth_lite.data.records import Record


@pytest.fixture
def write_image(tmp_path: Path) -> Callable[..., Path]:
    """Write a small image of one colour under ``tmp_path/data`` and return its path."""

    def write(name: str, color: str | tuple[int, ...] = "red", *, size: tuple[int, int] = (8, 8)) -> Path:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, color).save(path)
        return path

    return write


@pytest.fixture
def make_records(write_image: Callable[..., Path]) -> Callable[[int], list[Record]]:
    """``make_records(n)``: n records of different images and captions."""

    def make(num_records: int) -> list[Record]:
        return [
            Record(
                name=f"{index}.png",
                source=0,
                target=write_image(f"{index}.png", (index, 0, 0)),
                captions=(f"caption {index}",),
            )
            for index in range(num_records)
        ]

    return make
