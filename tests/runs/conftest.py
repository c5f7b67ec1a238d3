"""The tiny pipeline that all runs share, and a fresh accelerate state for each test."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from tiny_run import TinyRun, make_run

from diffsynth_lite.pipelines.qwen_image import tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_qwen_image")
    tiny().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _imports_are_not_searched_for_garbage(tiny_model: Path) -> Iterator[None]:
    """A run collects garbage four times; to look through all that is imported took most of a tiny one."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def tiny_run(tmp_path: Path, tiny_model: Path) -> TinyRun:
    return make_run(tmp_path, tiny_model)


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
