"""Whole runs on SDXL, through the training command: its own loss weighting, and what it refuses."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from tiny_run import TinyRun, lora_metadata_of, make_run

from diffsynth_lite.pipelines.sdxl import tiny


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


def test_a_run_on_the_unet_alone_weighs_by_the_ratio_of_signal_to_noise(sdxl_run: TinyRun) -> None:
    assert sdxl_run.train("objective.loss_weighting=min_snr", "train.mixed_precision=bf16") == 0
    assert {name[:9] for name in lora_tensors(sdxl_run.folder)} == {"lora_unet"}
    report = next(row for row in sdxl_run.metrics() if "blocks_recomputed" in row)
    assert report["blocks_recomputed"] > 0
    assert report["bytes_offloaded"] > 0
    assert len(list((sdxl_run.folder / "previews").glob("step-*.png"))) == 2 * 2
    metadata = lora_metadata_of(sdxl_run.folder / "lora")
    assert metadata["modelspec.prediction_type"] == "epsilon"
    assert metadata["ss_min_snr_gamma"] == "5.0"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "lora.components=[text_encoder]",
            r"lora.components: [text_encoder] is not a choice here; use [unet], or",
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
