"""A tiny pipeline, a folder of images and a config: everything that a run of a few seconds needs."""

import json
import os
import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from PIL import Image
from processes import Program

from diffsynth_lite.cli.train import main
from diffsynth_lite.data.video import write_video
from diffsynth_lite.run_folder.progress import StepResult
from diffsynth_lite.training import trainer
from diffsynth_lite.training.builder import TrainingObjects

REPOSITORY = Path(__file__).parents[2]
UNWATCHED = ("validation.prompts=[]", "validation.loss_items=0", "validation.item_losses=0")
LOG_LINE = re.compile(r"\d\d:\d\d:\d\d ")

SIZES = ((80, 48), (96, 48), (48, 80), (64, 64), (50, 96))
CLIPS = {  # name: width, height, frames, frames per second
    "long": (48, 32, 14, 16),
    "also long": (48, 32, 9, 16),
    "short": (48, 32, 6, 16),
    "also short": (48, 32, 8, 16),
    "fast": (48, 32, 20, 32),
    "upright": (32, 48, 12, 16),
    "also upright": (32, 48, 9, 16),
}

CONFIG = """
model:
  family: qwen_image
  path: {model}
  dtype: float32
  text_encoder_dtype: float32
lora:
  rank: 4
  alpha: 8
  dropout: 0.1
data:
  path: {data}
  width: 64
  height: 32
  cache_dir: {root}/cache
  num_workers: 0
train:
  steps: 6
  global_batch_size: 4
  micro_batch_size: 2
  learning_rate: 0.01
  mixed_precision: "no"
  cpu_threads: 1
validation:
  prompts: [a red circle, a blue square on a white background]
  num_inference_steps: 2
  guidance_scale: 2.0
  loss_items: 3
  item_losses: 2
logging:
  every_steps: 1
output:
  dir: {root}/run
  checkpoint_every_steps: 2
  lora_dtype: float32
"""


@dataclass(frozen=True)
class TinyRun:
    """Paths of a run, and the command that starts it in this process.

    ``settings`` are overrides that every command of the run gets.
    """

    root: Path
    config: Path
    settings: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        return "--config", str(self.config), *self.settings

    @property
    def folder(self) -> Path:
        return self.root / "run"

    def having(self, *settings: str) -> "TinyRun":
        """The run with further settings."""
        return replace(self, settings=(*self.settings, *settings))

    def train(self, *arguments: str) -> int:
        """The exit code of the training command."""
        return main([*self.arguments, *arguments])

    def stopped_after(self, steps: int, *arguments: str) -> int:
        """The exit code of a start of the run that is asked to stop after so many steps."""
        train_step, taken = trainer.train_step, count(1)

        def train_and_stop(built: TrainingObjects, step: int) -> StepResult:
            if next(taken) == steps:
                signal.raise_signal(signal.SIGTERM)
            return train_step(built, step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "train_step", train_and_stop)
            return self.train(*arguments)

    def status(self) -> dict[str, Any]:
        return json.loads((self.folder / "status.json").read_text())

    def metrics(self, folder: Path | None = None, *, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """The logged rows without what measures time and memory."""
        rows = [json.loads(line) for line in ((folder or self.folder) / name).read_text().splitlines()]
        measured = ("time", "samples_per_s", "peak_memory_gib", "step_seconds")
        return [
            {name: value for name, value in row.items() if name.partition("/")[0] not in measured}
            for row in rows
        ]


def forked(
    run: TinyRun, *arguments: str, script: Sequence[str | Path] = ("train.py",), num_processes: int = 1
) -> Program:
    """The training command in forked processes.

    Args:
        run: what it trains.
        arguments: further ones of the command.
        script: that wraps the command, and the arguments of its own.
        num_processes: which train together.
    """
    path, *first = script
    log = run.root / f"printed {len(list(run.root.glob('printed *')))}"
    command = [*map(str, first), *run.arguments, *arguments]
    return Program(REPOSITORY / path, command, log, num_processes=num_processes)


def dropping(run: TinyRun, monkeypatch: pytest.MonkeyPatch, **files: int) -> None:
    """Put each file into the run folder while its step is taken."""
    train_step = trainer.train_step

    def drop_and_train(built: TrainingObjects, step: int) -> StepResult:
        for name, at in files.items():
            if step == at:
                (run.folder / name).touch()
        return train_step(built, step)

    monkeypatch.setattr(trainer, "train_step", drop_and_train)


def make_run(root: Path, model: Path) -> TinyRun:
    """Images with captions, and a config for them."""
    data = root / "data"
    data.mkdir(parents=True)
    for place in range(5):
        tiny_image(80 + place, 48, 10 + place).save(data / f"{place}.png")
        (data / f"{place}.txt").write_text("a red circle" + " on a white background" * (place % 2))
    return TinyRun(root=root, config=write_config(root, model, data))


def copy_run(run: TinyRun, root: Path) -> TinyRun:
    """The run with all that it has done, and with data and cache of its own."""
    shutil.copytree(run.root, root, dirs_exist_ok=True)
    config = root / run.config.name
    config.write_text(config.read_text().replace(str(run.root), str(root)))
    settings = tuple(setting.replace(str(run.root), str(root)) for setting in run.settings)
    return replace(run, root=root, config=config, settings=settings)


def make_mixed_run(root: Path, model: Path) -> TinyRun:
    """Images of many shapes in three sources, one of them with masks; all that is drawn by chance is on."""
    roots = [root / name for name in ("photos", "drawings", "masked")]
    for number, folder in enumerate(roots):
        folder.mkdir(parents=True)
        for place, size in enumerate(SIZES[: 5 - number]):
            tiny_image(*size, 5 + 10 * number + place).save(folder / f"{place}.png")
            (folder / f"{place}.txt").write_text("a red circle, large, on white, alone"[: 12 + 9 * place])
    (root / "masks").mkdir()
    for place, size in enumerate(SIZES[:3]):
        Image.radial_gradient("L").resize(size).save(root / "masks" / f"{place}.png")
    photos, drawings, masked = roots
    sources = (
        f"{{path: {photos}, repeats: 2, trigger: ohwx}}",
        f"{{path: {drawings}, weight: 0.5}}",
        f"{{path: {masked}, mask_dir: {root / 'masks'}}}",
    )
    return TinyRun(
        root=root,
        config=write_config(root, model, photos),
        settings=(
            *("data.path=null", f"data.sources=[{', '.join(sources)}]"),
            *("data.width=null", "data.height=null", "data.resolutions=[32, 48]", "data.crop=random"),
            *("data.crops_per_item=2", "data.tag_shuffles=2", "data.keep_tags=1", "data.caption_dropout=0.3"),
            *UNWATCHED,
        ),
    )


def make_clip_run(root: Path, model: Path) -> TinyRun:
    """Clips of several lengths, shapes and speeds, for a pipeline of the family wan."""
    data = root / "clips"
    for place, (name, (width, height, num_frames, fps)) in enumerate(CLIPS.items()):
        frames = [tiny_image(width, height, 5 + place + frame) for frame in range(num_frames)]
        write_video(data / f"{name}.mp4", frames, fps=fps)
        (data / f"{name}.txt").write_text("a red circle" + " that moves" * (place % 2))
    return TinyRun(
        root=root,
        config=write_config(root, model, data),
        settings=(
            *("model.family=wan", "data.width=null", "data.height=null", "data.resolutions=[40]"),
            *("data.frame_counts=[5, 9]", "data.fps=16", "train.steps=4"),
            *("validation.width=32", "validation.height=32", "train.use_gradient_checkpointing_offload=true"),
        ),
    )


def write_config(root: Path, model: Path, data: Path) -> Path:
    """The config of a run in ``root``."""
    config = root / "tiny.yaml"
    config.write_text(CONFIG.format(model=model, data=data, root=root))
    return config


def tiny_image(width: int, height: int, detail: int) -> Image.Image:
    """An image that differs with ``detail``."""
    return Image.effect_mandelbrot((width, height), (-2, -1, 1, 1), detail).convert("RGB")


def garble_media(folder: Path) -> None:
    """Other bytes in all images and clips, of the same size and time: to read one again is an error."""
    media = [path for path in folder.rglob("*") if path.suffix in (".png", ".mp4")]
    assert media
    for path in media:
        state = path.stat()
        path.write_bytes(b"x" * state.st_size)
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def checkpoint_tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Adapter and optimizer state of one checkpoint, by file and name."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    return {
        f"{file.stem}/{name}": tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in safetensors.torch.load_file(file).items()
    }


def checkpoint_part(folder: Path, step: int, part: str = "adapter") -> dict[str, torch.Tensor]:
    """The tensors of one file of a checkpoint."""
    tensors = checkpoint_tensors(folder, step).items()
    return {name.removeprefix(f"{part}/"): tensor for name, tensor in tensors if name.startswith(f"{part}/")}


def lora_metadata_of(folder: Path, file: str = "pytorch_lora_weights.safetensors") -> dict[str, str]:
    """What the header of a LoRA file says."""
    with safetensors.safe_open(folder / file, framework="pt") as opened:
        return opened.metadata()


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> Sequence[str]:
    """Names of the tensors that are not the same bit for bit."""
    names = first.keys() | second.keys()
    return [
        name
        for name in names
        if name not in first or name not in second or not torch.equal(first[name], second[name])
    ]
