"""A slider is trained from prompts, or on images: its steps, its previews, its file, and its resume."""

from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from PIL import Image
from safetensors import safe_open
from tiny_run import TinyRun, checkpoint_tensors, tiny_image

CONFIG = """
model: {{family: qwen_image, path: {model}, dtype: float32, text_encoder_dtype: float32}}
lora: {{rank: 4, dropout: 0.1}}
data: {{width: 32, height: 32, cache_dir: {root}/cache, num_workers: 0}}
objective:
  slider:
    triples:
      - {{neutral: a circle, positive: a red circle, negative: a blue circle}}
      - {{neutral: a square, positive: a red square, negative: a blue square}}
    anchors: [a green star]
    images_per_prompt: 2
train:
  {{steps: 4, global_batch_size: 4, micro_batch_size: 2, learning_rate: 0.05, mixed_precision: "no",
  cpu_threads: 1, ema_decay: 0.5, use_gradient_checkpointing_offload: true}}
validation: {{prompts: [a ring], num_inference_steps: 2, guidance_scale: 1}}
logging: {{every_steps: 1}}
output: {{dir: {root}/run, checkpoint_every_steps: 2, lora_dtype: float32}}
"""


@pytest.fixture(scope="module")
def slider(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> TinyRun:
    """A finished run."""
    root = tmp_path_factory.mktemp("slider")
    (root / "slider.yaml").write_text(CONFIG.format(model=tiny_model, root=root))
    run = TinyRun(root=root, config=root / "slider.yaml")
    assert run.train() == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    return run


def test_the_loss_of_both_ends_and_of_what_is_kept_is_logged(slider: TinyRun) -> None:
    rows = [row for row in slider.metrics() if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["preservation_loss"] < 1e-9 < rows[-1]["preservation_loss"]
    for row in rows:
        assert row["loss"] == pytest.approx((row["positive_loss"] + row["negative_loss"]) / 2, rel=1e-5)
    assert not any("fixed_noise" in name for row in slider.metrics() for name in row)


def test_a_preview_is_a_strip_of_strengths(slider: TinyRun) -> None:
    [before, *_, after] = sorted((slider.folder / "previews").glob("step-*.png"))
    images = {}
    for file in (before, after):
        with Image.open(file) as strip:
            assert strip.size == (5 * 32, 32)
            assert "Strengths: -2 -1 0 1 2" in strip.text["parameters"]
            cells = [strip.crop((32 * place, 0, 32 * place + 32, 32)).tobytes() for place in range(5)]
            images[file] = cells
    assert len(set(images[before])) == 1
    assert images[after][2] == images[before][2], "strength 0 is the base"
    assert len(set(images[after])) == 5


def test_the_file_and_its_card_say_what_the_strengths_are(slider: TinyRun) -> None:
    usage = "A slider, for strengths from -1 (a blue circle) to 1 (a red circle)."
    with safe_open(slider.folder / "lora" / "pytorch_lora_weights.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["modelspec.usage_hint"] == usage
    assert '["a square", "a red square", "a blue square"]' in metadata["diffsynth_lite.slider"]
    assert usage in (slider.folder / "lora" / "README.md").read_text()


def test_a_resumed_slider_is_the_same_bit_for_bit_and_generates_no_image_again(
    slider: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    parts = slider.having(f"output.dir={slider.root}/parts", "validation.prompts=[]")
    assert parts.stopped_after(2) == 75
    AcceleratorState._reset_state(reset_partial_state=True)
    other = "objective.slider={triples: [{neutral: a, positive: b, negative: c}]}"
    assert parts.train(other) == 2
    assert "objective.slider" in caplog.text
    AcceleratorState._reset_state(reset_partial_state=True)
    caplog.clear()
    assert parts.train() == 0
    whole, resumed = (checkpoint_tensors(folder, 4) for folder in (slider.folder, slider.root / "parts"))
    assert whole.keys() == resumed.keys()
    assert all(whole[name].equal(resumed[name]) for name in whole)
    assert "generates" not in caplog.text


def test_a_slider_learns_on_images_without_captions(slider: TinyRun, tmp_path: Path) -> None:
    for place in range(2):
        tiny_image(48, 32 + 16 * place, 5 + place).save(tmp_path / f"{place}.png")
    run = slider.having(f"output.dir={slider.root}/images", f"data.path={tmp_path}", "validation.prompts=[]")
    assert run.train("train.steps=1", "train.micro_batch_size=1") == 0
    [row] = [row for row in run.metrics(slider.root / "images") if "loss" in row]
    assert row["positive_loss"] > 0
    assert row["preservation_loss"] < 1e-9
