"""Whole runs on a CUDA device."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from family_cases import FamilyCase, cases_of, make_case
from family_sample import families_to_test, small_edit_inputs
from tiny_run import TinyRun, checkpoint_tensors, differing

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _use_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Train each family."""
    if "case" in metafunc.fixturenames:
        cases = cases_of(families_to_test(metafunc.config))
        metafunc.parametrize("case", cases.values(), ids=cases.keys())


@pytest.fixture
def _small_inputs() -> Iterator[None]:
    with small_edit_inputs():
        yield


def losses(run: TinyRun, folder: str, *arguments: str) -> list[float]:
    assert run.train(f"output.dir={run.root / folder}", "lora.dropout=0", *arguments) == 0
    return [row["loss"] for row in run.metrics(run.root / folder) if "loss" in row]


def test_offload_uses_host_memory_and_changes_no_loss_beyond_rounding(tiny_run: TinyRun) -> None:
    plain = losses(tiny_run, "plain", "--no-use_gradient_checkpointing")
    offloaded = losses(tiny_run, "offloaded", "--use_gradient_checkpointing_offload", "memory.min_bytes=0")
    # Kernels with atomics sum in any order.
    assert offloaded == pytest.approx(plain, rel=1e-4)
    report = next(row for row in tiny_run.metrics(tiny_run.root / "offloaded") if "bytes_offloaded" in row)
    assert report["bytes_offloaded"] > 0


def test_a_run_resumes_on_the_gpu_with_the_same_samples_and_noise(tiny_run: TinyRun) -> None:
    whole = losses(tiny_run, "whole")
    losses(tiny_run, "parts", "train.steps=4")
    assert losses(tiny_run, "parts") == pytest.approx(whole, rel=1e-4)
    names = [set(checkpoint_tensors(tiny_run.root / folder, 6)) for folder in ("whole", "parts")]
    assert names[0] == names[1]


REPEATABLE = ("train.deterministic=true", "model.dtype=bfloat16", "train.mixed_precision=bf16")
STREAMED = ("memory.stream_blocks=all", "memory.stream_slots=1", "memory.min_bytes=0")


@pytest.mark.parametrize(
    "second_half",
    [
        (),
        ("--use_gradient_checkpointing_offload", "memory.min_bytes=0"),
        ("--no-use_gradient_checkpointing",),
        STREAMED,
    ],
)
def test_repeatable_kernels_make_a_resumed_run_the_same_bit_for_bit(
    tiny_run: TinyRun, second_half: tuple[str, ...]
) -> None:
    whole = losses(tiny_run, "whole", *REPEATABLE)
    losses(tiny_run, "parts", *REPEATABLE, "train.steps=4")
    assert losses(tiny_run, "parts", *REPEATABLE, *second_half) == whole
    tensors = [checkpoint_tensors(tiny_run.root / folder, 6) for folder in ("whole", "parts")]
    assert differing(*tensors) == []


def test_a_streamed_text_encoder_encodes_the_same_bit_for_bit(tiny_run: TinyRun) -> None:
    streamed = ("memory.stream_text_encoder=true", "memory.stream_slots=1", "memory.min_bytes=0")
    entries = {}
    for name, settings in (("resident", ()), ("streamed", streamed)):
        cache = tiny_run.root / f"cache of {name}"
        losses(tiny_run, name, "train.steps=1", f"data.cache_dir={cache}", *settings)
        entries[name] = {file.name: file.read_bytes() for file in cache.rglob("*.safetensors")}
    assert entries["resident"] == entries["streamed"] != {}


@pytest.mark.parametrize("quantize", ["int8", "nf4"])
def test_streamed_weights_of_a_quantised_base_change_no_bit(tiny_run: TinyRun, quantize: str) -> None:
    if quantize == "nf4":
        pytest.importorskip("bitsandbytes")
    settings = (*REPEATABLE, f"model.quantize={quantize}")
    assert losses(tiny_run, "streamed", *settings, *STREAMED) == losses(tiny_run, "resident", *settings)
    tensors = [checkpoint_tensors(tiny_run.root / folder, 6) for folder in ("streamed", "resident")]
    assert differing(*tensors) == []


@pytest.mark.parametrize("min_bytes", [0, 4096])
def test_weights_that_are_loaded_straight_to_host_memory_are_those_of_the_device(
    tiny_run: TinyRun, min_bytes: int
) -> None:
    # Quantised on the device, whether they stay there or not. With 4096 most scales stay.
    settings = ("train.deterministic=true", "model.quantize=int8", "model.dtype=bfloat16")
    settings += ("train.mixed_precision=bf16", "train.steps=2")
    streamed = ("memory.stream_blocks=all", "memory.stream_slots=1", f"memory.min_bytes={min_bytes}")
    assert losses(tiny_run, "streamed", *settings, *streamed) == losses(tiny_run, "resident", *settings)
    tensors = [checkpoint_tensors(tiny_run.root / folder, 2) for folder in ("streamed", "resident")]
    assert differing(*tensors) == []


def test_bf16_trains_with_fp32_adapter_and_finite_loss(tiny_run: TinyRun) -> None:
    values = losses(tiny_run, "bf16", "model.dtype=bfloat16", "train.mixed_precision=bf16")
    assert len(values) == 6


@pytest.mark.usefixtures("_small_inputs")
def test_every_family_trains_in_bf16_with_offload_and_previews(case: FamilyCase, tmp_path: Path) -> None:
    run, _ = make_case(case, tmp_path)
    values = losses(run, "run", "model.dtype=bfloat16", "train.mixed_precision=bf16")
    assert values
    assert all(map(math.isfinite, values))
    assert (run.root / "run" / "previews" / "grid.png").is_file()
