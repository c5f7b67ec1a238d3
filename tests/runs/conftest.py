"""The tiny pipeline that all runs share, and a fresh accelerate state for each test."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from accelerate.state import AcceleratorState
from processes import kill_children
from safetensors.torch import load_file, save_file
from tiny_run import UNWATCHED, TinyRun, copy_run, make_run

from diffsynth_lite.pipelines.qwen_image import tiny


def pytest_before_fork() -> None:
    """Train a step: what libraries do when they are first used takes each process that tests fork 0.3 s."""
    # With CUDA autograd has threads, after which no fork computes gradients.
    if not torch.cuda.is_available():
        # What raises here fails the tests of runs.
        pytest.CallInfo.from_call(_train_a_step, "setup", KeyboardInterrupt)


def _train_a_step() -> None:
    root, nowhere, printed = logging.getLogger(), logging.NullHandler(), io.StringIO()
    root.addHandler(nowhere)  # The command adds its own only where there is none.
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        tiny().save_pretrained(f"{folder}/model")
        with redirect_stdout(printed), redirect_stderr(printed):
            make_run(Path(folder) / "run", Path(folder) / "model").train("train.steps=1")
    root.removeHandler(nowhere)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_qwen_image")
    tiny().save_pretrained(folder)
    return folder


@pytest.fixture
def watched_run(tmp_path: Path, tiny_model: Path) -> TinyRun:
    """With what only looks at the training: previews and losses on fixed noise."""
    return make_run(tmp_path, tiny_model)


@pytest.fixture
def tiny_run(watched_run: TinyRun) -> TinyRun:
    """Without what only looks at the training."""
    return replace(watched_run, settings=UNWATCHED)


@pytest.fixture
def foreign_lora(tiny_model: Path, tmp_path: Path) -> Path:
    """A LoRA of another program, on two kinds of layers."""
    tensors = {}
    for name, weight in load_file(tiny_model / "transformer" / "diffusion_pytorch_model.safetensors").items():
        layer, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind in ("to_q", "to_k"):
            tensors[f"diffusion_model.{layer}.{kind}.lora_down.weight"] = torch.randn(2, weight.shape[1])
            tensors[f"diffusion_model.{layer}.{kind}.lora_up.weight"] = torch.randn(weight.shape[0], 2) / 4
            tensors[f"diffusion_model.{layer}.{kind}.alpha"] = torch.tensor(3.0)
    save_file(tensors, tmp_path / "foreign.safetensors")
    return tmp_path / "foreign.safetensors"


def trained_run(root: Path, model: Path, *settings: str) -> TinyRun:
    """A tiny run that is done up to a step."""
    run = replace(make_run(root, model), settings=UNWATCHED)
    assert run.train(*settings) == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    return run


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> TinyRun:
    """A tiny run that was not interrupted, to compare others with."""
    return trained_run(tmp_path_factory.mktemp("whole"), tiny_model)


@pytest.fixture
def finished_run(tmp_path: Path, whole_run: TinyRun) -> TinyRun:
    """A copy of it."""
    return copy_run(whole_run, tmp_path)


@pytest.fixture(scope="session")
def _two_steps(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> TinyRun:
    return trained_run(tmp_path_factory.mktemp("two steps"), tiny_model, "train.steps=2")


@pytest.fixture
def begun_run(tmp_path: Path, _two_steps: TinyRun) -> TinyRun:
    """A tiny run, of which two steps are done, with data and cache of its own."""
    return copy_run(_two_steps, tmp_path)


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def _no_trainer_is_left() -> Iterator[None]:
    yield
    kill_children()
