"""R7: the checkpoints of each released schema that this repository keeps still load and continue alike."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_run import REPOSITORY, tiny_image

from diffsynth_lite.lora import adapter_tensors, add_adapter
from diffsynth_lite.pipelines.qwen_image import QwenImage, tiny
from diffsynth_lite.training.checkpoint.manifest import read_checkpoint
from diffsynth_lite.training.optimization.averages import MovingAverage
from diffsynth_lite.training.optimization.optimizer_state import optimizer_tensors
from diffsynth_lite.training.saver import restore
from faults.bench import Bench, Run, fault

GOLDEN = REPOSITORY / "tests" / "training" / "golden"
STEP = 3
STEPS = 6
WEIGHTS = "the tiny pipeline that this schema was kept with"
"""In place of the fingerprint of its files, which changes with the libraries that write them."""

MAX_LOSS_DIFFERENCE = 1e-3
"""Relative. Other processors and other versions of torch add in another order."""

CONFIG = """
model: {family: qwen_image, path: model, dtype: float32, text_encoder_dtype: float32, vae_dtype: float32}
lora: {rank: 1, alpha: 2, dropout: 0.1, target_modules: [to_q, to_out.0]}
data: {path: data, width: 32, height: 32, cache_dir: cache, num_workers: 0, caption_dropout: 0.2}
train:
  steps: 6
  global_batch_size: 2
  micro_batch_size: 1
  learning_rate: 0.01
  lr_scheduler: cosine
  warmup_steps: 2
  ema_decay: 0.6
  mixed_precision: "no"
  cpu_threads: 1
validation: {loss_items: 0, item_losses: 0}
logging: {every_steps: 1}
output: {dir: run, checkpoint_every_steps: 100}
"""


@fault("R7", "loads; tensors exact, next losses those stored")
def load_golden_checkpoints(bench: Bench) -> str:
    """The checkpoint of each released schema, kept in tests/training/golden."""
    schemas = sorted(GOLDEN.iterdir())
    assert schemas, f"no golden checkpoint in {GOLDEN}"
    worst = max(continue_golden(schema, bench.root / schema.name) for schema in schemas)
    return f"{len(schemas)} schema, next losses within {worst:.1e} of those stored"


def continue_golden(schema: Path, root: Path) -> float:
    """Load and continue a golden checkpoint; returns the largest relative difference of its next losses.

    Raises:
        AssertionError: it gives other tensors, or losses further away.
    """
    expected = json.loads((schema / "expected.json").read_text())
    source = schema / f"step-{STEP:08d}"
    assert _restored(root, source) == expected["tensors"]
    with _in(root) as run:
        # The same libraries make the same data. Others may write other bytes into the PNG files and those of
        # the tiny pipeline, and the fingerprint also names the version of Pillow that decodes the images.
        run.finish(root / "run", "--resume", str(source), "resume.allow=[data]")
        found = [row["loss"] for row in run.losses(root / "run")]
    assert len(found) == len(expected["losses"]) == STEPS - STEP
    worst = max(abs(new - old) / old for new, old in zip(found, expected["losses"], strict=True))
    assert worst <= MAX_LOSS_DIFFERENCE, (found, expected["losses"])
    return worst


def make_golden(root: Path) -> Path:
    """Make the golden checkpoint of the present schema again, and return its folder."""
    with _in(root) as run:
        run.stop_after(STEP, Path("run"))
        (made,) = (root / "run" / "checkpoints").glob("step-*")
        schema = GOLDEN / f"schema-{json.loads((made / 'COMPLETE').read_text().splitlines()[0])['schema']}"
        if schema.exists():
            shutil.rmtree(schema)
        shutil.copytree(made, schema / made.name)
        run.finish(Path("run"))
        rest = [row["loss"] for row in run.losses(root / "run", after=STEP)]
    expected = {"tensors": _restored(root, schema / made.name), "losses": rest}
    (schema / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    return schema


@contextlib.contextmanager
def _in(root: Path) -> Iterator[Run]:
    """A run in a folder with its pipeline and data; the checkpoint then names no path of this machine."""
    root.mkdir(exist_ok=True)
    with contextlib.chdir(root), pytest.MonkeyPatch.context() as patch:
        if not Path("model").exists():
            tiny().save_pretrained("model")
            Path("data").mkdir()
            for place in range(4):
                tiny_image(40 + place, 40, 10 + place).save(f"data/{place}.png")
                Path(f"data/{place}.txt").write_text("a red circle")
            Path("tiny.yaml").write_text(CONFIG)
        patch.setattr(QwenImage, "fingerprint", lambda _: WEIGHTS)
        yield Run(root=root, config=Path("tiny.yaml"))


def _restored(root: Path, source: Path) -> dict[str, Any]:
    """Digests of the adapter, the moments and the average that a checkpoint gives to a model."""
    checkpoint = read_checkpoint(source)
    model = tiny().transformer
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.endswith((".to_q", ".to_out.0"))
    ]
    add_adapter(model, layers, rank=1, alpha=2, dropout=0.1, seed=1)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    averaged = MovingAverage(model, decay=0.6)
    restore(checkpoint, model, optimizer, averaged, accelerator=SimpleNamespace(num_processes=1))
    groups = {
        "adapter": adapter_tensors(model),
        "optimizer": optimizer_tensors(optimizer, dict(model.named_parameters()))[0],
        "ema": averaged.tensors(),
    }
    return {"step": checkpoint.step, "ema_updates": averaged.num_updates} | {
        f"{group}/{name}": hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]
        for group, tensors in groups.items()
        for name, tensor in sorted(tensors.items())
    }
