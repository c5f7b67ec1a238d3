"""The tiny pipeline that all runs share, and a fresh accelerate state for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from processes import kill_children
from tiny_run import TinyRun, make_run

from diffsynth_lite.pipelines.qwen_image import tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_qwen_image")
    tiny().save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_run(tmp_path: Path, tiny_model: Path) -> TinyRun:
    return make_run(tmp_path, tiny_model)


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def _no_trainer_is_left() -> Iterator[None]:
    yield
    kill_children()
