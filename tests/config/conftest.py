"""A folder to write configs in, and the smallest config that loads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffsynth_lite.config import load_config
from diffsynth_lite.errors import UserError

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
def refusal() -> Callable[..., list[str]]:
    """Loads a config that must be refused, and gives the lines of the error."""

    def lines_of(path: str | Path, *given: Any, **named: Any) -> list[str]:
        with pytest.raises(UserError) as caught:
            load_config(path, *given, **named)
        return str(caught.value).splitlines()

    return lines_of


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str | bytes], Path]:
    """Writes a config to a file and gives its path."""

    def write_file(text: str | bytes) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_file
