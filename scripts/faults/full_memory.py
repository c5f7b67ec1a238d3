"""H3: memory that runs out, and what the answer to it says and promises."""

import dataclasses
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from diffusers import QwenImageTransformer2DModel
from tiny_run import checkpoint_tensors, make_run

from diffsynth_lite.core.planning.meters import CountingMeter
from diffsynth_lite.core.transfer.backends import PlainBackend
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.pipelines.qwen_image import QwenImage, tiny
from diffsynth_lite.run_folder.progress import StepResult
from diffsynth_lite.training import trainer
from diffsynth_lite.training.builder import TrainingObjects
from diffsynth_lite.training.shortages import MemoryUse
from faults.bench import PLAIN, Bench, Run, assert_ended, assert_same, at_call, fault

NUM_BLOCKS = 6
"""More than are on the device at once where blocks are offloaded."""
WIDTH, HEIGHT = 256, 256
"""Activations are most of what a step holds, as in real ones."""
MIN_KEPT_PROMISE = 0.8
"""Of an estimate, which says "about": a tiny model's other working memory does not shrink."""

Place = tuple[type, str, int]
PLACES: dict[str, Place] = {
    "forward": (QwenImage, "predict", 3),
    "backward": (Accelerator, "backward", 3),
    "optimizer": (torch.optim.AdamW, "step", 2),
}
SITUATIONS: dict[str, tuple[str, ...]] = {
    "forward": (),
    "backward": ("train.use_gradient_checkpointing=false",),
    "optimizer": (
        *("model.dtype=bfloat16", "train.micro_batch_size=1"),
        *("memory.policy=every_n", "memory.policy_n=2"),
    ),
}
APPLIED = {
    "--use_gradient_checkpointing": ("train.use_gradient_checkpointing=true",),
    "--use_gradient_checkpointing_offload": ("--use_gradient_checkpointing_offload",),
    "train.micro_batch_size: 1": ("train.micro_batch_size=1",),
    "half of the pixels or frames (data.resolutions, data.sizes, data.frame_counts)": (
        f"data.height={HEIGHT // 2}",
    ),
    "model.dtype: bfloat16": ("model.dtype=bfloat16",),
    "memory.stream_blocks: all": ("memory.stream_blocks=all",),
    "model.quantize: int8, in a new run": ("model.quantize=int8",),
    "memory.policy: all": ("memory.policy=all", "memory.policy_n=null"),
}
"""What a person does who reads the answer."""
_ANSWER = re.compile(
    r"out of memory: CUDA out of memory\. Tried to allocate 2\.00 GiB\. "
    r"In use: (?P<weights>.*) of frozen weights, (?P<trained>.*) of the LoRA and its optimizer, "
    r"(?P<rest>.*) of activations and the rest, at the peak\. What helps most: (?P<levers>.*)\. "
    r"A step is estimated to take .* of the device; .*"
)
_LEVER = re.compile(r"(?P<setting>.*) \(about (?P<size>[0-9.e+]+) (?P<unit>KiB|MiB|GiB) less\)")


_MEASURED_STEP = 3
"""The moments are there, and the engine knows what blocks share."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of a step: of frozen weights, of what is trained with its moments, and at most next to them."""

    weights: int
    trained: int
    step: int

    @property
    def total(self) -> int:
        """What a device would need."""
        return self.weights + self.trained + self.step


@fault(
    "H3",
    "exit 3 and continued bit for bit; what the answer says is so, and what it names helps; previews "
    "are skipped",
)
def run_out_of_memory(bench: Bench) -> str:
    """Out of memory in forward, backward, optimizer and a preview."""
    pipeline = tiny()
    config = {**pipeline.transformer.config, "num_layers": NUM_BLOCKS}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline.register_modules(transformer=QwenImageTransformer2DModel.from_config(config))
    pipeline.save_pretrained(bench.root / "model")
    run = Run.of(make_run(bench.root / "run", bench.root / "model"), *PLAIN[1:], "train.steps=4")
    kept = [_stop_in_a_step(run, name) for name in bench.pick(("forward",), tuple(PLACES), tuple(PLACES))]
    promises = [promise for promises in kept for promise in promises]
    _skip_a_preview(run)
    return (
        f"{len(kept)} places, {len(promises)} settings, each of which lowers what a step holds by "
        f"{min(promises):.2f} to {max(promises):.2f} of its estimate; 1 preview"
    )


def _stop_in_a_step(run: Run, name: str) -> list[float]:
    """How much of what each setting of the answer promises it saves, as a part."""
    size = ("data.upscale=true", f"data.width={WIDTH}", f"data.height={HEIGHT}")
    run = run.having(*PLAIN, *size, "lora.rank=1", "lora.alpha=1", *SITUATIONS[name])
    whole, folder = run.finish(f"{name}, whole"), run.root / name
    held = held_by(run, f"{name}, held")
    with device_that_counts(held), at_call(*PLACES[name], _run_out):
        assert run.exit_code(folder) == 3, name
    message = assert_ended(folder, "stopped", 3)["message"]
    assert_same(whole, run.finish(folder), 4)
    promised = _promises_of(message, held, checkpoint_tensors(whole, 4))
    kept = []
    for setting, num_bytes in promised.items():
        # With the estimate that goes with it, in the settings that the run had, the later ones win.
        less = held_by(run, f"{name}, {APPLIED[setting][0].strip('-')}", *APPLIED[setting])
        kept.append((held.total - less.total) / num_bytes)
        assert kept[-1] >= MIN_KEPT_PROMISE, f"{name}: {setting} saves {kept[-1]:.2f} of its estimate"
    return kept


def _promises_of(message: str, held: Held, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Bytes that each setting of an answer promises, whose other figures must be right."""
    answer = _ANSWER.fullmatch(message)
    assert answer, message
    adapter, moments = (
        sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith(f"{file}/"))
        for file in ("adapter", "optimizer")
    )
    trained = 2 * adapter + moments  # each has a gradient
    sizes = {"weights": held.weights, "trained": trained, "rest": held.total - held.weights - trained}
    for what, num_bytes in sizes.items():
        assert answer[what] == f"about {format_bytes(num_bytes)}", (what, num_bytes, message)
    levers = [_LEVER.fullmatch(text) for text in answer["levers"].split("; ")]
    assert len(levers) in (2, 3), message
    assert all(levers), message
    return {
        lever["setting"]: int(
            float(lever["size"]) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[lever["unit"]]
        )
        for lever in levers
        if lever
    }


def _skip_a_preview(run: Run) -> None:
    """The run continues, and says what failed and what would help."""
    run = run.having("validation.every_steps=2")
    whole, folder = run.finish("whole"), run.root / "preview"
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("diffsynth_lite.training.previews")
    logger.addHandler(handler)
    try:
        with at_call(QwenImage, "sample", 2, _run_out):
            run.finish(folder)
    finally:
        logger.removeHandler(handler)
    assert_same(whole, folder, 4)
    assert len(warned) == 1, warned
    assert "step 2 failed, out of memory: CUDA out of memory" in warned[0]
    assert "validation.width" in warned[0]
    previews = [sorted(path.name for path in Path(place / "previews").iterdir()) for place in (whole, folder)]
    assert set(previews[0]) - set(previews[1]) == {
        name for name in previews[0] if name.startswith("step-00000002")
    }


def _run_out(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def held_by(run: Run, folder: str, *settings: str) -> Held:
    """Train a few steps, and count what the last of them held on its device."""
    found: list[Held] = []
    train_step = trainer.train_step

    def measured(built: TrainingObjects, step: int) -> StepResult:
        if step < _MEASURED_STEP:
            return train_step(built, step)
        parameters = list(built.transformer.parameters())
        state = [value for entry in built.optimizer.state.values() for value in entry.values()]
        meter = CountingMeter()
        with pytest.MonkeyPatch.context() as patch, meter:
            patch.setattr(PlainBackend, "allocate_host", _not_counted(meter))
            meter.start()
            result = train_step(built, step)
        held = Held(
            weights=_num_bytes(tensor for tensor in parameters if not tensor.requires_grad)
            + built.weights.slot_bytes,
            trained=_num_bytes(tensor for tensor in parameters if tensor.requires_grad) + _num_bytes(state),
            step=meter.peak_bytes,
        )
        found.append(held)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", measured)
        run.finish(folder, f"train.steps={_MEASURED_STEP}", *settings)
    return found[0]


def _not_counted(meter: CountingMeter) -> Any:
    allocate = PlainBackend.allocate_host

    def allocate_host(self: PlainBackend, num_bytes: int, descriptor: int = -1) -> torch.Tensor | None:
        buffer = allocate(self, num_bytes, descriptor)
        if buffer is not None:
            meter.ignore(buffer)
        return buffer

    return allocate_host


@contextmanager
def device_that_counts(held: Held) -> Iterator[None]:
    """Scope in which the answer to a full device knows its peak, as on a device that counts it."""
    use_of = MemoryUse.of

    def counted(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **slots: int) -> MemoryUse:
        return dataclasses.replace(use_of(model, optimizer, **slots), peak=held.total)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryUse, "of", staticmethod(counted))
        yield


def _num_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)
