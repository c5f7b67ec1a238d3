"""Images on demand from a finished run: what is drawn, what is in the files, and what is refused."""

import shutil
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from safetensors.torch import load
from tiny_run import TinyRun, checkpoint_tensors, differing

from diffsynth_lite.cli.main import main
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.sampling.request import find_lora


def pixels(path: Path) -> npt.NDArray[np.int16]:
    with Image.open(path) as image:
        return np.asarray(image, dtype=np.int16)


def sample(*arguments: object) -> int:
    return main(["sample", *map(str, arguments)])


def test_prompts_seeds_scales_and_several_loras_of_a_run_that_has_moved(
    finished_run: TinyRun, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = finished_run.folder.rename(finished_run.root / "mine")
    monkeypatch.setenv("MY_SECRET", "swordfish")
    texts = finished_run.root / "prompts.txt"
    texts.write_text("a red circle\n\n  ein Hündchen, swordfish \n", encoding="utf-8")
    size = ("--size", "32x48", "--steps", 2, "--guidance", 3, "--negative", "blurry")
    file = finished_run.root / "kohya.safetensors"
    assert main(["convert", str(moved / "lora"), str(file), "--to", "kohya", "--family", "qwen_image"]) == 0
    loras = ("--lora", moved, "--lora", f"{file}:-1")
    drawn = ("--prompt", f"@{texts}", "--seed", 3, "--num", 2, "--scale", "0,1")
    # Quantised and streamed as a run can be, and with what memory.auto leaves to be chosen.
    kept = ("model.quantize=int8", "memory.stream_blocks=auto")
    assert sample(*loras, *drawn, *size, *kept) == 0
    assert sample(*loras[:2], *size, *kept, "--prompt", "a red circle", "--seed", 3, "--scale", 1) == 0
    first, second = (moved / "samples" / name for name in ("0001", "0002"))
    names = [
        f"prompt-{place:02d}-seed-{seed}-scale-{scale}.png"
        for place, seed, scale in product((0, 1), (3, 4), (0, 1))
    ]
    assert sorted(path.name for path in first.iterdir()) == ["grid.png", *sorted(names)]
    with Image.open(first / names[-1]) as image:
        assert image.size == (32, 48)
        assert image.info["parameters"] == (
            "ein Hündchen, REDACTED <lora:mine:1> <lora:kohya:-1>\nNegative prompt: blurry\n"
            "Steps: 2, Sampler: FlowMatchEulerDiscreteScheduler, CFG scale: 3, Seed: 4, Size: 32x48, "
            f"Model: {tiny_model.name}, Version: diffsynth_lite 0.1.0"
        )
    base, taken_back, changed = map(pixels, (first / names[0], first / names[1], second / names[1]))
    assert abs(taken_back - base).max() <= 1 < abs(changed - base).max()
    with Image.open(first / "grid.png") as grid:
        assert grid.size == (190 + 2 * (85 + 8) + 8, 28 + 4 * (128 + 8) + 8)


REFUSED = {
    "": "--lora, --config: name the folder of a run, or a yaml file",
    "--lora {root}/nowhere": "nowhere: there is no such file or folder",
    "--lora {root}/data": "data: there is no LoRA in",
    "--lora {root}/data@2": "data holds no run; name the folder of a run, a step of it",
    "--lora {root}/run@3:0.7": "no LoRA of step 3 was kept (output.keep_adapters); the run has @last; @2",
    "--lora {root}/run@best": "there is no lora_best; a run writes it with validation.data",
    "--lora {root}/run@ema": "there is no lora_ema; a run writes it with train.ema_decay",
    "--lora {root}/run@x": "'x' is neither a step nor last, best, ema, chosen; the run has @last; @2; @4; @6",
    "--lora {root}/run@chosen": "no LoRA was chosen; diffsynth-lite choose RUN@STEP does that; the run has",
    "--lora {root}/run/checkpoints": "not a LoRA file; the run has @last; @2; @4; @6",
    "--lora {root}/run/checkpoints/step-00000004": "not a LoRA file; the run has @last; @2",
    "--lora {root}/run/checkpoints/step-00000004/adapter.safetensors": "not a LoRA file; the run has",
    "--lora {root}/lone.safetensors --every-checkpoint --config {root}/tiny.yaml": "steps of one run; give",
    "--lora {root}/tiny.yaml": "tiny.yaml: is not a .safetensors file",
    "--lora {root}/run:inf": "inf is not a weight; give a finite number",
    "--lora {root}/lone.safetensors": "--config: is missing, and no run names the base model",
    "--config {root}/tiny.yaml output.dir={root}/none": "holds no run; name a LoRA, or generate",
    "--lora {root}/run": "--prompt: is missing, and validation.prompts of the config is empty",
    "--lora {root}/run --prompt @{root}/nowhere": "nowhere: cannot be read: No such file",
    "--lora {root}/run --prompt @{root}/empty": "empty: has no line with a prompt",
    "--lora {root}/run --prompt @{root}/bytes": "bytes: is not UTF-8 text",
    "--lora {root}/broken --prompt a --config {root}/tiny.yaml": "is not a readable safetensors",
}
REFUSED_OF_A_RUN = {
    "--size 33x32": "33x32 is not divisible by 16",
    "--frames 5": "5 frames; this family makes images",
    "--steps 0": "got '0'; must be a whole number, at least 1",
    "--input {root}/data/0.png": "validation.inputs: has no effect",
    "validation.inputs=[{root}/data/0.png]": "validation.inputs: has no effect",
    "--seed 1,2 --num 2": "--seed lists 2 seeds; give the first only",
    "--out {root}/tiny.yaml": "tiny.yaml: exists",
    "--out {root}/data": "data: exists, and nothing is overwritten",
    "memory.stream_blocks=9": "9; the model has 2 blocks",
    "model.path={root}/data": "model_index.json",
}
"""What `--lora RUN --prompt a` cannot be given with, and words of the error."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *REFUSED.items(),
        *((f"--lora {{root}}/run --prompt a {more}", message) for more, message in REFUSED_OF_A_RUN.items()),
    ],
)
def test_what_cannot_be_generated_is_refused_before_weights_load(
    finished_run: TinyRun,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    arguments: str,
    message: str,
) -> None:
    for method in ("load_transformer", "load_prompt_encoder"):
        monkeypatch.setattr(QwenImage, method, lambda *_: pytest.fail("weights were loaded"))
    root = finished_run.root
    (root / "empty").write_text(" \n")
    (root / "bytes").write_bytes(b"\xff")
    (root / "broken").mkdir()
    (root / "broken" / "pytorch_lora_weights.safetensors").write_bytes(b"x")
    shutil.copy(root / "run" / "lora" / "pytorch_lora_weights.safetensors", root / "lone.safetensors")
    assert sample(*arguments.format(root=root).split()) == 2
    assert message in caplog.text
    assert not (root / "run" / "samples").exists()


def test_a_run_keeps_the_lora_of_each_save_also_where_it_was_killed_before_that(
    tiny_run: TinyRun, whole_run: TinyRun
) -> None:
    file = "pytorch_lora_weights.safetensors"
    exported = []
    for step in (2, 4, 6):
        assert tiny_run.train(f"train.steps={step}") == 0
        exported.append((tiny_run.folder / "lora" / file).read_bytes())
        if step == 2:
            shutil.rmtree(tiny_run.folder / "checkpoints" / "lora-00000002")
    kept = [find_lora(f"{tiny_run.folder}@{step}:0.7") for step in (2, 4, 6)]
    assert [(lora.place / file).read_bytes() for lora in kept[1:]] == exported[1:]
    # Written by the next start, whose train.steps is in the metadata.
    assert differing(load((kept[0].place / file).read_bytes()), load(exported[0])) == []
    assert [(lora.name, lora.weight) for lora in kept] == [(f"run@{step}", 0.7) for step in (2, 4, 6)]
    assert find_lora(f"{tiny_run.folder}@last").place == tiny_run.folder / "lora"
    # A copy is not what a run resumes from.
    checkpoints = tiny_run.folder / "checkpoints"
    shutil.rmtree(checkpoints / "step-00000006")
    assert tiny_run.train("--resume", str(checkpoints / "lora-00000006")) == 2
    assert tiny_run.train() == 0
    assert differing(checkpoint_tensors(whole_run.folder, 6), checkpoint_tensors(tiny_run.folder, 6)) == []


def test_each_step_is_a_column_of_one_grid_and_the_model_is_loaded_once(
    finished_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, loads = finished_run.folder, []
    load = QwenImage.load_transformer
    monkeypatch.setattr(
        QwenImage, "load_transformer", lambda *args, **kwargs: [loads.append(1), load(*args, **kwargs)][1]
    )
    drawn = ("--prompt", "a red circle", "--size", "32x32", "--steps", 2, "--guidance", 1)
    assert sample("--lora", f"{run}:2", "--every-checkpoint", *drawn) == 0
    assert len(loads) == 1
    names = [f"prompt-00-seed-0-step-{step:08d}-scale-1.png" for step in (2, 4, 6)]
    first = run / "samples" / "0001"
    assert sorted(path.name for path in first.iterdir()) == [
        *("grid.png", "prompt-00-seed-0-scale-0.png"),
        *names,
    ]
    with Image.open(first / names[0]) as image:
        assert "<lora:run@2:2>" in image.info["parameters"]
    for step, name in zip((2, 4, 6), names, strict=True):
        assert sample("--lora", f"{run}@{step}:2", *drawn, "--scale", 1, "--out", run / f"at {step}") == 0
        assert caplog.messages.count(f"Generating: step {step} at 2.") == 2
        one = run / f"at {step}" / "prompt-00-seed-0-scale-1.png"
        assert np.array_equal(pixels(first / name), pixels(one))
    assert not np.array_equal(pixels(first / names[0]), pixels(first / names[2]))


def test_an_image_whose_numbers_overflow_is_not_drawn(
    finished_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    drawn = ("--prompt", "a red circle", "--size", "32x32", "--steps", 2, "--guidance", 1)
    assert sample("--lora", finished_run.folder, *drawn, "--scale", "1e30") == 2
    assert "--scale 1e+30: numbers overflow, the decoded image holds NaN or infinity" in caplog.text
    assert list(finished_run.folder.rglob("*.png")) == []


@pytest.mark.parametrize(
    "argument",
    ["--seed=1,-2", "--seed=x", f"--seed={2**63}", "--num=0", "--scale=1,x", "--scale=nan", "--size=ax2"],
)
def test_numbers_that_are_none_are_refused_with_an_example(
    argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sample(argument)
    assert argument.partition("=")[2] in capsys.readouterr().err


def test_a_lora_is_named_by_its_run_and_a_colon_may_be_part_of_its_path(finished_run: TinyRun) -> None:
    root, folder = finished_run.root, finished_run.folder
    for copy in (folder / "lora_best", root / "a:b", root / "run@4"):
        shutil.copytree(folder / "lora", copy)
    file = shutil.copy(folder / "lora" / "pytorch_lora_weights.safetensors", root / "one.safetensors")
    given = (
        folder,
        f"{folder}/lora_best:2",
        f"{folder}@best",
        f"{folder}@2",
        f"{folder}@4",
        root / "a:b",
        file,
    )
    found = [find_lora(str(one)) for one in given]
    assert [(lora.place.name, lora.name, lora.weight) for lora in found] == [
        ("lora", "run", 1),
        ("lora_best", "run-lora_best", 2),
        ("lora_best", "run-lora_best", 1),
        ("lora-00000002", "run@2", 1),
        ("run@4", "run@4", 1),  # an existing path of that name
        ("a:b", "a:b", 1),
        ("one.safetensors", "one", 1),
    ]
