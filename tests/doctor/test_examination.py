"""What the doctor finds in data that are good, messy, bad through and through, or not there."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import diffusers
import pytest
import torch
from messy_data import Workplace, add_images, advice_with, findings, scene
from PIL import Image

from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.data.items import TrainingItem
from diffsynth_lite.data.video import write_video
from diffsynth_lite.doctor.examination import examine
from diffsynth_lite.doctor.findings import Findings
from diffsynth_lite.doctor.machine import machine_table
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.training.data_settings import find_training_records

LONG = "word " * 600


def files_below(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def names_on_sheet(found: Findings) -> Sequence[str]:
    return [entry.name for entry in found.sheet]


def test_buckets_samples_and_steps_follow_repeats_and_weights(workplace: Workplace) -> None:
    wide = add_images(workplace, "wide", 3, (160, 80))
    square = add_images(workplace, "square", 4, (64, 64))
    # The same files and one caption for all, which is as it should be of what is preserved.
    preserved = f"{{path: {square}, weight: 0.5, preserve: true, captions: none}}"
    learned = f"{{path: {wide}, repeats: 2}}, {{path: {square}, weight: 0.5}}"
    found = findings(workplace.config(f"data.sources=[{learned}, {preserved}]"))
    assert [(row.name, row.num_items, row.samples_per_pass, row.num_tokens) for row in found.buckets] == [
        ("64x64", 8, 4.0, 16),
        ("80x48", 3, 6.0, 15),
    ]
    assert [row.batches_per_pass for row in found.buckets] == [2.0, 3.0]
    assert found.facts["one pass"] == "2.5 steps; 100 steps are 40 passes"
    assert [(source.contents, source.passes) for source in found.sources] == [
        ("3 images", 2.0),
        ("4 images", 0.5),
        ("4 images, preserved", 0.5),
    ]
    assert found.facts["width"] == "64 to 160, median 64"
    assert found.num_items == 11
    assert found.advice == []


def test_a_token_budget_makes_batches_of_several_sizes(workplace: Workplace) -> None:
    path = add_images(workplace, "square", 4, (64, 64))
    add_images(workplace, "square/small", 2, (32, 32))
    found = findings(workplace.config(f"data.path={path}", "train.micro_batch_tokens=32"))
    assert {row.name: row.micro_batch_size for row in found.buckets} == {"64x64": 2, "32x32": 8}


def test_bad_files_are_named_with_their_reason_and_the_others_are_shown(workplace: Workplace) -> None:
    path = add_images(workplace, "data", 3)
    torn = workplace.add("data/torn.png", scene(9))
    torn.write_bytes(torn.read_bytes()[:-200])
    workplace.add("data/page.png", scene(8)).write_text("<!doctype html>")
    workplace.add("data/speck.png", scene(7, (9, 9)))
    examination = examine(workplace.config(f"data.path={path}"), sheet_size=50)
    found = examination.findings
    assert found.dropped.keys() == {"torn.png", "page.png", "speck.png"}
    assert "Truncated" in found.dropped["torn.png"]
    assert "not a PNG" in found.dropped["page.png"]
    assert "9x9 pixels are too few" in found.dropped["speck.png"]
    assert found.sources[0].num_dropped == 3
    assert names_on_sheet(found) == ["0.png", "1.png", "2.png"]
    assert found.remedy.endswith("data.on_bad_item=skip data.max_bad_ratio=0.5")
    assert found.small.keys() == {"speck.png"}
    assert not any("cannot be used" in line for line in found.advice)
    with pytest.raises(UserError, match=r"3 of 6 items cannot be used: page\.png: not a PNG"):
        examination.require_usable()


def test_bad_files_that_are_skipped_stop_nothing_until_they_are_too_many(workplace: Workplace) -> None:
    path = add_images(workplace, "data", 3)
    workplace.add("data/page.png", scene(8)).write_text("<!doctype html>")
    workplace.add("data/bare.png", scene(5), caption=None)
    skip = (f"data.path={path}", "data.on_bad_item=skip")
    examination = examine(workplace.config(*skip, "data.max_bad_ratio=0.5"), sheet_size=0)
    examination.require_usable()
    assert "2 items cannot be used, and left out: page.png, bare.png." in examination.findings.advice[0]
    assert examination.findings.dropped["bare.png"] == "no caption: write bare.txt"
    assert examination.findings.sources[0].num_dropped == 2
    with pytest.raises(UserError, match=r"max_bad_ratio is 0\.1"):
        examine(workplace.config(*skip), sheet_size=0).require_usable()


def test_what_is_wrong_in_one_source_does_not_hide_the_others(workplace: Workplace) -> None:
    good = add_images(workplace, "good", 2)
    add_images(workplace, "some", 2)
    workplace.add("some/bare.png", scene(5), caption=None)
    sources = (
        f"data.sources=[{{path: {good}}}, {{path: {workplace.root}/some}}, {{path: {workplace.root}/none}}]"
    )
    examination = examine(workplace.config(sources), sheet_size=50)
    assert [source.cells[1:4] for source in examination.findings.sources] == [
        ["2 images", "2", "0"],
        ["3 images", "2", "1"],
        ["none", "0", "0"],
    ]
    assert examination.findings.num_items == 4
    assert examination.findings.dropped == {"1/bare.png": "no caption: write bare.txt"}
    assert examination.findings.small.keys() == {"1/bare.png"}
    entry = "captions: optional and trigger: WORD in its entry of data.sources"
    assert entry in examination.findings.remedy
    first, second = examination.problems
    assert "bare.png: no caption: write bare.txt" in first
    assert examination.findings.problems == [second]
    alone = workplace.config(f"data.sources=[{{path: {workplace.root}/some}}]")
    assert entry in find_training_records(alone).problems[0]
    assert "none: no such folder" in second
    with pytest.raises(UserError) as caught:
        examination.require_usable()
    assert str(caught.value).splitlines() == [first, second]


@pytest.mark.parametrize(("file", "problem"), [(None, "no images or clips"), ("b.png", "1 of 1 items")])
def test_an_empty_folder_and_one_of_only_bad_files_are_findings_too(
    workplace: Workplace, file: str | None, problem: str
) -> None:
    (workplace.root / "data").mkdir()
    if file:
        workplace.add(f"data/{file}", scene(1)).write_text("<html>")
    examination = examine(workplace.config(f"data.path={workplace.root}/data"), sheet_size=50)
    assert examination.findings.num_items == 0
    assert examination.findings.buckets == []
    with pytest.raises(UserError, match=problem):
        examination.require_usable()


def test_records_that_the_family_cannot_learn_are_a_problem(workplace: Workplace) -> None:
    path = add_images(workplace, "data", 2)
    examination = examine(workplace.config(f"data.path={path}", family="qwen_image_edit"), sheet_size=5)
    assert "2 of kind image" in examination.findings.problems[0]
    assert examination.findings.sources[0].cells[1:4] == ["2 images", "0", "2"]
    assert examination.findings.remedy == ""
    with pytest.raises(UserError, match="2 of kind image"):
        examination.require_usable()


def test_a_distilled_model_is_advised_against(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    path = add_images(workplace, "data", 4)
    monkeypatch.setattr(QwenImage, "distilled", "its files say so; better train the base")
    monkeypatch.setattr(QwenImage, "notice", "its licence excludes somebody")
    notice, advice = findings(workplace.config(f"data.path={path}")).advice
    assert "is distilled to few steps: its files say so; better train the base. Training knows" in advice
    assert notice == "its licence excludes somebody"


def test_captions_too_long_shared_or_without_trigger_are_named(workplace: Workplace) -> None:
    path = add_images(workplace, "data", 1)
    workplace.add("data/long.png", scene(3), LONG + "ohwx")
    for number in range(3):
        workplace.add(f"data/same {number}.png", scene(20 + number), "an ohwx dog")
    found = findings(workplace.config(f"data.path={path}", "data.trigger=ohwx"))
    assert list(found.captions.remarks["too_long"]) == ["long.png"]
    assert list(found.captions.remarks["without_trigger"]) == ["0.png"]
    assert found.captions.same == [("an ohwx dog", 3)]
    assert found.captions.tokens.greatest > 600 > found.captions.limit == 512
    assert found.facts["caption tokens"].endswith("the model sees 512")
    assert "long.png" in advice_with(found, "more than 512 tokens")
    assert "0.png" in advice_with(found, "without the trigger")
    assert "3 items with the same caption 'an ohwx dog'" in advice_with(found, "same caption")
    assert next(entry for entry in found.sheet if entry.name == "0.png").captions == ("ohwx, data 0",)


def test_copies_and_images_that_look_alike_are_grouped_once(workplace: Workplace) -> None:
    path = add_images(workplace, "data", 3)
    shutil.copy(workplace.root / "data/0.png", workplace.root / "data/copy.png")
    (workplace.root / "data/copy.txt").write_text("another caption")
    workplace.add("data/again.jpg", Image.open(workplace.root / "data/1.png"), "one more")
    found = findings(workplace.config(f"data.path={path}"))
    assert found.equal == [["0.png", "copy.png"]]
    assert found.alike == [["1.png", "again.jpg"]]


def test_cropped_enlarged_and_small_items_are_remarked_where_they_are_shown(workplace: Workplace) -> None:
    path = add_images(workplace, "data", 1)
    workplace.add("data/flat.png", scene(2, (300, 60)), "a flat one")
    workplace.add("data/small.png", scene(3, (32, 32)), "a small one")
    found = findings(workplace.config(f"data.path={path}"))
    remarks = {entry.name: entry.remarks for entry in found.sheet}
    assert remarks == {
        "0.png": [],
        "flat.png": ["67% of 300x60 is cropped"],
        "small.png": ["only 32x32"],
    }
    assert "flat.png" in advice_with(found, "of which the crop takes more than 30%")
    assert "small.png" in advice_with(found, "fewer pixels than the resolution")
    enlarged = findings(workplace.config(f"data.path={path}", "data.upscale=true"))
    assert "enlarged 2 times from 32x32" in next(
        entry.remarks for entry in enlarged.sheet if entry.name == "small.png"
    )
    assert "small.png" in advice_with(enlarged, "enlarged")


def test_an_item_at_several_sizes_and_crops_counts_as_often_and_is_named_once(workplace: Workplace) -> None:
    path = add_images(workplace, "data", 2, (300, 60))
    crops = ("data.crop=random", "data.crops_per_item=2", "data.resolutions=[32,64]", "data.tag_shuffles=1")
    found = findings(workplace.config(f"data.path={path}", *crops))
    assert found.num_items == 8
    assert sum(row.num_items for row in found.buckets) == 8
    assert advice_with(found, "crop takes").startswith("2 items")


def test_it_needs_no_weights_and_writes_nothing_but_the_index(workplace: Workplace) -> None:
    path = add_images(workplace, "data", 2)
    bare = Workplace(root=workplace.root, models=workplace.root / "bare")
    shutil.copytree(
        workplace.models / "qwen_image",
        bare.models / "qwen_image",
        ignore=shutil.ignore_patterns("*.safetensors"),
    )
    config = bare.config(f"data.path={path}")
    before = files_below(workplace.root)
    assert findings(config).num_items == 2
    after = files_below(workplace.root)
    assert after.keys() - before.keys() == {workplace.root / "cache" / "index.sqlite"}
    assert {path: after[path] for path in before} == before


def test_a_second_look_decodes_only_what_it_shows(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add_images(workplace, "data", 5)
    workplace.add("data/again.jpg", Image.open(workplace.root / "data/1.png"), "one more")
    config = workplace.config(f"data.path={path}")
    first = findings(config, 2)
    loaded: list[str] = []
    load = TrainingItem.load

    def counting(item: TrainingItem) -> object:
        loaded.append(item.name)
        return load(item)

    monkeypatch.setattr(TrainingItem, "load", counting)
    second = findings(config, 2)
    assert loaded == names_on_sheet(second) == names_on_sheet(first)
    assert second.alike == first.alike == [["1.png", "again.jpg"]]
    workplace.add("data/1.png", scene(77), "changed")
    assert findings(config, 0).alike == []
    assert loaded[2:] == ["1.png"]


def test_edit_pairs_show_input_and_target_and_are_counted_by_the_sizes_of_both(workplace: Workplace) -> None:
    after = add_images(workplace, "after", 3, (64, 64))
    before = add_images(workplace, "before", 2, (96, 96))
    workplace.add("before/2.png", scene(6, (128, 64)), caption=None)
    given = (f"data.path={after}", f"data.input_dirs=[{before}]")
    found = findings(workplace.config(*given, family="qwen_image_edit"))
    assert found.sources[0].contents == "3 edit pairs"
    shown = found.sheet[2].images
    assert {kind: image.size for kind, image in shown.items()} == {"input": (128, 64), "target": (64, 64)}
    # An input of any size is encoded at about a megapixel, of which 16 x 16 pixels are a token.
    assert [(row.name, row.num_items, row.num_tokens) for row in found.buckets] == [
        ("64x64 from 1024x1024", 2, 4 * 4 + 64 * 64),
        ("64x64 from 1440x736", 1, 4 * 4 + 90 * 46),
    ]
    assert "input images of fewer shapes" in advice_with(found, "1440x736")
    alone = findings(workplace.config(*given, "train.micro_batch_size=1", family="qwen_image_edit"))
    assert alone.advice == []


def test_clips_are_listed_with_length_and_rate_and_shown_as_strips(workplace: Workplace) -> None:
    (workplace.root / "clips").mkdir()
    for number, (num_frames, fps) in enumerate([(20, 10), (5, 10), (40, 20)]):
        frames = [scene(number * 50, (64, 48))] * num_frames
        write_video(workplace.root / f"clips/{number}.mp4", frames, fps=fps)
        (workplace.root / f"clips/{number}.txt").write_text(f"clip {number}")
    wanted = ("data.frame_counts=[9]", "data.fps=10", "data.resolutions=[48]")
    found = findings(workplace.config(f"data.path={workplace.root}/clips", *wanted, family="wan"))
    assert found.sources[0].contents == "3 clips"
    assert found.facts["seconds"] == "2"
    assert found.facts["frames per second"] == "10 to 20, median 20"
    assert [(row.name, row.num_items) for row in found.buckets] == [("48x48x9", 2)]
    assert "5 frames are too few: the least is 9" in found.dropped["1.mp4"]
    assert [entry.images["target"].size for entry in found.sheet] == [(5 * 48, 48)] * 2


def test_versions_memory_devices_and_disk_are_listed(tmp_path: Path) -> None:
    missing = tmp_path / "not" / "there"
    facts = machine_table([missing])
    assert f"torch {torch.__version__}" in facts["packages"]
    assert f"diffusers {diffusers.__version__}" in facts["packages"]
    assert facts["free memory"].endswith("GiB")
    assert any(name.startswith("GPU") for name in facts)
    assert facts["free disk"] == f"{format_bytes(shutil.disk_usage(tmp_path).free)} at {missing}"


def test_a_torch_that_cannot_be_imported_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    facts = machine_table()
    assert facts["torch"].startswith("cannot be imported: ")
    assert f"torch {torch.__version__}" in facts["packages"]
