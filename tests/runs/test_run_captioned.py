"""Training data that are generated from captions, and the assistant of a distilled model that learns them."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from PIL import Image
from tiny_run import REPOSITORY, TinyRun

from diffsynth_lite.cli.main import main
from diffsynth_lite.config import load_config
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.updates import pairs_of
from diffsynth_lite.sampling import session
from diffsynth_lite.sampling.captioned import CaptionedItem, missing_items
from diffsynth_lite.training.checks import bind_family
from diffsynth_lite.training.distilled import read_training_adapter
from diffsynth_lite.training.lora_file import read_lora

SMALL = ("--size", "32x32", "--steps", "2", "--guidance", "1")
CAPTIONS = ("a red circle", "Ein Hündchen,  blau", "a red circle", "", "a ring")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    file = tmp_path / "captions.txt"
    file.write_text("\n".join(CAPTIONS), encoding="utf-8")
    return file


def test_an_item_depends_on_its_caption_and_the_seed_and_is_made_once(
    tiny_run: TinyRun,
    captions: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = ("sample", *tiny_run.arguments, *SMALL, "--seed", "3", "--from-captions")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*asked, str(captions), "--out", str(whole)]) == 0
    assert f"Items: {whole}, 3 new, 0 were there" in caplog.text
    made = content(whole)
    stems = sorted({Path(name).stem for name in made})
    assert [re.sub("-[0-9a-f]{8}$", "", stem) for stem in stems] == [
        "a-red-circle",
        "a-ring",
        "ein-h-ndchen-blau",
    ]
    assert {made[f"{stem}.txt"].decode().strip() for stem in stems} == set(filter(None, CAPTIONS))
    assert len({made[f"{stem}.png"] for stem in stems}) == 3
    parameters = []
    for stem in stems:
        with Image.open(whole / f"{stem}.png") as image:
            assert image.size == (32, 32)
            parameters.append(image.info["parameters"])
    assert parameters[0].startswith("a red circle\nSteps: 2")
    assert len({text.partition("Seed: ")[2] for text in parameters}) == 3
    # In another order and one at a time; the second starts where the first was stopped.
    monkeypatch.setattr(session, "_ITEMS_AT_ONCE", 1)
    captions.write_text("\n".join(CAPTIONS[::-1]), encoding="utf-8")
    shutil.copytree(whole, parts)
    for name in (f"{stems[0]}.png", f"{stems[2]}.png", f"{stems[2]}.txt"):
        (parts / name).unlink()
    kept = (parts / f"{stems[1]}.png").stat().st_mtime_ns
    assert main([*asked, str(captions), "--out", str(parts)]) == 0
    assert content(parts) == made
    assert (parts / f"{stems[1]}.png").stat().st_mtime_ns == kept


def test_a_folder_of_captions_or_a_data_set_gives_the_names_of_its_items(tmp_path: Path) -> None:
    expected = [CaptionedItem(name="one", caption="a red circle")]
    Image.new("RGB", (8, 8)).save(tmp_path / "one.png")
    row = {"file_name": "one.png", "text": "a red circle"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row))
    assert missing_items(tmp_path, tmp_path / "out") == (expected, 0)
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "one.txt").write_text("a red circle\n")
    assert missing_items(texts, tmp_path / "out") == (expected, 0)
    assert missing_items(texts, shutil.copytree(tmp_path, tmp_path / "made")) == ([], 1)
    (tmp_path / "made" / "one.txt").write_text("a square")
    with pytest.raises(UserError, match="one was generated from another caption; remove it"):
        missing_items(texts, tmp_path / "made")


REFUSED = {
    "--from-captions {captions}": "give --out, at most one --seed",
    "--from-captions {captions} --out x --prompt a": "none of --prompt, --num",
    "--from-captions {captions} --out x --scale 0,1,2": "at most one --seed and --scale",
    "--from-captions {captions} --out x --seed 1,2": "at most one --seed and --scale",
    "--from-captions {data} --out {data}": "is also --out; name another folder",
    "--from-captions {empty} --out x": "empty.txt: holds no caption",
    "--from-captions {data}/nowhere --out x": "nowhere: no such folder",
    "--from-captions {captions}.bin --out x": "captions.txt.bin: not UTF-8 text",
    "--from-captions {captions} --out {captions}/x": "captions.txt/x cannot be made: Not a directory",
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.items())
def test_captions_that_cannot_be_read_are_one_line(
    tiny_run: TinyRun, captions: Path, caplog: pytest.LogCaptureFixture, arguments: str, message: str
) -> None:
    (captions.parent / "empty.txt").write_text("\n \n")
    Path(f"{captions}.bin").write_bytes(b"\xff")
    places = {"captions": captions, "data": tiny_run.root / "data", "empty": captions.parent / "empty.txt"}
    assert main(["sample", *tiny_run.arguments, *arguments.format(**places).split()]) == 2
    assert message in caplog.messages[-1]


def test_the_documented_commands_make_an_assistant_that_stays_frozen_in_another_run(
    tiny_run: TinyRun, captions: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    page = (REPOSITORY / "docs" / "methods.md").read_text(encoding="utf-8")
    section = page.partition("## Training assistants for distilled models")[2].partition("\n## ")[0]
    commands = [shlex.split(line) for line in section.splitlines() if line.startswith("diffsynth-lite ")]
    assert [words[1] for words in commands] == ["sample", "train", "train"]
    monkeypatch.chdir(tiny_run.root)
    few = ("train.steps=1", *tiny_run.settings)
    shutil.copy(tiny_run.config, "turbo.yaml")
    tiny_run.root.joinpath("data").rename("my_images")
    for words in commands:
        assert main([*words[1:], *(few if words[1] == "train" else ())]) == 0
    assert len(list(Path("turbo_images").glob("*.png"))) == 3
    config = load_config("runs/mine/resolved.yaml", []).config
    assert config.data.path == "my_images"
    family = bind_family(config)
    adapter = read_training_adapter(config, family)
    assert adapter is not None
    # What our own run left, alpha included, is what is frozen.
    trained = pairs_of(*read_lora(family, "runs/assistant/lora", key="--lora"))
    frozen = pairs_of(*adapter)
    assert frozen.keys() == trained.keys()
    assert all(pair.norm and pair.distance(frozen[layer]) == 0 for layer, pair in trained.items())
    assert Path("runs/mine/lora/pytorch_lora_weights.safetensors").is_file()
