"""Entries are checked before any is added: their configs, their folders, and what they would hold."""

import json
from pathlib import Path
from typing import Any

import pytest
from waiting_runs import Waiting

from diffsynth_lite.config import find_config_file
from diffsynth_lite.errors import UserError
from diffsynth_lite.queue.adding import entries_of
from diffsynth_lite.run_folder.folder import RunFolder


def test_a_config_gives_an_entry_with_its_folder_and_variants_those_of_their_own(waiting: Waiting) -> None:
    config = waiting.path / "configs" / "mine.yaml"
    (one,) = entries_of(waiting.queue.workspace, config, ["lora.rank=4"], device="1", num_processes=2)
    assert (one.config, one.folder, one.settings) == ("configs/mine.yaml", "runs/mine", ("lora.rank=4",))
    assert (one.device, one.num_processes) == ("1", 2)
    several = entries_of(waiting.queue.workspace, config, ["lora.rank=4,8", "output.dir=runs/my"])
    assert [entry.folder for entry in several] == ["runs/my-rank4", "runs/my-rank8"]
    assert [entry.settings for entry in several] == [("lora.rank=4",), ("lora.rank=8",)]
    waiting.queue.add(several)
    assert waiting.names("waiting") == ["my-rank4", "my-rank8"]


def test_a_recipe_is_named_as_it_is_and_other_files_elsewhere_are_refused(
    waiting: Waiting, tmp_path: Path
) -> None:
    recipe = find_config_file("qwen_lora.yaml").resolve()
    settings = ["data.path=data", "output.dir=runs/a"]
    (entry,) = entries_of(waiting.queue.workspace, recipe, settings, presets=["style"])
    assert (entry.config, entry.presets) == ("qwen_lora.yaml", ("style",))
    other = tmp_path / "other.yaml"
    other.write_text((waiting.path / "configs" / "mine.yaml").read_text())
    with pytest.raises(UserError, match=r"is outside of the workspace .*; copy it to configs/ there"):
        entries_of(waiting.queue.workspace, other)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["lora.rank=4,four,-1"], ["got 'four'", "got '-1'"]),
        (["output.dir=outputs/a"], ["is not seen in", "give one in runs/, such as runs/a"]),
        (["model.family=theirs.model"], ["theirs.model is code that comes with neither"]),
        (["logging.project=hf_" + "a" * 30], ["a setting holds a secret"]),
        (["output.dir=runs/file"], ["runs/file: is a file"]),
        (["output.dir=runs/photos"], ["is not empty and holds no run"]),
    ],
)
def test_what_would_not_run_is_refused_with_all_its_reasons(
    waiting: Waiting, settings: list[str], words: list[str]
) -> None:
    runs = waiting.path / "runs"
    (runs / "file").touch()
    (runs / "photos").mkdir()
    (runs / "photos" / "a.png").touch()
    with pytest.raises(UserError) as caught:
        entries_of(waiting.queue.workspace, waiting.path / "configs" / "mine.yaml", settings)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device": "cuda:1"}, "device: 'cuda:1': write it as in CUDA_VISIBLE_DEVICES, such as 1 or 0,1"),
        ({"num_processes": 65}, "num_processes: 65: must be from 1 to 64"),
    ],
)
def test_devices_that_are_none_are_refused(waiting: Waiting, given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        entries_of(waiting.queue.workspace, waiting.path / "configs" / "mine.yaml", **given)
    assert str(caught.value) == words


def test_the_folder_of_another_config_is_refused_and_of_the_same_taken(waiting: Waiting) -> None:
    config = waiting.path / "configs" / "mine.yaml"
    run = RunFolder(waiting.path / "runs" / "mine-rank8")
    with run.lock():
        run.write_status("interrupted", exit_code=75, step=1, message="stopped")
    run.fingerprint_file.write_text(
        json.dumps({"lora.rank": 4, "train.warmup_steps": 3, "model.weights": "a"})
    )
    with pytest.raises(UserError) as caught:
        entries_of(waiting.queue.workspace, config, ["lora.rank=4,8"])
    assert str(caught.value) == (
        "output.dir: runs/mine-rank8: holds a run of another config: lora.rank was 4, is 8; "
        "give another folder"
    )
    run.fingerprint_file.write_text(json.dumps({"lora.rank": 8, "train.learning_rate": 1}))
    settings = ["lora.rank=4,8", "resume.allow=[train.learning_rate]"]
    assert len(entries_of(waiting.queue.workspace, config, settings)) == 2
    run.fingerprint_file.write_text("{")
    assert len(entries_of(waiting.queue.workspace, config, ["lora.rank=4,8"])) == 2
