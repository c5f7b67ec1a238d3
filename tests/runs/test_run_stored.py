"""A run that commit 331cb7b left, kept whole: later versions resume it, and read its folder, cache and LoRA.

``stored_run/`` holds the config, four images, the cache and the folder of a run of six steps, with a
checkpoint after the third. Its base model is the mini Qwen-Image of the quickstart.
"""

import json
import shutil
from pathlib import Path

import numpy
import PIL
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from diffsynth_lite.cli import main as commands
from diffsynth_lite.cli.arguments import command
from diffsynth_lite.cli.train import main

REPOSITORY = Path(__file__).parents[2]
STORED = Path(__file__).parent / "stored_run"
PROMPT = "a teal star on a gray background"
LORA = "pytorch_lora_weights.safetensors"

MADE_WITH = {"torch": "2.13.0", "cpu": "AVX512", "pillow": "13.0.0"}
HERE = {
    "torch": torch.__version__.partition("+")[0],
    "cpu": torch.backends.cpu.get_cpu_capability(),
    "pillow": PIL.__version__,
}
IS_SAME_MACHINE = HERE == MADE_WITH
"""Bits are compared only there: other processors and versions of torch add in another order."""
MAX_DIFFERENCE = 1e-3


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the stored run, in whose folder its commands are run."""
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model").symlink_to(REPOSITORY / "examples" / "quickstart" / "mini_qwen_image")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_same_tensors(found: Path, expected: Path, *, is_exact: bool = IS_SAME_MACHINE) -> None:
    tensors, stored_tensors = load_file(found), load_file(expected)
    assert tensors.keys() == stored_tensors.keys()
    tolerance = 0 if is_exact else MAX_DIFFERENCE
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, stored_tensors[name], rtol=tolerance, atol=tolerance, msg=name)


def loss_rows(run: Path) -> list[dict[str, float]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [{"step": row["step"], "loss": row["loss"]} for row in rows if "loss" in row]


def cache_entries(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*.safetensors")}


def test_a_run_of_then_resumes_with_the_numbers_that_it_went_on_to_have(stored: Path) -> None:
    shutil.rmtree(stored / "run/checkpoints/step-00000006")
    allowed = (
        [] if IS_SAME_MACHINE else ["resume.allow=[data]"]
    )  # the data's fingerprint has Pillow's version
    assert main(["--config", "lora.yaml", *allowed]) == 0
    for name in ("adapter", "ema", "optimizer"):
        place = f"run/checkpoints/step-00000006/{name}.safetensors"
        assert_same_tensors(stored / place, STORED / place)
    assert_same_tensors(stored / "run/lora" / LORA, STORED / "run/lora" / LORA)
    losses = [row["loss"] for row in loss_rows(STORED / "run")]
    expected = losses if IS_SAME_MACHINE else pytest.approx(losses, rel=MAX_DIFFERENCE)
    assert [row["loss"] for row in loss_rows(stored / "run")] == expected
    assert len(json.loads((stored / "run/lineage.json").read_text(encoding="utf-8"))) == 2
    if IS_SAME_MACHINE:
        assert cache_entries(stored / "cache") == cache_entries(STORED / "cache"), "was encoded again"


def test_a_finished_run_of_then_is_known_as_finished(stored: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["--config", "lora.yaml"]) == 0
    assert "This run is finished (step 6)" in caplog.text
    sample = command("sample", "--lora", "run")
    assert caplog.messages[-1] == f'Next: {sample} --prompt "..."'
    assert loss_rows(stored / "run") == loss_rows(STORED / "run")


def test_the_folder_of_a_run_of_then_gives_its_report(stored: Path) -> None:
    assert commands.main(["report", "run"]) == 0
    page = (stored / "run/report.html").read_text(encoding="utf-8")
    assert PROMPT in page
    assert "finished" in page
    assert "step-00000006-prompt-00" in page


def test_the_lora_of_a_run_of_then_generates_the_previews_of_the_run(stored: Path) -> None:
    assert commands.main(["sample", "--lora", "run", "--prompt", PROMPT, "--out", "samples"]) == 0
    previews = sorted((STORED / "run/previews").glob("*.png"))
    images = sorted(path for path in (stored / "samples").glob("*.png") if path.name != "grid.png")
    assert len(images) == len(previews) == 2
    differences = []
    for image, preview in zip(images, previews, strict=True):
        with Image.open(image) as opened, Image.open(preview) as expected:
            difference = numpy.abs(numpy.asarray(opened, dtype=int) - numpy.asarray(expected, dtype=int))
        differences.append(difference.max())
    without_lora, with_lora = differences
    assert without_lora <= (0 if IS_SAME_MACHINE else 2)
    assert with_lora <= 2, "of 255: the file is in bfloat16, the run generated with float32"


def test_the_lora_of_a_run_of_then_is_converted_and_back(stored: Path) -> None:
    for target, source, file in (
        ("kohya", "run", "kohya.safetensors"),
        ("diffusers", "kohya.safetensors", "back.safetensors"),
    ):
        assert commands.main(["convert", "--to", target, source, file]) == 0
    assert_same_tensors(stored / "back.safetensors", STORED / "run/lora" / LORA, is_exact=True)
