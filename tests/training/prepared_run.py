"""A tiny pipeline with encoded images, and a config in which no two settings are the same."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.core.gradient import BlockCompiler
from diffsynth_lite.core.weights.stream import WeightStream
from diffsynth_lite.pipelines.qwen_image import tiny
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.training.builder import TrainingObjects, build_run, build_transformer
from diffsynth_lite.training.checks import CheckedRun, check_run
from diffsynth_lite.training.encoding.run_encoding import TrainingData, encode_previews, encode_run
from diffsynth_lite.training.layer_groups import layer_groups
from diffsynth_lite.training.optimization.optimizers import build_optimizer

NUM_IMAGES = 5
CPU = torch.device("cpu")
PROCESS = SimpleNamespace(
    device=CPU,
    num_processes=1,
    process_index=0,
    is_main_process=True,
    prepare_model=lambda model, evaluation_mode: model,
)

SETTINGS = {
    "model.dtype": "float32",
    "model.text_encoder_dtype": "float32",
    "model.vae_dtype": "float32",
    "lora.rank": "4",
    "lora.alpha": "6.0",
    "lora.dropout": "0.125",
    "data.width": "64",
    "data.height": "32",
    "data.repeats": "3",
    "data.num_workers": "0",
    "objective.timestep_density": "logit_normal",
    "objective.logit_mean": "0.25",
    "objective.logit_std": "1.5",
    "objective.shift": "static",
    "objective.shift_value": "3.5",
    "objective.sigma_min": "0.125",
    "objective.sigma_max": "0.875",
    "objective.loss_weighting": "bell",
    "train.steps": "7",
    "train.seed": "11",
    "train.global_batch_size": "6",
    "train.micro_batch_size": "2",
    "train.learning_rate": "0.02",
    "train.lr_scheduler": "linear",
    "train.warmup_steps": "2",
    "train.adam_beta1": "0.8",
    "train.adam_beta2": "0.95",
    "train.adam_epsilon": "1e-6",
    "train.weight_decay": "0.03",
    "train.max_grad_norm": "0.7",
    "train.mixed_precision": "no",
    "train.use_gradient_checkpointing": "true",
    "train.use_gradient_checkpointing_offload": "true",
    "validation.prompts": "[a red circle, a blue square on a white background]",
    "validation.negative_prompt": "a very blurred image of nothing at all",
    "validation.num_inference_steps": "9",
    "validation.guidance_scale": "2.5",
    "validation.seed": "13",
    "validation.width": "80",
    "validation.height": "48",
    "validation.loss_items": "4",
    "validation.item_losses": "3",
}
"""Numbers are distinct and no defaults, so that two that are swapped, or one that is lost, are seen."""


@dataclass(frozen=True)
class Prepared:
    """What the settings of this file leave as it is: made once."""

    root: Path
    checked: CheckedRun
    encoded: TrainingData
    transformer: torch.nn.Module

    def config(self, changes: dict[str, str] | None = None) -> Config:
        return load_config_of(self.root, changes)

    def build(self, changes: dict[str, str] | None = None, **objects: Any) -> TrainingObjects:
        config, encoded = self.config(changes), self.encoded
        if any(name.startswith("validation.") for name in changes or {}):
            requests = encode_previews(config, self.checked.preview_family, PROCESS)
            encoded = replace(encoded, previews=requests)
        groups = layer_groups(config, self.checked.family, self.checked.target_layers)
        given = {
            "checked": self.checked,
            "encoded": encoded,
            "accelerator": PROCESS,
            "transformer": self.transformer,
            "weights": WeightStream([], CPU),
            "compiler": BlockCompiler([]),
            "optimizer": build_optimizer(config, self.transformer, groups),
            "averaged": None,
            "start_step": 0,
            "folder": RunFolder(self.root / "run"),
        }
        return build_run(config, **(given | objects))


def load_config_of(root: Path, changes: dict[str, str] | None = None) -> Config:
    overrides = [f"{key}={value}" for key, value in (SETTINGS | (changes or {})).items()]
    return load_config(root / "run.yaml", overrides).config


def prepare(root: Path) -> Prepared:
    """Save a tiny pipeline and a few images, and encode them."""
    tiny().save_pretrained(root / "model")
    (root / "data").mkdir()
    for place in range(NUM_IMAGES):
        image = Image.effect_mandelbrot((80 + place, 48), (-2, -1, 1, 1), 10 + place).convert("RGB")
        image.save(root / "data" / f"{place}.png")
        (root / "data" / f"{place}.txt").write_text("a red circle")
    (root / "run.yaml").write_text(
        f"model: {{family: qwen_image, path: {root}/model}}\n"
        f"data: {{path: {root}/data, cache_dir: {root}/cache}}\noutput: {{dir: {root}/run}}\n"
    )
    config = load_config_of(root)
    checked = check_run(config, PROCESS)
    return Prepared(
        root=root,
        checked=checked,
        encoded=encode_run(config, checked, PROCESS),
        transformer=build_transformer(config, checked),
    )
