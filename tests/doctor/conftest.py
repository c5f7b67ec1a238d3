"""The tiny models of all families that the doctor is tried with, and a fresh accelerate state."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from messy_data import Workplace

from diffsynth_lite.pipelines import krea2, qwen_image, qwen_image_edit, sd3, wan, wan_i2v


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in (krea2, qwen_image, qwen_image_edit, sd3, wan, wan_i2v):
        family.tiny().save_pretrained(folder / family.__name__.rpartition(".")[2])
    return folder


@pytest.fixture
def workplace(tmp_path: Path, tiny_models: Path) -> Workplace:
    return Workplace(root=tmp_path, models=tiny_models)


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
