"""The cache filled by parts, each in a process that knows of no other: the same cache, and the same run."""

import json
import logging
from itertools import count
from pathlib import Path

import pytest
from tiny_run import TinyRun, checkpoint_tensors, differing, garble_media, tiny_image

from diffsynth_lite.cli.main import main
from diffsynth_lite.data.media_index import MediaIndex
from diffsynth_lite.data.records import Part, part_index


def fill(run: TinyRun, *arguments: str) -> int:
    return main(["cache", "fill", "--config", str(run.config), *arguments])


def entries(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}


def names_in(part: Part, number: int) -> list[str]:
    """The first image names that fall into a part."""
    names = (f"{place}.png" for place in count() if part.owns(f"{place}.png"))
    return [next(names) for _ in range(number)]


def add_image(run: TinyRun, name: str) -> Path:
    path = run.root / "data" / name
    tiny_image(80, 48, 10 + int(path.stem)).save(path)
    path.with_suffix(".txt").write_text("a red circle")
    return path


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose headers or bytes are asked for."""
    names: list[str] = []
    for ask in ("facts", "content"):
        original = getattr(MediaIndex, ask)

        def asking(self: MediaIndex, path: Path, original: object = original) -> object:
            names.append(path.name)
            return original(self, path)  # type: ignore[operator]

        monkeypatch.setattr(MediaIndex, ask, asking)
    return names


def test_a_run_on_a_cache_filled_by_parts_is_the_run_on_its_own_bit_for_bit(
    tiny_run: TinyRun, looked_at: list[str], caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    held_out = tiny_run.root / "held out"
    held_out.mkdir()
    tiny_image(80, 48, 60).save(held_out / "0.png")
    (held_out / "0.txt").write_text("never trained on")
    settings = ("train.steps=1", f"validation.data={held_out}", "data.caption_dropout=0.2")
    assert tiny_run.train(*settings) == 0
    folder = tiny_run.root / "by parts"
    by_parts = (*settings, f"data.cache_dir={folder}", f"output.dir={tiny_run.root / 'again'}")
    seen: dict[int, set[str]] = {}
    for index in (2, 0, 2, 1):
        looked_at.clear()
        assert fill(tiny_run, "--part", f"{index}/3", *by_parts) == 0
        seen[index] = set(looked_at)
    data = sorted(path.name for path in (tiny_run.root / "data").glob("*.png"))
    assert seen == {index: {name for name in data if part_index(name, 3) == index} for index in range(3)}
    assert entries(folder) == entries(tiny_run.root / "cache")
    assert not (folder / "index.sqlite").exists()

    request.getfixturevalue("refuse_encoders")
    garble_media(tiny_run.root / "data")
    garble_media(held_out)
    caplog.set_level(logging.INFO)
    assert fill(tiny_run, *by_parts) == 0
    assert f"the cache holds all {len(entries(folder))} entries that are needed" in caplog.text
    assert list((folder / "parts").iterdir()) == []
    assert tiny_run.train(*by_parts) == 0
    again = tiny_run.root / "again"
    tensors = checkpoint_tensors(tiny_run.folder, 1)
    assert tensors
    assert differing(tensors, checkpoint_tensors(again, 1)) == []
    contracts = [json.loads((run / "contract.json").read_text()) for run in (tiny_run.folder, again)]
    assert contracts[0] == contracts[1]
    assert tiny_run.metrics() == tiny_run.metrics(again)


def test_a_part_without_items_is_in_the_cache_at_once(tiny_run: TinyRun) -> None:
    names = [f"{place}.png" for place in range(5)]
    empty = next(index for index in range(64) if all(part_index(name, 64) != index for name in names))
    assert fill(tiny_run, "--part", f"{empty}/64", "validation.prompts=[]") == 0
    assert entries(tiny_run.root / "cache") == {}


def test_bad_items_stop_only_their_own_part_and_are_left_out_where_the_run_does(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = Part(0, 2), Part(1, 2)
    for name in names_in(bad, 3):
        add_image(tiny_run, name).write_bytes(b"no image")
    assert fill(tiny_run, "--part", str(good)) == 0
    assert fill(tiny_run, "--part", str(bad)) == 2
    assert f"part 1/2: 3 of 3 items cannot be used: {names_in(bad, 1)[0]}: " in caplog.text
    caplog.clear()
    assert fill(tiny_run, "--part", str(bad), "data.on_bad_item=skip", "data.max_bad_ratio=0.01") == 0
    assert "They are left out" in caplog.text
    assert not tiny_run.folder.exists()
    listed = tiny_run.root / "cache" / "parts" / "1-of-2.run.quarantine.jsonl"
    assert len(listed.read_text().splitlines()) == 3
    assert fill(tiny_run, "data.on_bad_item=skip", "data.max_bad_ratio=0.01") == 2
    assert "Too many to skip, as data.max_bad_ratio is 0.01" in caplog.text


def test_a_part_is_no_process_of_a_launcher_but_may_be_a_task_of_srun(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert fill(tiny_run, "--part", "0/2", "data.cache=false") == 2
    assert "data.cache: is false in" in caplog.text
    with monkeypatch.context() as launched:
        launched.setenv("WORLD_SIZE", "2")
        assert fill(tiny_run, "--part", "0/2") == 2
    assert "cache fill --part: needs one process, and WORLD_SIZE=2 in the environment" in caplog.text
    for name, value in {"STEP_NUM_TASKS": "2", "PROCID": "1", "LOCALID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert fill(tiny_run, "--part", "1/2") == 0
