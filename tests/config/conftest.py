"""A folder to write configs in, and the smallest config that loads."""

from collections.abc import Callable
from pathlib import Path

import pytest

MINIMAL = """\
model:
  family: qwen_image
  path: some/model
data:
  path: images
output:
  dir: runs/one
"""


@pytest.fixture
def minimal() -> str:
    return MINIMAL


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str | bytes], Path]:
    """Writes a config to a file and gives its path."""

    def write_file(text: str | bytes) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_file
