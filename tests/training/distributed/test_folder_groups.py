"""Which processes share a folder is found out, and what the main process alone has is handed to all."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_processes import PretendedProcesses

from diffsynth_lite.errors import UserError
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.training.checkpoint.manifest import folder_name
from diffsynth_lite.training.checkpoint.resume import ResumePolicy, require_newest_run
from diffsynth_lite.training.checkpoint.store import CheckpointStore
from diffsynth_lite.training.distributed import agreement
from diffsynth_lite.training.distributed.agreement import (
    FolderGroup,
    find_folder_group,
    from_main_process,
    tensors_from_main_process,
)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> PretendedProcesses:
    monkeypatch.setattr(agreement, "_WAIT_S", 0.0)
    return PretendedProcesses(monkeypatch, num_machines=2, num_local=2)


def groups(processes: PretendedProcesses, *folders: Path, on_each_machine: bool = True) -> list[FolderGroup]:
    """By rank, where each machine has one of the folders."""
    found = processes.run(
        lambda accelerator, machine: find_folder_group(
            accelerator, folders[machine], on_each_machine=on_each_machine
        )
    )
    left = [list(folder.iterdir()) for folder in folders if folder.exists()]
    assert not any(left), left
    return found


def test_who_shares_a_folder_is_seen_and_nothing_is_left_in_it(
    processes: PretendedProcesses, tmp_path: Path
) -> None:
    shared = groups(processes, tmp_path / "one", tmp_path / "one")
    assert [list(group.ranks) for group in shared] == [[0, 1, 2, 3]] * 4
    assert [group.place for group in shared] == [0, 1, 2, 3]
    assert {(group.num_folders, group.num_machines) for group in shared} == {(1, 2)}

    own = groups(processes, tmp_path / "first", tmp_path / "second")
    assert [list(group.ranks) for group in own] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [group.is_first for group in own] == [True, False, True, False]
    assert {(group.num_folders, group.num_machines) for group in own} == {(2, 2)}


def test_where_the_main_process_alone_asks_nothing_is_written_elsewhere(
    processes: PretendedProcesses, tmp_path: Path
) -> None:
    found = groups(processes, tmp_path / "first", tmp_path / "second", on_each_machine=False)
    assert [list(group.ranks) for group in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert not (tmp_path / "second").exists()


def test_a_file_that_another_machine_shows_late_is_waited_for(
    processes: PretendedProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lexists, asked = os.path.lexists, set()

    def shown_late(path: Path) -> bool:
        is_first_time = path not in asked
        asked.add(path)
        return not is_first_time and lexists(path)

    monkeypatch.setattr(agreement, "_WAIT_S", 60.0)
    monkeypatch.setattr(os.path, "lexists", shown_late)
    assert {group.num_folders for group in groups(processes, tmp_path, tmp_path)} == {1}
    assert asked


def test_a_folder_that_takes_no_file_is_not_shared_and_no_error(
    processes: PretendedProcesses, tmp_path: Path
) -> None:
    (tmp_path / "a file").touch()
    found = groups(processes, tmp_path / "own", tmp_path / "a file" / "below")
    assert [list(group.ranks) for group in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_what_the_main_process_reads_all_get_bit_for_bit(processes: PretendedProcesses) -> None:
    tensors = {
        "weight": torch.tensor([[1.5, float("nan")], [-0.0, 3.0]]).t(),
        "half": torch.arange(3, dtype=torch.bfloat16),
        "step": torch.tensor(7, dtype=torch.int64),
    }

    def read(accelerator: Any, _: int) -> tuple[str, dict[str, torch.Tensor]]:
        def only_here(value: Any) -> Any:
            assert accelerator.is_main_process
            return value

        text = from_main_process(accelerator, lambda: only_here("a checkpoint"))
        return text, tensors_from_main_process(accelerator, lambda: only_here(tensors))

    for text, found in processes.run(read):
        assert text == "a checkpoint"
        assert list(found) == list(tensors)
        for name, tensor in found.items():
            assert tensor.dtype == tensors[name].dtype
            assert tensor.shape == tensors[name].shape
            assert _bytes_of(tensor) == _bytes_of(tensors[name])


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_what_the_main_process_cannot_read_ends_all_with_its_words(processes: PretendedProcesses) -> None:
    def missing() -> str:
        raise UserError("resume.source: no such checkpoint")

    outcomes = processes.run(lambda accelerator, _: from_main_process(accelerator, missing))
    told = "resume.source: no such checkpoint"
    assert {type(error) for error in outcomes} == {UserError}
    assert [str(error) for error in outcomes] == [told, told, f"machine 0: {told}", f"machine 0: {told}"]


@pytest.mark.parametrize(("steps", "refused"), [((0, 4), True), ((4, 2), False), ((2, 4), True)])
def test_a_run_is_refused_where_another_machine_than_the_main_process_s_has_more_of_it(
    processes: PretendedProcesses, tmp_path: Path, steps: tuple[int, int], refused: bool
) -> None:
    def require(accelerator: Any, machine: int) -> None:
        folder = RunFolder(tmp_path / f"run {machine}")
        if machine == 0 or steps[machine]:
            (folder.checkpoints_folder / folder_name(steps[machine])).mkdir(parents=True, exist_ok=True)
        policy = ResumePolicy(
            source="auto",
            allow=(),
            folder=folder,
            store=CheckpointStore(folder.checkpoints_folder, keep=1),
            earlier_shifts={},
        )
        require_newest_run(accelerator, policy)

    outcomes = processes.run(require)
    if not refused:
        assert outcomes == [None] * 4
        return
    assert {type(error) for error in outcomes} == {UserError}
    for error in outcomes:
        assert f"has a checkpoint of step {steps[1]} in its own {tmp_path}" in str(error)
