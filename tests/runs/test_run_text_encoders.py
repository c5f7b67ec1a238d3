"""Whole runs on SDXL: its UNet alone, and with both text encoders, through the training command."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from diffusers import StableDiffusionXLPipeline
from tiny_run import TinyRun, checkpoint_tensors, differing, make_run

from diffsynth_lite.pipelines.sdxl import tiny

WITH_TEXT_ENCODERS = "lora.components=[unet, text_encoder, text_encoder_2]"


@pytest.fixture(scope="module")
def tiny_sdxl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_sdxl")
    tiny().save_pretrained(folder)
    return folder


@pytest.fixture
def sdxl_run(tmp_path: Path, tiny_sdxl: Path) -> TinyRun:
    run = make_run(tmp_path, tiny_sdxl)
    settings = ("model.family=sdxl", "train.steps=4", "train.use_gradient_checkpointing_offload=true")
    return TinyRun(root=run.root, config=run.config, settings=settings)


def lora_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "lora" / "pytorch_lora_weights.safetensors")


def test_a_resumed_run_with_text_encoders_is_the_same_run_and_trains_all_three(
    sdxl_run: TinyRun, tiny_sdxl: Path
) -> None:
    whole, parts = sdxl_run.root / "whole", sdxl_run.root / "parts"
    settings = (WITH_TEXT_ENCODERS, "validation.prompts=[a red circle]")
    assert sdxl_run.train(*settings, f"output.dir={whole}") == 0
    assert sdxl_run.train(*settings, f"output.dir={parts}", "train.steps=2") == 0
    halfway = lora_tensors(parts)
    assert sdxl_run.train(*settings, f"output.dir={parts}") == 0
    assert differing(checkpoint_tensors(whole, 4), checkpoint_tensors(parts, 4)) == []
    assert differing(lora_tensors(whole), lora_tensors(parts)) == []
    assert set(differing(halfway, lora_tensors(parts))) == set(halfway)
    losses = [[row["loss"] for row in sdxl_run.metrics(run) if "loss" in row] for run in (whole, parts)]
    assert losses[0] == losses[1]

    pipeline = StableDiffusionXLPipeline.from_pretrained(tiny_sdxl, add_watermarker=False)
    pipeline.load_lora_weights(whole / "lora")
    adapter = checkpoint_tensors(whole, 4)
    for name in ("unet", "text_encoder", "text_encoder_2"):
        component = getattr(pipeline, name)
        loaded = {key: value for key, value in component.named_parameters() if ".lora_" in key}
        assert len(loaded) > 0
        for key, value in loaded.items():
            assert torch.equal(value, adapter[f"adapter/{name}.{key.replace('.default_0', '')}"]), key
        assert component.peft_config["default_0"].lora_alpha == 8


def test_a_run_on_the_unet_alone_weighs_by_the_ratio_of_signal_to_noise(sdxl_run: TinyRun) -> None:
    assert sdxl_run.train("objective.loss_weighting=min_snr", "train.mixed_precision=bf16") == 0
    assert {name.split(".")[0] for name in lora_tensors(sdxl_run.folder)} == {"unet"}
    report = next(row for row in sdxl_run.metrics() if "blocks_recomputed" in row)
    assert report["blocks_recomputed"] > 0
    assert report["bytes_parked"] > 0
    assert len(list((sdxl_run.folder / "previews").glob("step-*.png"))) == 2 * 2


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "lora.components=[text_encoder]",
            r"lora.components: [text_encoder] is no choice here; use [unet], or",
        ),
        ("objective.shift=resolution", "objective.shift: resolution is not defined for this family"),
        ("objective.loss_weighting=cosmap", "objective.loss_weighting: cosmap is defined on another path"),
    ],
)
def test_what_sdxl_cannot_do_is_refused_before_weights_load(
    sdxl_run: TinyRun, caplog: pytest.LogCaptureFixture, setting: str, message: str
) -> None:
    assert sdxl_run.train(setting) == 2
    assert message in caplog.text
    assert "Loading" not in caplog.text
