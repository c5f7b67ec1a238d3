"""What the cache will take and how much of it is there, against what a run then writes."""

from pathlib import Path

import pytest
from messy_data import Workplace, add_images, advice_with, findings, scene

from diffsynth_lite.config import Config
from diffsynth_lite.data.video import write_video
from diffsynth_lite.training.caching import caching_accelerator, fill_cache


@pytest.mark.parametrize("family", ["krea2", "qwen_image", "qwen_image_edit", "sd3"])
def test_the_estimate_of_the_cache_is_what_a_run_then_writes(workplace: Workplace, family: str) -> None:
    count = 1 if family == "qwen_image_edit" else 4  # its inputs are of a million pixels, which takes time
    path = add_images(workplace, "data", count, (96, 80))
    for file in Path(path).glob("*.txt"):  # of which some families keep more than their latents
        file.write_text("a caption " * (1 if family == "sd3" else 20))  # which keeps the padding
    overrides = [f"data.path={path}", "validation.prompts=[]", "data.bucket_step=16"]
    if family == "qwen_image_edit":
        overrides.append(f"data.input_dirs=[{add_images(workplace, 'before', count, (80, 80))}]")
    _assert_a_run_writes_it(workplace, workplace.config(*overrides, family=family))


def test_the_images_that_clips_go_on_from_are_part_of_the_estimate(workplace: Workplace) -> None:
    (workplace.root / "clips").mkdir()
    write_video(workplace.root / "clips/0.mp4", [scene(place, (64, 64)) for place in range(5)], fps=16)
    (workplace.root / "clips/0.txt").write_text("a clip")
    overrides = [f"data.path={workplace.root}/clips", "validation.prompts=[]", "data.frame_counts=[5]"]
    _assert_a_run_writes_it(workplace, workplace.config(*overrides, family="wan_i2v"))


def _assert_a_run_writes_it(workplace: Workplace, config: Config) -> None:
    estimated = findings(config, 0).facts["cache"]
    fill_cache(config, caching_accelerator(config))
    sizes = [path.stat().st_size for path in (workplace.root / "cache").rglob("*.safetensors")]
    number, unit = estimated.partition("about ")[2].split()
    assert estimated.startswith(f"{len(sizes)} entries to make")
    expected = float(number) * {"KiB": 2**10, "MiB": 2**20}[unit]
    # The inputs of an edit are rounded to sizes of their own.
    assert expected == pytest.approx(sum(sizes), rel=0.1)
    assert findings(config, 0).facts["cache"].startswith(f"{len(sizes)} there already")
    next((workplace.root / "cache").rglob("*.safetensors")).unlink()
    assert findings(config, 0).facts["cache"].startswith("1 entry to make")


def test_a_disk_too_small_for_the_cache_is_reported(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add_images(workplace, "data", 2)
    monkeypatch.setattr("diffsynth_lite.doctor.examination.free_disk_bytes", lambda _: 1024)
    assert "1.0 KiB are free" in advice_with(
        findings(workplace.config(f"data.path={path}")), "The cache needs"
    )
    off = findings(workplace.config(f"data.path={path}", "data.cache=false"))
    assert off.facts["cache"] == "off: encoded while training"
    assert off.advice == []
