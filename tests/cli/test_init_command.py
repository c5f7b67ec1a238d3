"""``diffsynth-lite init``: the config that it writes, which the doctor takes as it is."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from PIL import Image
from tiny_run import tiny_image

from diffsynth_lite.captioning.report import CaptioningStatus, CaptionReport
from diffsynth_lite.cli.arguments import command
from diffsynth_lite.cli.main import main
from diffsynth_lite.config import load_config
from diffsynth_lite.data.video import write_video
from diffsynth_lite.doctor import model_choice
from diffsynth_lite.doctor.starting_point import look_at, starting_config, starting_point
from diffsynth_lite.pipelines import family_names, load_family
from diffsynth_lite.training.data_settings import find_training_records

CARD_HERE = model_choice.card_here


@pytest.fixture(autouse=True)
def without_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own card changes nothing."""
    monkeypatch.setattr(model_choice, "card_here", lambda: None)


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder below the working folder, with three images and their captions."""
    monkeypatch.chdir(tmp_path)
    folder = Path("my images")
    folder.mkdir()
    for number in range(3):
        tiny_image(120, 90 + number, 10 + number).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"ohwx: a circle, no. {number} # red")
    return folder


def test_what_it_writes_passes_the_doctor_as_it_is(
    images: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["init", str(images), "--preset", "likeness", "--preset", "few_pictures"]) == 0
    printed = capsys.readouterr().out
    assert "my images: 3 images; 120 x 90 to 120 x 92 pixels" in printed
    assert "for qwen_image, as the folder holds images" in printed
    for name in ("doctor", "plan", "train"):
        assert f"  {command(name, '--config', 'my images_lora.yaml')}\n" in printed
    out = Path("my images_lora.yaml")
    loaded = load_config(out)
    config, recipe = loaded.config, load_config("qwen_lora.yaml").config
    assert loaded.warnings == ()
    assert (config.data.path, config.data.trigger, config.data.resolutions) == ("my images", "ohwx", [64])
    assert config.validation.prompts == ["ohwx: a circle, no. 0 # red", recipe.validation.prompts[-1]]
    assert (config.output.dir, config.logging.run_name) == ("runs/my images_lora", "my images")
    assert (config.lora.rank, config.lora.dropout, config.train.steps) == (8, 0.1, 500)
    assert (config.model, config.objective, config.memory) == (recipe.model, recipe.objective, recipe.memory)
    assert main(["doctor", "--config", str(out), f"model.path={tiny_model}"]) == 0
    assert "3 images" in capsys.readouterr().out
    # It never overwrites.
    text = out.read_text()
    refused = "already exists and was not changed; choose another name"
    for arguments, message in (
        ([], f"{out} {refused} with --out NAME.yaml"),
        (["--out", str(out)], f"--out {out}: {refused}"),
        (["--gpu", "4900"], "--gpu 4900: not known"),
        (["--family", "fluxx"], "fluxx"),
    ):
        assert main(["init", str(images), *arguments]) == 2
        assert message in caplog.messages[-1]
    assert out.read_text() == text


def test_captions_that_are_missing_are_to_be_written_by_a_command(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*arguments: str) -> str:
        assert main(["init", str(images), *arguments]) == 0
        return capsys.readouterr().out

    assert "no caption" not in printed("--out", "all.yaml")
    for text in images.glob("*.txt"):
        text.unlink()
    write = "diffsynth-lite caption 'my images' --model Qwen/Qwen3-VL-4B-Instruct writes captions; or"
    assert write in printed("--out", "none.yaml")
    images.rename("before")
    images.mkdir()
    tiny_image(120, 90, 10).save(images / "0.png")
    inputs = ["--inputs", "before"]
    assert write.replace(" --model", f" {shlex.join(inputs)} --model") in printed("--out", "e.yaml", *inputs)


def test_the_captions_trigger_and_goal_are_those_of_the_command_that_wrote_them(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("my images", "--trigger=ohwx woman", "--goal", "style")
    status = CaptioningStatus(state="finished", process="", arguments=words)
    CaptionReport(images).write_status(status)
    assert main(["init", str(images), "--out", "mine.yaml"]) == 0
    assert load_config("mine.yaml").config.data.trigger == "ohwx woman"
    assert (
        "> The captions were written with --goal style: --preset style has settings"
        in capsys.readouterr().out
    )


def test_editors_find_the_schema_of_what_it_writes(images: Path) -> None:
    assert main(["init", str(images), "--out", "mine.yaml"]) == 0
    first = Path("mine.yaml").read_text().splitlines()[0]
    schema = urlsplit(first.removeprefix("# yaml-language-server: $schema="))
    assert "properties" in json.loads(Path(unquote(schema.path)).read_text())


@pytest.mark.parametrize(
    ("clips", "captioned", "arguments", "family", "strays", "ratio"),
    [
        (["a.MOV"], "012", [], "qwen_image", "a.MOV", "0.25"),
        (["a.MOV", "b.mov", "c.mp4", "d.mp4"], "012", [], "qwen_image", "a.MOV; b.mov; c.mp4; d.mp4", "0.58"),
        (["a.mp4", "b.mp4"], "0ab", [], "wan", "", ""),  # images are clips of one frame there
        (["a.mp4", "b.mp4"], "0ab", ["--family", "wan_i2v"], "wan_i2v", "0.png; 1.png; 2.png", "0.6"),
        (["a.mp4", "b.mp4"], "0ab", ["--family", "sdxl"], "sdxl", "a.mp4; b.mp4", "0.8"),
        (["a.mp4"], "0a", [], "qwen_image", "a.mp4", "0.75"),
        (["a.mp4", "b.mp4"], "", [], "qwen_image", "a.mp4; b.mp4", "1"),
    ],
)
def test_the_majority_of_what_can_be_used_decides(
    images: Path,
    clips: list[str],
    captioned: str,
    arguments: list[str],
    family: str,
    strays: str,
    ratio: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (images / "notes.md").touch()
    for name in clips:
        path = images / name
        write_video(path, [tiny_image(96, 64, 10)] * 20, fps=16) if name[1:] == ".mp4" else path.touch()
    for stem in "012abcd":
        (images / f"{stem}.txt").unlink(missing_ok=True)
        if stem in captioned:
            (images / f"{stem}.txt").write_text("ohwx")
    assert main(["init", str(images), "--out", "mine.yaml", *arguments]) == 0
    config, printed = load_config("mine.yaml").config, capsys.readouterr().out
    assert config.model.family == family
    advice = f"move them out of the folder, or set data.on_bad_item=skip data.max_bad_ratio={ratio}\n"
    line = f"> {family} does not train on {strays}; a run stops at such files: {advice}"
    assert (line in printed) == bool(strays)
    assert caplog.text.count("skipped files: 1 md") == 1


@pytest.mark.parametrize(
    ("arguments", "extends", "words"),
    [
        (
            ["--gpu", "4090"],
            "qwen_24gb.yaml",
            "  sdxl: stabilityai/stable-diffusion-xl-base-1.0, 13.9 GB to ",
        ),
        (
            ["--gpu", "RTX 4070"],
            "qwen_12gb.yaml",
            "Base model: Qwen/Qwen-Image, 57.7 GB to download, Apache-2",
        ),
        (["--gpu", "5090", "--family", "flux"], "flux_24gb.yaml", "for flux, with the recipe for the 32 GB "),
        (["--gpu", "M2 24GB", "--family", "flux"], "flux_16gb.yaml", "the recipe for the 24 GB of your M2"),
        (["--gpu", "RTX 3050 6GB", "--family", "flux"], "flux_lora.yaml", "which has no recipe for the 6 GB"),
        (
            ["--gpu", "RTX 3050 6GB"],
            "anima_lora.yaml",
            "nor any other; this one is for 8 GB, plan shows what fits",
        ),
    ],
)
def test_the_recipe_is_one_for_the_card(
    images: Path, arguments: list[str], extends: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(images), "--out", "mine.yaml", *arguments]) == 0
    text, printed = Path("mine.yaml").read_text(), capsys.readouterr().out
    assert f"\nextends: {extends}" in text
    assert words in printed
    for shown in (text, printed):
        assert f"{command('plan', '--config', 'mine.yaml', *arguments[:2])}\n" in shown


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("NVIDIA GeForce RTX 4090, 24564\nNVIDIA T4, 15360\n", "RTX 4090"),
        ("NVIDIA GeForce RTX 3060, 12288\n", "RTX 3060 12GB"),
        ("Graphics Card of Tomorrow, 99999\n", "Graphics Card of Tomorrow"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", None),
    ],
)
def test_the_driver_is_asked_for_the_card(
    answer: str, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    gpu = CARD_HERE()
    assert (gpu and gpu.name) == found


def test_a_folder_without_a_name_gets_one(images: Path, caplog: pytest.LogCaptureFixture) -> None:
    start = starting_point(images, None)
    found = replace(look_at(images, start, {}), path=Path("/"))
    out = Path("lora.yaml")
    out.write_text(starting_config(found, start, out=out, commands=[], presets=[]))
    assert load_config(out).config.logging.run_name == "lora"
    assert main(["init", "/"]) == 2
    assert caplog.messages[-1].startswith("lora.yaml already exists")


def test_clips_that_are_short_and_small_get_sizes_that_they_fill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("clips").mkdir()
    for name, num_frames in (("short", 20), ("long", 100)):
        write_video(Path("clips", f"{name}.mp4"), [tiny_image(96, 64, 10)] * num_frames, fps=16)
    Path("clips", "short.txt").write_text("a circle")
    assert main(["init", "clips", "--out", "mine.yaml", "--preset", "motion"]) == 0
    printed = capsys.readouterr().out
    assert "clips: 2 clips, 1 of which cannot be used yet; 96 x 64 to 96 x 64 pixels" in printed
    assert "> clips: 1 of 2 items cannot be used: long.mp4: no caption: write long.txt" in printed
    data = load_config("mine.yaml").config.data
    assert (data.width, data.height, data.resolutions) == (None, None, [64])
    assert (data.frame_counts, data.trigger) == ([17, 81], None)
    assert "extends: wan_t2v_lora.yaml" in Path("mine.yaml").read_text()
    # Where clips are learned from their first frame, previews need one to start from.
    assert main(["init", "clips", "--out", "i2v.yaml", "--family", "wan_i2v"]) == 0
    assert "Wrote i2v.yaml and i2v_start.png, for wan_i2v." in capsys.readouterr().out
    assert load_config("i2v.yaml").config.validation.inputs == ["i2v_start.png"] * 2
    with Image.open("i2v_start.png") as start:
        assert start.size == (96, 64)


@pytest.mark.parametrize("has_table", [False, True])
def test_images_that_come_from_others_get_an_edit_model(
    has_table: bool, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = images / "before" if has_table else Path("before")
    before.mkdir()
    for number in range(3):
        tiny_image(96, 64, 40 + number).save(before / f"{number}.png")
    if has_table:
        rows = [{"file_name": f"{n}.png", "input": f"before/{n}.png", "text": "redder"} for n in range(3)]
        (images / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
        for number in range(3):
            (images / f"{number}.txt").unlink()
        arguments, family = ["--family", "flux_kontext"], "flux_kontext"
    else:
        arguments, family = ["--inputs", "before"], "qwen_image_edit"
    assert main(["init", str(images), "--out", "mine.yaml", *arguments]) == 0
    assert "my images: 3 images; 120 x 90 to 120 x 92 pixels" in capsys.readouterr().out
    loaded = load_config("mine.yaml")
    config = loaded.config
    assert loaded.warnings == ()
    assert config.model.family == family
    assert config.validation.inputs == [f"{before}/0.png"] * 2
    found = find_training_records(config)
    assert found.problems == []
    assert [record.inputs for record in found.records] == [(before / f"{n}.png",) for n in range(3)]


def test_images_with_layers_get_a_model_that_generates_layers(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [Path("behind"), Path("above")]
    for folder in folders:
        folder.mkdir()
        for number in range(3):
            tiny_image(120, 90 + number, 40 + number).save(folder / f"{number}.png")
    named = [argument for folder in folders for argument in ("--layers", str(folder))]
    assert main(["init", str(images), "--out", "mine.yaml", *named]) == 0
    assert "for qwen_image_layered, as its images have layers" in capsys.readouterr().out
    loaded = load_config("mine.yaml")
    assert loaded.warnings == ()
    assert loaded.config.validation.inputs == [f"{images}/0.png"] * 2
    found = find_training_records(loaded.config)
    assert found.problems == []
    assert [record.layers for record in found.records] == [
        tuple(folder / f"{number}.png" for folder in folders) for number in range(3)
    ]


@pytest.mark.parametrize("has_files", [False, True])
def test_images_of_which_parts_are_painted_again_get_masks(
    has_files: bool, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--family", "flux_fill"]
    if has_files:
        Path("holes").mkdir()
        for number in range(3):
            Image.new("L", (120, 90), 255).save(f"holes/{number}.png")
        arguments = ["--masks", "holes"]
    assert main(["init", str(images), "--out", "mine.yaml", *arguments]) == 0
    assert ("and mine_mask.png, for flux_fill" in capsys.readouterr().out) == (not has_files)
    loaded = load_config("mine.yaml")
    config, found = loaded.config, find_training_records(loaded.config)
    assert (loaded.warnings, found.problems) == ((), [])
    assert {record.kind for record in found.records} == {"inpaint"}
    assert [record.random_masks for record in found.records] == [0 if has_files else 4] * 3
    assert config.validation.inputs == [str(found.records[0].target)] * 2
    mask = str(found.records[0].inpaint_mask) if has_files else "mine_mask.png"
    assert config.validation.inpaint_masks == [mask] * 2
    with Image.open(mask) as drawn, Image.open(found.records[0].target) as image:
        assert (drawn.mode, drawn.getextrema()[1]) == ("L", 255)
        assert has_files or drawn.size == image.size


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["my images", "--masks", "empty", "--inputs", "empty"], "--masks: are of images without"),
        (["my images", "--masks", "empty", "--family", "flux"], "--family flux: has no starting point for"),
        (["my images", "--inputs", "empty", "--inputs", "empty"], "--inputs: has an entry twice; give each"),
        (["nothing"], "nothing: no such folder; check the path (working folder: "),
        (["empty"], "empty: no images or clips among its 0 files"),
        (["my images", "--family", "wan_i2v"], "--family wan_i2v: has no starting point for a folder of"),
        (
            ["my images", "--family", "flux_kontext"],
            "my images: no metadata file for input; --inputs FOLDER names",
        ),
        (
            ["my images", "--family", "qwen_image_layered"],
            "my images: no metadata file for layers; --layers FOLDER names",
        ),
        (["my images", "--layers", "x", "--inputs", "y"], "--layers: are of images without --inputs"),
        (
            ["my images", "--preset", "motion"],
            "--preset motion: is for cogvideox, hunyuan_video, hunyuan_video_15, hunyuan_video_i2v, ",
        ),
        (["my images", "--preset", "x"], "--preset x: There are few_pictures, "),
        (["my images", "--out", "none/mine.yaml"], "--out none/mine.yaml: cannot be written: No such file"),
    ],
)
def test_what_it_cannot_do_is_an_error_in_a_line_and_nothing_is_written(
    arguments: list[str], reason: str, images: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path("empty").mkdir()
    assert main(["init", *arguments]) == 2
    assert caplog.messages[-1].startswith(reason)
    assert list(Path().rglob("*.yaml")) == []


@pytest.mark.parametrize("name", family_names())
def test_every_family_has_a_starting_point_of_its_own(name: str) -> None:
    recipes = load_family(name).starting_recipes
    assert recipes
    assert {load_config(recipe).config.model.family for recipe in recipes.values()} == {name}
