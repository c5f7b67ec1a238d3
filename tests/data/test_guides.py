"""What guides an item, and what of it is regenerated, are cropped and timed as its target is."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from diffsynth_lite.core.randomness import counter_generator
from diffsynth_lite.data.buckets import BucketRule
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.images import black_or_white, cover, random_mask
from diffsynth_lite.data.items import TrainingItem
from diffsynth_lite.data.media_index import FileMemory, MediaIndex
from diffsynth_lite.data.plan import DatasetPlan, PlanRules, plan_items
from diffsynth_lite.data.records import Record
from diffsynth_lite.data.video import write_video
from diffsynth_lite.errors import UserError

RULES = PlanRules(buckets=BucketRule(divisor=8, step=8, sizes=((16, 16),), frame_counts=(3,)))


def planned(folder: Path, target: Path, rules: PlanRules = RULES, **other_files: object) -> DatasetPlan:
    record = Record(name=target.name, source=0, target=target, captions=("x",), **other_files)
    with FileMemory(folder / "index.sqlite") as memory:
        return plan_items([record], index=MediaIndex(memory), rules=rules)


def items(*given: object, **other_files: object) -> list[TrainingItem]:
    plan = planned(*given, **other_files)
    assert not plan.bad
    return list(plan.items)


def noise(path: Path, size: tuple[int, int] = (48, 32)) -> Path:
    """An image of noise that depends on its name alone: what is drawn for an image depends on its bytes."""
    generator = np.random.default_rng(list(path.name.encode()))
    Image.fromarray(generator.integers(256, size=(*size[::-1], 3), dtype=np.uint8)).save(path)
    return path


def shades(path: Path, num_frames: int, fps: int = 4, size: tuple[int, int] = (48, 32)) -> Path:
    """A clip of grey frames, each lighter than the one before."""
    step = 240 // num_frames
    frames = [Image.new("RGB", size, (8 + step * number,) * 3) for number in range(num_frames)]
    write_video(path, frames, fps=fps)
    return path


def test_a_control_that_is_its_target_stays_equal_in_every_crop_and_clip(tmp_path):
    image, clip = noise(tmp_path / "a.png"), shades(tmp_path / "a.mp4", 12)
    rules = dataclasses.replace(
        RULES, crop="random", crops_per_item=3, clip="random", clips_per_video=2, fps=2.0
    )
    for target in (image, clip):
        made = items(tmp_path, target, rules, control=target)
        assert len(made) == (3 if target == image else 6)
        for item in made:
            media = item.load()
            assert [each.tobytes() for each in media.control] == [each.tobytes() for each in media.frames]


def test_a_control_of_another_rate_is_shown_at_the_times_of_its_target(tmp_path):
    target, control = shades(tmp_path / "a.mp4", 8, fps=4), shades(tmp_path / "c.mp4", 16, fps=8)
    [item] = items(tmp_path, target, dataclasses.replace(RULES, clip="center", fps=2.0), control=control)
    media = item.load()
    assert item.times() == [0.25, 0.75, 1.25]
    assert [round((frame.getpixel((0, 0))[0] - 8) / 30) for frame in media.frames] == [1, 3, 5]
    assert [round((frame.getpixel((0, 0))[0] - 8) / 15) for frame in media.control] == [2, 6, 10]


def test_a_guide_that_is_shorter_than_its_target_is_a_bad_item(tmp_path):
    target = shades(tmp_path / "a.mp4", 8)
    for role in ("control", "inpaint_mask"):
        short = shades(tmp_path / "short.mp4", 7)
        [reason] = planned(tmp_path, target, **{role: short}).bad.values()
        assert "short.mp4: is 1.75 s long, and its target 2 s; it needs the length" in reason
        assert not planned(tmp_path, target, **{role: shades(tmp_path / "long.mp4", 9)}).bad


@pytest.mark.parametrize("role", ["control", "inpaint_mask"])
def test_a_guide_that_is_gone_or_no_media_is_a_bad_item_by_its_name(tmp_path, role):
    target = noise(tmp_path / "a.png")
    (tmp_path / "page.png").write_text("<html>")
    for name in ("gone.png", "page.png"):
        [reason] = planned(tmp_path, target, **{role: tmp_path / name}).bad.values()
        assert name in reason


def test_a_mask_is_binary_as_the_pipelines_of_diffusers_make_it(tmp_path):
    """Also where the resampling gives grey: at 127 it stays, at 128 it is painted."""
    grey = noise(tmp_path / "m.png")
    processor = VaeImageProcessor(do_normalize=False, do_binarize=True, do_convert_grayscale=True)
    [item] = items(tmp_path, noise(tmp_path / "a.png"), inpaint_mask=grey)
    for crop_x in (0.0, 0.5, 1.0):
        [mask] = dataclasses.replace(item, crop_x=crop_x).load().inpaint_mask
        covered = cover(Image.open(grey).convert("L"), 16, 16, x=crop_x)
        theirs = processor.preprocess(covered, height=16, width=16)
        assert mask.mode == "L"
        assert torch.equal(torch.from_numpy(np.asarray(mask) / np.float32(255)), theirs[0, 0])
    levels = Image.frombytes("L", (256, 1), bytes(range(256)))
    assert black_or_white(levels).tobytes() == b"\0" * 128 + b"\xff" * 128


def test_a_mask_goes_where_its_target_goes(tmp_path):
    """Red is what the mask marks, in each crop, also from a mask of another size."""
    target, mask = Image.new("RGB", (48, 32), "blue"), Image.new("L", (96, 64))
    target.paste("red", (0, 0, 12, 32))
    mask.paste(255, (0, 0, 24, 64))
    target.save(tmp_path / "a.png")
    mask.save(tmp_path / "m.png")
    [item] = items(tmp_path, tmp_path / "a.png", inpaint_mask=tmp_path / "m.png")
    for crop_x in (0.0, 0.25, 0.5):
        media = dataclasses.replace(item, crop_x=crop_x).load()
        is_red = np.asarray(media.frames[0])[..., 0] > 127
        assert np.array_equal(np.asarray(media.inpaint_mask[0]) == 255, is_red)
    with pytest.raises(UserError, match=r"m\.png: its crop is black, so that nothing is regenerated"):
        dataclasses.replace(item, crop_x=1.0).load()


def test_a_mask_of_a_clip_is_one_for_all_frames_or_one_for_each(tmp_path):
    target = shades(tmp_path / "a.mp4", 6)
    mask = Image.new("L", (48, 32), 0)
    mask.paste(255, (0, 0, 24, 32))
    mask.save(tmp_path / "m.png")
    [item] = items(tmp_path, target, inpaint_mask=tmp_path / "m.png")
    masks = item.load().inpaint_mask
    assert len(masks) == item.bucket.num_frames == 3
    assert {each.tobytes() for each in masks} == {masks[0].tobytes()}
    moving = shades(tmp_path / "m.mp4", 6)  # from black to white
    [item] = items(tmp_path, target, dataclasses.replace(RULES, fps=2.0), inpaint_mask=moving)
    assert [each.getextrema() for each in item.load().inpaint_mask] == [(0, 0), (0, 0), (255, 255)]


def test_drawn_masks_are_the_same_in_each_run_and_belong_to_the_content(tmp_path):
    first, copy, other = (noise(tmp_path / name) for name in ("a.png", "b.png", "c.png"))
    copy.write_bytes(first.read_bytes())
    rules = dataclasses.replace(RULES, crop="random", crops_per_item=2)
    made = {path: items(tmp_path, path, rules, random_masks=3) for path in (first, copy, other)}
    drawn = {path: [item.load().inpaint_mask[0].tobytes() for item in made[path]] for path in made}
    assert len(set(drawn[first])) > 3  # neither by crop alone nor by number alone; some are white all over
    assert drawn[first] == drawn[copy] != drawn[other]
    keys = {path: [item.key(TensorCache(None), "vae") for item in made[path]] for path in made}
    assert len(set(keys[first])) == 6
    assert keys[first] == keys[copy]
    # With the crop in the middle, more masks leave the entries of those before as they are.
    few, many = (
        [item.key(TensorCache(None), "vae") for item in items(tmp_path, first, random_masks=count)]
        for count in (2, 4)
    )
    assert many[:2] == few


def test_drawn_masks_have_holes_of_all_kinds_and_are_never_empty():
    width, height = 64, 48
    masks = [random_mask(width, height, counter_generator(0, "test", number)) for number in range(400)]
    covered = np.array([np.asarray(mask).mean() / 255 for mask in masks])
    assert {mask.mode for mask in masks} == {"L"}
    assert {level for mask in masks for _, level in mask.getcolors()} == {0, 255}
    assert covered.min() > 0.01
    assert 25 < (covered == 1).sum() < 90
    assert 0.25 < np.median(covered) < 0.5
    bands = [mask for mask in masks if np.ptp(np.asarray(mask), axis=0).max() == 0 and mask.getbbox()]
    assert len(bands) > (covered == 1).sum()  # of full height; those of full width are as many


def test_a_face_is_shown_whole_at_the_times_of_its_target(tmp_path):
    target = shades(tmp_path / "a.mp4", 8, fps=4)
    face = shades(tmp_path / "f.mp4", 16, fps=8, size=(1280, 32))
    rules = dataclasses.replace(RULES, clip="center", crop="random", fps=2.0)
    [item] = items(tmp_path, target, rules, face=face)
    media = item.load()
    assert {frame.size for frame in media.face} == {(1024, 26)}
    assert [round((frame.getpixel((0, 0))[0] - 8) / 15) for frame in media.face] == [2, 6, 10]
    [other] = items(tmp_path, target, rules, face=shades(tmp_path / "g.mp4", 16, fps=8))
    assert other.identity() != item.identity()


def test_a_face_that_is_shorter_than_its_target_is_a_bad_item(tmp_path):
    target, face = shades(tmp_path / "a.mp4", 8, fps=4), shades(tmp_path / "f.mp4", 2, fps=4)
    plan = planned(tmp_path, target, face=face)
    assert "f.mp4" in plan.bad["a.mp4"]
