"""What a user can get wrong: exit code 2 and one line that names it, before any weights are loaded."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_run import TinyRun

from diffsynth_lite.data.video import write_video
from diffsynth_lite.pipelines.qwen_image import QwenImage

Spoil = Callable[[TinyRun], object]


def rewrite(old: str, new: str) -> Spoil:
    """Changes the config's text."""

    def spoil(run: TinyRun) -> None:
        text = run.config.read_text()
        assert old in text
        run.config.write_text(text.replace(old, new))

    return spoil


def copied_model(run: TinyRun) -> Path:
    """A copy of the tiny pipeline that the config names from now on."""
    line = next(line for line in run.config.read_text().splitlines() if line.startswith("  path:"))
    copy = run.root / "model"
    shutil.copytree(line.split(": ")[1], copy)
    run.config.write_text(run.config.read_text().replace(line, f"  path: {copy}"))
    return copy


def without_blocks(run: TinyRun) -> None:
    config = copied_model(run) / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_layers": 0}))


def as_wan_pipeline(run: TinyRun) -> None:
    index = copied_model(run) / "model_index.json"
    index.write_text(index.read_text().replace("QwenImagePipeline", "WanPipeline"))


def cut_off_transformer(run: TinyRun) -> None:
    weights = copied_model(run) / "transformer" / "diffusion_pytorch_model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)


def from_file_without_a_scale(run: TinyRun) -> None:
    stored = {"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "scaled_fp8": torch.zeros(0)}
    save_file(stored, run.root / "x.safetensors")
    rewrite("model:\n", f"model:\n  transformer_file: {run.root}/x.safetensors\n")(run)


def with_clip(run: TinyRun) -> None:
    write_video(run.root / "data" / "clip.mp4", [Image.new("RGB", (64, 32))] * 5, fps=16)
    (run.root / "data" / "clip.txt").write_text("a red circle that moves")


SPOILED: dict[str, tuple[Spoil, str, str]] = {
    "mistyped key": (rewrite("  rank: 4", "  rnak: 4"), "", "did you mean 'rank'"),
    "missing config": (lambda run: run.config.rename(run.root / "other.yaml"), "", "tiny.yaml"),
    "not a pipeline": (
        lambda run: (copied_model(run) / "model_index.json").unlink(),
        "",
        "not a diffusers pipeline",
    ),
    "another pipeline": (as_wan_pipeline, "", "set model.family: wan"),
    "no weights": (
        lambda run: (copied_model(run) / "vae" / "diffusion_pytorch_model.safetensors").unlink(),
        "",
        "no safetensors weights",
    ),
    "weights without their scales": (
        from_file_without_a_scale,
        "",
        "x.safetensors is not read: a lacks its weight or a scale of it",
    ),
    "weights that are cut off": (
        cut_off_transformer,
        "",
        "transformer cannot be read (diffusion_pytorch_model.safetensors: ",
    ),
    "metadata in a named pipe": (
        lambda run: os.mkfifo(run.root / "metadata.csv"),
        "data.metadata={root}/metadata.csv",
        "data.metadata: {root}/metadata.csv: is not a file that metadata can be read from",
    ),
    "no images": (lambda run: [path.unlink() for path in (run.root / "data").glob("*.png")], "", "data"),
    "missing caption": (lambda run: (run.root / "data" / "3.txt").unlink(), "", "3.png"),
    "image that is none": (lambda run: (run.root / "data" / "2.png").write_text("<html>"), "", "2.png"),
    "clips": (with_clip, "", "1 of kind video, such as clip.mp4; this family trains on the kinds image"),
    "model without blocks": (without_blocks, "", "transformer_blocks"),
}
"""What is done to the files of a run, the settings next to it, and words of the error."""

SETTINGS = {
    "model.path=/no/such/model": "there is no folder /no/such/model",
    "model.path=owner/name": "the hub cannot be reached",
    "model.family=qwen_imag": "did you mean 'qwen_image'",
    "model.family=my_package.my_family": (
        "unknown family 'my_package.my_family'; Python finds no such module: install its package or name"
    ),
    "model.family=../../etc/passwd": "unknown family '../../etc/passwd'",
    "data.cache_dir={root}/data/0.txt": "0.txt is a file; name a folder",
    "data.fps=16": "data.fps: has no effect, as this family makes images; remove it",
    "data.path=/no/such/data": "/no/such/data",
    "lora.target_modules=[to_q,to_qqq]": "to_qqq match no linear",
    "data.width=72": "not divisible by 16",
    "train.global_batch_size=3": "global_batch_size",
    "memory.policy=only memory.policy_blocks=[0,2]": (
        "memory.policy_blocks: only names blocks [2]; the model has blocks 0 to 1"
    ),
    "model.attention=flash": "model.attention: flash is not for model.family qwen_image",
    "memory.policy=last_k memory.policy_n=3": "memory.policy_n: last_k of 3 blocks; the model has 2",
    "memory.policy=skip memory.policy_blocks=[0,1]": (
        "memory.policy_blocks: skip of blocks [0, 1] selects none of 2 blocks"
    ),
    "memory.stream_blocks=3 memory.stream_slots=1": (
        "memory.stream_blocks: 3; the model has 2 blocks: give fewer, or all"
    ),
    "memory.stream_blocks=all": (
        "memory.stream_blocks: 2 blocks would all stay in 2 slots, and nothing be saved"
    ),
    "memory.stream_blocks=all memory.stream_slots=1 memory.min_bytes=1000000": (
        "memory.stream_blocks: there is nothing to stream in 2 blocks: no frozen weight of them has"
    ),
    "memory.stream_blocks=all memory.stream_slots=1 memory.host_gib=0.0001": (
        "memory.host_gib: 0.0001 GiB for each device do not hold its share of the streamed weights, 686"
    ),
    "--resume /no/such/checkpoint": "/no/such/checkpoint",
}
"""Settings, and words of the error that they end in."""

CASES = SPOILED | {given: (lambda _: None, given, words) for given, words in SETTINGS.items()}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_in_one_line_before_weights_are_loaded(
    case: str, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def loaded(*_args: object) -> None:
        pytest.fail("weights were loaded")

    for method in ("load_transformer", "load_prompt_encoder", "load_media_encoder"):
        monkeypatch.setattr(QwenImage, method, loaded)
    spoil, arguments, message = CASES[case]
    spoil(tiny_run)
    assert tiny_run.train(*arguments.replace("{root}", str(tiny_run.root)).split()) == 2
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert message.replace("{root}", str(tiny_run.root)) in errors[0]
    assert "Traceback" not in caplog.text


def test_weights_that_are_not_finite_are_refused_by_name(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    weights = copied_model(tiny_run) / "transformer" / "diffusion_pytorch_model.safetensors"
    stored = load_file(weights)
    stored["proj_out.bias"][0] = torch.nan
    save_file(stored, weights)
    assert tiny_run.train() == 2
    assert f"model.path: {weights}: proj_out.bias holds numbers that are not finite" in caplog.text


def test_several_mistakes_are_all_reported_at_once(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    (tiny_run.root / "data" / "3.txt").unlink()
    assert tiny_run.train("data.width=72", "lora.target_modules=[nothing]", "model.variant=fp16") == 2
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) >= 2
    assert any("3.png" in error for error in errors)


def test_bad_images_are_left_out_and_listed_when_asked_to(tiny_run: TinyRun) -> None:
    image = tiny_run.root / "data" / "2.png"
    image.write_bytes(image.read_bytes()[:-400])
    assert tiny_run.train("data.on_bad_item=skip", "data.max_bad_ratio=0.5", "train.steps=2") == 0
    rows = [json.loads(line) for line in (tiny_run.folder / "quarantine.jsonl").read_text().splitlines()]
    assert [row["item"] for row in rows] == ["2.png"]
    Image.effect_mandelbrot((64, 64), (-2, -1, 1, 1), 9).convert("RGB").save(image)
    assert tiny_run.train("data.on_bad_item=skip") == 2  # an image more is a different run
