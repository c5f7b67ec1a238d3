"""Records are read by all processes with one outcome."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.errors import Problems, RunStoppedError
from diffsynth_lite.training.dataset import read_records


def config_of(folder: Path) -> Config:
    """Data and held-out data of which no folder is there."""
    file = folder / "run.yaml"
    file.write_text(
        f"model: {{family: qwen_image, path: {folder}/model}}\n"
        f"data: {{path: {folder}/pictures, cache_dir: {folder}/cache}}\n"
        f"validation: {{data: {folder}/held out}}\noutput: {{dir: {folder}/run}}\n"
    )
    return load_config(file, ()).config


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What this process, which is not the main one, tells the others; they tell it what ``others`` holds."""
    sent: list[Any] = []
    others: list[Any] = []

    def gather(outcome: list[Any]) -> list[Any]:
        sent.append(outcome)
        return [*others, *outcome]

    monkeypatch.setattr(
        "diffsynth_lite.training.distributed.agreement.broadcast_object_list", lambda _: [(None, "")]
    )
    monkeypatch.setattr("diffsynth_lite.training.distributed.agreement.gather_object", gather)
    return [sent, others]


PROCESS = SimpleNamespace(num_processes=2, process_index=1, is_main_process=False)


def test_all_that_is_wrong_with_the_data_of_any_process_is_a_problem_of_each(
    tmp_path: Path, exchanged: list[Any]
) -> None:
    sent, others = exchanged
    others.append((None, "", (["data.path: 3.png has no caption"], [])))
    problems = Problems()
    assert read_records(config_of(tmp_path), PROCESS, problems) == ([], [])
    text = "\n".join(problems)
    assert "data.path: 3.png has no caption" in text
    assert f"{tmp_path}/pictures" in text
    assert f"{tmp_path}/held out" in text
    assert len(sent) == 1


def test_bad_data_do_not_let_a_process_go_on_where_another_has_ended(
    tmp_path: Path, exchanged: list[Any]
) -> None:
    """The next exchange would wait for that one."""
    sent, others = exchanged
    others.append(("other", "Input/output error", None))
    with pytest.raises(RunStoppedError, match="Input/output error"):
        read_records(config_of(tmp_path), PROCESS, Problems())
    assert len(sent) == 1
