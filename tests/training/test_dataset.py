"""Records are read by all processes with one outcome."""

from pathlib import Path
from typing import Any

import pytest
from pretended_processes import PretendedProcesses

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.errors import Problems, RunStoppedError
from diffsynth_lite.training.encoding.dataset import ReadRecords, read_records


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
def processes(monkeypatch: pytest.MonkeyPatch) -> PretendedProcesses:
    """One on each of two machines."""
    return PretendedProcesses(monkeypatch, num_machines=2, num_local=1)


def test_all_that_is_wrong_with_the_data_of_any_process_is_a_problem_of_each(
    tmp_path: Path, processes: PretendedProcesses
) -> None:
    def read(accelerator: Any, _: int) -> str:
        problems = Problems([] if accelerator.is_main_process else ["data.path: 3.png has no caption"])
        assert read_records(config_of(tmp_path), accelerator, problems) == (ReadRecords(), ReadRecords())
        return "\n".join(problems)

    for text in processes.run(read):
        assert "machine 1: data.path: 3.png has no caption" in text
        assert f"{tmp_path}/pictures" in text
        assert f"{tmp_path}/held out" in text
        assert text.count("machine 1: ") == 1


def test_bad_data_do_not_let_a_process_go_on_where_another_has_ended(
    tmp_path: Path, processes: PretendedProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next exchange would wait for that one."""

    other = tmp_path / "other"
    other.mkdir()

    def fail_there(config: Config) -> None:
        if config.validation.data == f"{other}/held out":
            raise OSError("Input/output error")

    monkeypatch.setattr("diffsynth_lite.training.encoding.dataset.find_held_out_records", fail_there)

    def read(accelerator: Any, _: int) -> Any:
        folder = tmp_path if accelerator.is_main_process else other
        return read_records(config_of(folder), accelerator, Problems())

    first, second = processes.run(read)
    assert isinstance(first, RunStoppedError)
    assert str(first) == f"machine 1: {second}" == "machine 1: Input/output error"
