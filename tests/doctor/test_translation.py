"""Configs of other trainers, small ones, and what they are here."""

from pathlib import Path
from typing import Any

import pytest

from diffsynth_lite.cli.main import main
from diffsynth_lite.config import load_config
from diffsynth_lite.doctor import model_choice
from diffsynth_lite.doctor.translation import translation_of

AI_TOOLKIT = """
job: extension
config:
  name: mine
  process:
    - type: sd_trainer
      training_folder: output
      trigger_word: ohwx
      network: {type: lora, linear: 16, linear_alpha: 8}
      save: {save_every: 250, dtype: float16}
      datasets:
        - {folder_path: photos, resolution: [512, 768], caption_dropout_rate: 0.05, shuffle_tokens: false}
        - {folder_path: photos, resolution: [768, 1024]}
        - {folder_path: more}
      train: {batch_size: 2, gradient_accumulation: 3, steps: 900, lr: 1e-4, optimizer: AdamW8bit}
      model: {name_or_path: Qwen/Qwen-Image, arch: qwen_image}
      sample: {sample_every: 100, seed: 7, sample_steps: 20, samples: [{prompt: "a [trigger]"}, {prompt: b}]}
"""
AI_TOOLKIT_EDIT = AI_TOOLKIT.replace("        - {folder_path: more}\n", "").replace(
    "arch: qwen_image", "arch: krea2, model_kwargs: {edit: true}"
)
KOHYA = """
[model]
pretrained_model_name_or_path = "checkpoints/sd_xl_base_1.0.safetensors"
[network]
network_module = "networks.lora"
network_dim = 32
[training]
dataset_config = "self.toml"
train_data_dir = "img"
resolution = "1024,1024"
learning_rate = 1e-4
unet_lr = 1
optimizer_type = "Prodigy"
lr_scheduler = "constant_with_warmup"
lr_warmup_steps = 50
max_train_steps = 1600
train_batch_size = 4
save_every_n_steps = 400
output_dir = "out"
output_name = "person"
seed = 42
mixed_precision = "fp16"
max_train_epochs = 10
sample_prompts = "prompts.txt"
wandb_api_key = "0123456789abcdef"
keep_tokens = 2
reg_data_dir = "C:/reg"
"""
KOHYA_FLUX = """
pretrained_model_name_or_path = "flux1-dev.safetensors"
dataset_config = "data.toml"
network_module = "networks.lora_flux"
"""
MUSUBI = """
dit = "qwen_image_bf16.safetensors"
dataset_config = "data.toml"
network_module = "networks.lora_qwen_image"
network_dim = 16
network_alpha = 16
timestep_sampling = "shift"
"""
MUSUBI_DATA = """
[general]
resolution = [960, 544]
batch_size = 1
[[datasets]]
image_directory = "images"
num_repeats = 2
"""
ONE_TRAINER = """
{"training_method": "LORA", "model_type": "FLUX_DEV_1", "base_model_name": "black-forest-labs/FLUX.1-dev",
 "concepts": [{"path": "cats", "name": "x", "seed": 9},
 {"path": "dogs", "enabled": false}, {"path": "pets", "type": "PRIOR_PREDICTION"}],
 "text_encoder": {"dropout_probability": 0.1}, "optimizer_defaults": {"ADAMW": {"weight_decay": 0.5}},
 "optimizer": {"optimizer": "ADAMW_8BIT", "weight_decay": 0.02},
 "learning_rate": 3e-4, "learning_rate_scheduler": "COSINE", "batch_size": 4, "resolution": "768",
 "peft_type": "LORA", "lora_rank": 16, "train_dtype": "BFLOAT_16", "gradient_checkpointing": "ON",
 "save_every": 1, "output_model_destination": "models/lora.safetensors", "samples": []}
"""
SIMPLE_TUNER = """
{"--model_family": "flux", "--pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev",
 "--data_backend_config": "backend.json", "--lora_type": "standard", "--lora_rank": 12,
 "--max_train_steps": 500,
 "--checkpoint_step_interval": "100", "--validation_prompt": "a cat", "--validation_seed": 3, "--seed": 4,
 "--gradient_accumulation_steps": "4", "--gradient_checkpointing": "true", "--optimizer": "adamw_bf16"}
"""
BACKEND = """[{"id": "a", "type": "local", "instance_data_dir": "cats", "resolution": 1.0, "repeats": 5},
{"id": "b", "instance_data_dir": "cats", "resolution": 1, "resolution_type": "area"},
{"id": "c", "instance_data_dir": "dogs", "disabled": true},
{"id": "d", "instance_data_dir": "edges", "dataset_type": "conditioning"}]"""
DIFFUSION_PIPE = """
output_dir = "runs/wan"
dataset = "dataset.toml"
epochs = 100
micro_batch_size_per_gpu = 1
gradient_accumulation_steps = 2
gradient_clipping = 0.5
activation_checkpointing = true
[model]
type = "wan"
[adapter]
type = "lora"
rank = 32
[optimizer]
type = "adamw"
lr = 2e-5
betas = [0.9, 0.99]
"""
DIRECTORY = """
resolutions = [256]
frame_buckets = [1, 33]
[[directory]]
path = "clips"
resolutions = [[1280, 720]]
"""


@pytest.mark.parametrize(
    ("files", "trainer", "family", "expected", "rest"),
    [
        (
            {"a.yaml": AI_TOOLKIT},
            "ai-toolkit",
            "qwen_image",
            {
                "data.sources": [("photos", "ohwx", False), ("more", "ohwx", False)],
                "data.resolutions": [512, 768, 1024],
                "lora.rank": 16,
                "lora.alpha": 8,
                "train.micro_batch_size": 2,
                "train.global_batch_size": 6,
                "train.steps": 900,
                "train.learning_rate": 1e-4,
                "train.optimizer": "adamw8bit",
                "validation.prompts": ["a ohwx", "b"],
                "validation.seed": 7,
                "validation.every_steps": 100,
                "output.dir": "output/mine",
                "output.checkpoint_every_steps": 250,
            },
            "save.dtype shuffle_tokens:false [trigger]",
        ),
        (
            {"a.yaml": AI_TOOLKIT_EDIT},
            *("ai-toolkit", "krea2_edit", {"lora.rank": 16}, "save.dtype"),
        ),
        (
            {"self.toml": KOHYA},
            "kohya",
            "sdxl",
            {
                "model.transformer_file": "checkpoints/sd_xl_base_1.0.safetensors",
                "data.path": "img",
                "data.resolutions": [1024],
                "lora.rank": 32,
                "lora.alpha": 1,  # kohya's default
                "train.learning_rate": 1.0,
                "train.optimizer": "prodigy",
                "train.lr_scheduler": "constant",
                "train.warmup_steps": 50,
                "train.seed": 42,
                "train.global_batch_size": 4,
                "output.dir": "out/person",
            },
            "learning_rate mixed_precision max_train_epochs sample_prompts wandb_api_key: ... keep_tokens: 2 "
            "/mnt/c/reg",
        ),
        (
            {"f.toml": KOHYA_FLUX, "data.toml": MUSUBI_DATA},
            "kohya",
            "flux",
            {"model.transformer_file": "flux1-dev.safetensors", "data.path": "images"},
            "general.resolution",
        ),
        (
            {"m.toml": MUSUBI, "data.toml": MUSUBI_DATA},
            "musubi-tuner",
            "qwen_image",
            {
                "model.path": "Qwen/Qwen-Image",  # the recipe's
                "model.transformer_file": "qwen_image_bf16.safetensors",
                "data.path": "images",
                "data.repeats": 2,
                "lora.alpha": 16,
                "train.micro_batch_size": 1,
            },
            "general.resolution timestep_sampling",
        ),
        (
            {"o.json": ONE_TRAINER},
            "OneTrainer",
            "flux",
            {
                "data.sources": [("cats", None, False), ("pets", None, True)],
                "lora.dropout": 0.0,  # theirs is of the text encoder
                "train.seed": 0,
                "data.resolutions": [768],
                "lora.rank": 16,
                "lora.alpha": 1,
                "train.optimizer": "adamw8bit",
                "train.weight_decay": 0.02,
                "train.lr_scheduler": "cosine",
                "train.mixed_precision": "bf16",
                "train.use_gradient_checkpointing": True,
            },
            "dogs concepts.name concepts.seed save_every output_model_destination training_method",
        ),
        (
            {"s.json": SIMPLE_TUNER, "backend.json": BACKEND},
            "SimpleTuner",
            "flux",
            {
                "data.path": "cats",
                "data.repeats": 1,  # SimpleTuner counts them from 0 on
                "data.resolutions": [1024],  # a megapixel
                "train.global_batch_size": 4,
                "lora.alpha": 12,
                "train.steps": 500,
                "train.seed": 4,
                "validation.seed": 3,
                "validation.prompts": ["a cat"],
                "output.checkpoint_every_steps": 100,
            },
            "dogs edges datasets.resolution datasets.repeats optimizer",
        ),
        (
            {"d.toml": DIFFUSION_PIPE, "dataset.toml": DIRECTORY},
            "diffusion-pipe",
            "wan",
            {
                "data.path": "clips",
                "data.resolutions": [256],
                "data.width": None,  # of the recipe
                "data.frame_counts": [1, 33],
                "lora.alpha": 32,
                "train.optimizer": "adamw",
                "train.learning_rate": 2e-5,
                "train.max_grad_norm": 0.5,
                "train.global_batch_size": 2,
            },
            "epochs optimizer.betas directory.resolutions",
        ),
    ],
)
def test_a_config_of_another_trainer_becomes_one_of_ours(
    files: dict[str, str],
    trainer: str,
    family: str,
    expected: dict[str, Any],
    rest: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(model_choice, "card_here", lambda: None)
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        Path(name).write_text(text)
    theirs, *_ = files
    assert main(["init", "--from", theirs, "--out", "ours.yaml"]) == 0
    printed = capsys.readouterr().out
    assert f"{theirs}: a config of {trainer}, " in printed
    config = load_config("ours.yaml").config.model_dump()
    assert config["model"]["family"] == family
    assert f"Base model: {config['model']['path']}, " in printed
    for setting, value in expected.items():
        section, _, key = setting.partition(".")
        found = config[section][key]
        if key == "sources":
            found = [(source["path"], source["trigger"], source["preserve"]) for source in found]
        assert found == value, setting
    listed = [line.strip() for line in printed.splitlines() if line.startswith("  ")]
    for key in rest.replace(": ", ":").split():
        assert any(key in line.replace(": ", ":") for line in listed), key
    assert not any(line.startswith(("job", "config.process.type")) for line in listed)
    assert "0123456789abcdef" not in printed + Path("ours.yaml").read_text()


def test_a_folder_takes_the_place_of_their_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_choice, "card_here", lambda: None)
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(AI_TOOLKIT)
    assert main(["init", "mine", "--from", "a.yaml", "--out", "ours.yaml"]) == 0
    data = load_config("ours.yaml").config.data
    assert (data.path, data.trigger, data.sources) == ("mine", "ohwx", [])


@pytest.mark.parametrize(
    ("text", "arguments", "reason"),
    [
        ("", [], "FOLDER: is missing; name the folder of your images, or --from another trainer's"),
        ("1: a", ["--from", "a.yaml"], "--from a.yaml: is not a config of ai-toolkit, kohya, "),
        ("- a", ["--from", "a.yaml"], "--from a.yaml: is not a config of ai-toolkit, kohya, "),
        ("a: [", ["--from", "a.yaml"], "--from a.yaml: cannot be read: "),
        ("job: &a {b: *a}", ["--from", "a.yaml"], "--from a.yaml: cannot be read: Circular reference"),
        ("", ["--from", "b.toml"], "--from b.toml: there is no such file; check the path (working folder: "),
        ("", ["--from", "a.yml"], "--from a.yml: there is no such file; did you mean 'a.yaml'?"),
        (
            "network_module: x",
            ["--from", "a.yaml"],
            "--from a.yaml: names no model that is known here; add --family NAME",
        ),
        (
            'pretrained_model_name_or_path: "D:/m/Flux1-dev.safetensors"',
            ["--from", "a.yaml"],
            "--from a.yaml: names no model that is known here; add --family flux, by its file's name",
        ),
        (
            "network_module: x",
            ["--from", "a.yaml", "--preset", "style"],
            "--from: --inputs, --layers, --masks",
        ),
    ],
)
def test_what_cannot_be_translated_is_refused_in_a_line(
    text: str,
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(model_choice, "card_here", lambda: None)
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(text)
    assert main(["init", *arguments]) == 2
    assert caplog.messages[-1].startswith(reason)
    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"]


@pytest.mark.parametrize("others", [[], ["2_dog"]])
def test_the_repeats_of_kohyas_folders_and_its_epochs_are_read(
    others: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("self.toml").write_text(KOHYA)
    for name in ("10_zkq", *others):
        Path("img", name).mkdir(parents=True)
        Path("img", name, "a.png").touch()
    found = translation_of(Path("self.toml"))
    sources = [{"path": "img/10_zkq", "repeats": 10}, {"path": "img/2_dog", "repeats": 2}]
    alone = (found.settings["data.path"], found.settings.get("data.repeats"))
    assert (found.settings["data.sources"] == sources) if others else (alone == ("img/10_zkq", 10))
    items, steps = (12, 30) if others else (10, 25)
    line = f"max_train_epochs: 10 of {items} items, with repeats, is about {steps} steps: set train.steps"
    assert line in found.rest
    assert "max_train_epochs is train.steps" not in str(found.rest)
