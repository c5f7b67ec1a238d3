"""What whole runs need, as in tests/runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from tiny_run import TinyRun, make_run

from diffsynth_lite.pipelines.qwen_image import tiny


@pytest.fixture
def tiny_run(tmp_path: Path) -> TinyRun:
    tiny().save_pretrained(tmp_path / "tiny_qwen_image")
    return make_run(tmp_path / "run", tmp_path / "tiny_qwen_image")


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
