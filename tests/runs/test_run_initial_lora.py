"""Runs that start from a LoRA that is there already."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import TinyRun, checkpoint_tensors, differing


@pytest.fixture
def first(begun_run: TinyRun) -> Path:
    """An earlier run, which has a LoRA."""
    return begun_run.folder.rename(begun_run.root / "first")


def adapter(folder: Path, step: int) -> dict[str, torch.Tensor]:
    tensors = checkpoint_tensors(folder, step)
    return {name: value for name, value in tensors.items() if name.startswith("adapter/")}


@pytest.mark.parametrize("form", ["", "lora/pytorch_lora_weights.safetensors"])
def test_a_new_run_starts_at_the_values_of_the_lora_and_with_a_new_optimizer(
    begun_run: TinyRun, first: Path, form: str
) -> None:
    # The learning rate is so low that fp32 cannot hold what the one step changes.
    settings = ("train.steps=1", "train.learning_rate=1e-30", "train.weight_decay=0")
    assert begun_run.train(f"lora.init_from={first / form}", *settings) == 0
    assert differing(adapter(first, 2), adapter(begun_run.folder, 1)) == []
    new = begun_run.root / "new"
    assert begun_run.train(f"output.dir={new}", *settings) == 0
    assert differing(adapter(first, 2), adapter(new, 1)) != []
    steps = [
        value for name, value in checkpoint_tensors(begun_run.folder, 1).items() if name.endswith("::step")
    ]
    assert {step.item() for step in steps} == {1.0}


def as_kohya_writes_it(file: Path, target: Path, *, alpha: float) -> None:
    """The LoRA of a file, whose alpha is its rank, by kohya's names and with another alpha."""
    tensors = {}
    for name, tensor in load_file(file).items():
        layer, _, matrix = name.removeprefix("transformer.").rpartition(".lora_")
        key = f"lora_unet_{layer.replace('.', '_')}"
        down = matrix == "A.weight"
        tensors[f"{key}.{'lora_down' if down else 'lora_up'}.weight"] = tensor if down else tensor * 4 / alpha
        tensors[f"{key}.alpha"] = torch.tensor(alpha)
    target.parent.mkdir()
    save_file(tensors, target)


def test_a_lora_of_another_trainer_does_the_same_in_a_run_of_another_alpha(
    begun_run: TinyRun, first: Path
) -> None:
    settings = ("train.steps=1", "train.learning_rate=1e-30", "train.weight_decay=0", "lora.alpha=2")
    theirs = first.with_name("theirs")
    as_kohya_writes_it(first / "lora/pytorch_lora_weights.safetensors", theirs / "a.safetensors", alpha=16)
    assert begun_run.train(f"lora.init_from={theirs}", *settings) == 0
    before, after = adapter(first, 2), adapter(begun_run.folder, 1)
    for name, value in before.items():
        assert torch.equal(value * 4 if ".lora_B." in name else value, after[name]), name


def test_a_run_that_goes_on_does_not_look_at_it_any_more_and_may_write_files_of_another_dtype(
    begun_run: TinyRun, first: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, start = begun_run.root / "whole", f"lora.init_from={first / 'lora'}"
    assert begun_run.train(f"output.dir={whole}", start) == 0
    assert begun_run.train(start, "train.steps=4") == 0
    (first / "lora" / "pytorch_lora_weights.safetensors").unlink()
    assert "The LoRA file is in" not in caplog.text
    assert begun_run.train(start, "output.lora_dtype=bfloat16") == 0
    assert differing(checkpoint_tensors(whole, 6), checkpoint_tensors(begun_run.folder, 6)) == []
    assert re.search(
        r"The LoRA file is in bfloat16: its update is that of the checkpoint to 0\.\d+ %", caplog.text
    )
    (file,) = (begun_run.folder / "lora").glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("lora.rank=8",), "has rank 4; set lora.rank"),
        (("lora.target_modules=[to_q]",), "it also has transformer_blocks.0.attn"),
    ],
)
def test_a_lora_of_another_shape_is_refused_with_what_would_do(
    begun_run: TinyRun, first: Path, caplog: pytest.LogCaptureFixture, settings: tuple[str, ...], message: str
) -> None:
    assert begun_run.train(f"lora.init_from={first / 'lora'}", *settings) == 2
    assert message in caplog.text
    assert "Loading the transformer" not in caplog.text.rsplit("settings from", 1)[-1]


def test_a_lora_with_a_number_that_is_not_finite_is_refused_by_name(
    tiny_run: TinyRun, whole_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = load_file(whole_run.folder / "lora" / "pytorch_lora_weights.safetensors")
    name = next(name for name in tensors if name.endswith(".lora_B.weight"))
    tensors[name][0, 0] = torch.inf
    file = tiny_run.root / "lora.safetensors"
    save_file(tensors, file)
    assert tiny_run.train(f"lora.init_from={file}") == 2
    assert f"lora.init_from: {file}: " in caplog.text
    assert f"{name.removeprefix('transformer.')} holds NaN or infinity" in caplog.text
    assert "Loading the transformer" not in caplog.text


@pytest.mark.parametrize("content", [None, b"", b"<html>", b"\x08\0\0\0\0\0\0\0{}      "])
def test_what_is_no_lora_is_refused_in_one_line(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    file = tiny_run.root / "lora.safetensors"
    if content is not None:
        file.write_bytes(content)
    assert tiny_run.train(f"lora.init_from={file}") == 2
    assert "lora.init_from: " in caplog.text
    assert "Traceback" not in caplog.text
