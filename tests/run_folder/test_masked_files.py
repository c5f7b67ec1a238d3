"""What the trainer writes about a run has the secrets masked that came with its settings and its data."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch
from PIL import Image

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.files import write_json
from diffsynth_lite.lora.updates import pairs_of
from diffsynth_lite.pipelines import PipelineFolder, PreviewRequest
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.redaction import Redactor, in_force
from diffsynth_lite.run_folder.metrics import start_trackers
from diffsynth_lite.training.checkpoint.resume import require_same, settings_fingerprint
from diffsynth_lite.training.encoding.dataset import Quarantine
from diffsynth_lite.training.lora_file import export_lora
from diffsynth_lite.training.previews import PictureSource, Previews

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{family: qwen_image, path: m}}\ndata: {{path: d, trigger: {TOKEN}}}\n"
        f"output: {{dir: {tmp_path}/run}}\n"
    )
    return load_config(path).config


def test_the_contract_is_masked_and_still_agrees_with_itself(config: Config) -> None:
    fingerprint = settings_fingerprint(config, model_fingerprint="f")
    assert fingerprint["data.trigger"] == ["REDACTED"]
    saved = json.loads(json.dumps(fingerprint))
    assert require_same(settings_fingerprint(config, model_fingerprint="f"), saved, where="here") == []


def test_a_json_file_is_masked(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"message": [f"with {TOKEN}"], "step": 12})
    assert json.loads((tmp_path / "a.json").read_text()) == {"message": ["with REDACTED"], "step": 12}


def test_the_list_of_bad_items_is_masked(config: Config, tmp_path: Path) -> None:
    quarantine = Quarantine(config)
    quarantine.add_rows([("0.png", f"https://ann:{TOKEN}@example.org/ is no picture")])
    quarantine.write()
    row = json.loads((tmp_path / "run" / "quarantine.jsonl").read_text())
    assert row == {"item": "0.png", "reason": "https://REDACTED@example.org/ is no picture"}


def test_the_metadata_of_a_lora_are_masked_but_never_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    family = QwenImage(PipelineFolder(path=tmp_path))
    layer = "transformer_blocks.0.attn.to_q"
    tensors = {f"{layer}.lora_A.weight": torch.ones(2, 4), f"{layer}.lora_B.weight": torch.ones(3, 2)}
    settings = {
        "r": 2,
        "lora_alpha": 2,
        "target_modules": [layer],
        "base_model_name_or_path": f"https://{TOKEN}@example.org/model",
    }
    monkeypatch.setattr(family, "loaded_lora", lambda _: pairs_of(tensors, settings))
    # The value of a secret variable, and the name of a layer.
    with in_force(Redactor({"KEY": "transformer_blocks"})):
        (file,) = export_lora(family, tmp_path / "lora", tensors, settings, lambda _: {}).files
    with safetensors.safe_open(file, "pt") as opened:
        metadata = str(opened.metadata())
    assert "https://REDACTED@example.org/model" in metadata
    assert layer in metadata
    assert TOKEN.encode() not in file.read_bytes()


def test_the_labels_of_the_preview_grid_and_what_stands_in_previews_are_masked(tmp_path: Path) -> None:
    def draw(prompt: str, folder: Path) -> bytes:
        family = SimpleNamespace(
            sample=lambda *_args: [[Image.new("RGB", (64, 32), "red")]], shards=None, context=None
        )
        request = PreviewRequest(
            conditioning={},
            negative={},
            width=64,
            height=32,
            num_inference_steps=1,
            guidance_scale=1.0,
            seed=0,
        )
        previews = Previews(
            family=family,
            folder=folder,
            prompts=[prompt],
            negative_prompt="",
            requests=[request],
            source=PictureSource(model="tiny", sampler="Euler", fps=None),
            vae_dtype=torch.float32,
        )
        grid = previews.draw(torch.nn.Linear(1, 1), 0)
        assert grid is not None
        (preview,) = folder.glob("step-*.png")
        return grid.read_bytes() + preview.read_bytes()

    assert draw(TOKEN, tmp_path / "a") == draw("REDACTED", tmp_path / "b") != draw("else", tmp_path / "c")


def test_what_the_trackers_get_is_masked_and_wandb_takes_no_more(tmp_path: Path) -> None:
    given: dict[str, Any] = {}
    accelerator = SimpleNamespace(
        init_trackers=lambda project, config, init_kwargs: given.update(
            project=project, config=config, **init_kwargs["wandb"]
        )
    )
    start_trackers(
        accelerator,
        names=["wandb"],
        project=f"p {TOKEN}",
        settings={"validation": {"prompts": [TOKEN]}, "train": {"steps": 3}},
        folder=tmp_path,
        run_name=f"r {TOKEN}",
        run_id="id",
        wandb_mode="offline",
    )
    assert (given["project"], given["name"]) == ("p REDACTED", "r REDACTED")
    assert given["config"] == {"validation.prompts": "['REDACTED']", "train.steps": 3}
    settings = given["settings"]
    assert (settings.console, settings.x_disable_meta) == ("off", True)
    assert (settings.disable_git, settings.disable_code) == (True, True)
