"""A tiny run for the commands, with its model made once; log handlers and accelerate as before each test."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from tiny_run import TinyRun, make_run

from diffsynth_lite.pipelines.qwen_image import QwenImage, tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_qwen_image")
    tiny().save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_run(tmp_path: Path, tiny_model: Path) -> TinyRun:
    return make_run(tmp_path, tiny_model)


@pytest.fixture
def refuse_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it an error to load an encoder."""

    def refuse(*_: object) -> None:
        raise AssertionError("an encoder was loaded")

    monkeypatch.setattr(QwenImage, "load_prompt_encoder", refuse)
    monkeypatch.setattr(QwenImage, "load_media_encoder", refuse)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("diffsynth_lite")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    AcceleratorState._reset_state(reset_partial_state=True)
