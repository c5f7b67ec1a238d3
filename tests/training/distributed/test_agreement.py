"""Processes agree: they share folders, were started for one run, and end where one hangs."""

import os
import socket
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.distributed
from accelerate import Accelerator
from pretended_processes import PretendedProcesses
from processes import FORKED, LIMIT_S, Program, free_port, on_ranks

from diffsynth_lite.config import Config, section_types
from diffsynth_lite.config.settings import FilePath
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.item_table import ItemRow, ItemTable
from diffsynth_lite.errors import RunInterrupted, RunStoppedError, UserError
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.training.checkpoint.manifest import folder_name
from diffsynth_lite.training.checkpoint.resume import ResumePolicy, require_newest_run
from diffsynth_lite.training.checkpoint.store import CheckpointStore
from diffsynth_lite.training.distributed import agreement, same_run
from diffsynth_lite.training.distributed.agreement import (
    FolderGroup,
    SharedFlag,
    find_folder_group,
    from_main_process,
    tensors_from_main_process,
)
from diffsynth_lite.training.distributed.devices import describe_run
from diffsynth_lite.training.distributed.same_run import (
    require_same_items,
    require_same_model,
    require_same_settings,
)
from diffsynth_lite.training.distributed.watchdog import Watchdog


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


def test_where_only_the_main_process_asks_nothing_is_written_elsewhere(
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


@pytest.mark.parametrize(
    ("kind", "kind_on_others"),
    [(UserError, UserError), (RunInterrupted, RunInterrupted), (KeyError, RunStoppedError)],
)
def test_what_ends_the_main_process_ends_all_with_its_words(
    processes: PretendedProcesses, kind: type[BaseException], kind_on_others: type[BaseException]
) -> None:
    def end() -> str:
        raise kind("resume.source: no such checkpoint")

    outcomes = processes.run(lambda accelerator, _: from_main_process(accelerator, end))
    message = str(kind("resume.source: no such checkpoint"))
    assert [type(error) for error in outcomes] == [kind, *[kind_on_others] * 3]
    assert [str(error) for error in outcomes] == [*[message] * 2, *[f"machine 0: {message}"] * 2]


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


HERE = socket.gethostname()
ROW = ItemRow(
    name="a.png",
    bucket=Bucket(width=64, height=32),
    source=0,
    media_key="ab" * 32,
    caption_keys=("cd" * 32,),
)


def config_of(**changes: dict[str, Any]) -> Config:
    """A config with some settings changed, by section."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"family": "qwen_image", "path": "base"},
        "data": {"path": "pictures"},
        "train": {"global_batch_size": 4, "micro_batch_size": 2},
        "output": {"dir": "run"},
    }
    return Config.model_validate({name: values | changes.get(name, {}) for name, values in sections.items()})


def family_of(**fingerprints: str) -> Any:
    parts = {"transformer": "1", "vae": "2", "scheduler": "3"} | fingerprints
    return SimpleNamespace(
        components=("transformer", "vae"), folder=SimpleNamespace(fingerprint=parts.__getitem__)
    )


def refusal(check: Any, *arguments: Any) -> str:
    with pytest.raises(UserError) as refused:
        check(*arguments)
    return str(refused.value)


def accelerator_of(rank: int, port: int = 1) -> Accelerator:
    """Of one of two processes; where they have met before, accelerate only insists on a port."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    return Accelerator(cpu=True)


def compare(rank: int, folder: Path) -> None:
    """Write the refusals of one of two processes that differ, a line each."""
    accelerator = accelerator_of(rank)
    if rank == 1:
        SharedFlag(accelerator, "stop").set()
    torch.distributed.barrier()
    assert [SharedFlag(accelerator, name).is_set() for name in ("stop", "other")] == [True, False]
    own = f"node-{rank}"
    places = {"model": {"path": own}, "output": {"dir": f"runs/{own}"}, "data": {"num_workers": rank}}
    equal = config_of(**places)
    require_same_settings(accelerator, equal)
    require_same_model(accelerator, family_of())
    table, none = ItemTable.build([ROW, replace(ROW, name="b.png")]), ItemTable.build([])
    require_same_items(accelerator, table, none)
    renamed = ItemTable.build([replace(ROW, name=own), replace(ROW, name="b.png")])
    require_same_items(accelerator, renamed, none)

    sources = [{"path": own, "repeats": 1 + rank}]
    data = {"path": None, "sources": sources}
    other = config_of(**places | {"data": data, "train": {"seed": 7 * rank}})
    fewer = ItemTable.build([ROW, replace(ROW, media_key="ef" * 32)][: 1 + rank])
    lines = [
        describe_run(equal, accelerator),
        refusal(require_same_settings, accelerator, other),
        refusal(require_same_model, accelerator, family_of(vae=own)),
        refusal(require_same_items, accelerator, fewer, none),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(same_run, "version", lambda name: f"{name} 1.{rank if name == 'peft' else 0}")
        lines.append(refusal(require_same_settings, accelerator, equal))
    (folder / str(rank)).write_text("\n".join(lines))


def test_two_processes_report_what_differs_and_where_and_paths_may_differ(tmp_path: Path) -> None:
    on_ranks(compare, tmp_path)
    first, other = ((tmp_path / str(rank)).read_text().splitlines() for rank in range(2))
    assert first == other
    runs_on, settings, model, items, versions = first
    assert runs_on == (
        "2 processes on the CPU; mixed precision bf16, base in bfloat16; "
        "global batch 4 = micro-batch 2 x accumulation 1 x 2 processes"
    )
    zero, one = f"on process 0 ({HERE})", f"on process 1 ({HERE})"
    assert settings.startswith(
        f"the processes of this run differ: data.sources.0.repeats is 1 {zero}, 2 {one}; "
        f"train.seed is 0 {zero}, 7 {one}; start all of them"
    )
    assert f'differ: vae of model.path is "node-0" {zero}, "node-1" {one}; have model.path' in model
    assert f"number of items of data is 1 {zero}, 2 {one}; images and clips of data is" in items
    assert "validation.data" not in items
    assert f'differ: peft is "peft 1.0" {zero}, "peft 1.1" {one}; start all of them' in versions


def test_one_process_says_what_it_runs_on() -> None:
    accelerator = SimpleNamespace(
        num_processes=1, process_index=0, device=torch.device("cpu"), is_local_main_process=True
    )
    train = {"global_batch_size": 6, "micro_batch_tokens": 4096, "mixed_precision": "no"}
    config = config_of(train=train, model={"quantize": "nf4"})
    line = describe_run(config, accelerator)  # type: ignore[arg-type]
    assert line == (
        "1 process on the CPU; mixed precision no, base in bfloat16 and nf4; global batch 6 = "
        "micro-batch 2 x accumulation 3 x 1 process (micro-batches of up to 4096 tokens)"
    )


def test_every_setting_that_is_a_path_may_differ() -> None:
    sections = section_types()
    (source,) = get_args(sections["data"].model_fields["sources"].annotation)
    rule = FilePath.__metadata__[-1].func.__name__
    paths = {
        f"{section}.{name}"
        for section, settings in {**sections, "data.sources": source}.items()
        for name, field in settings.model_fields.items()
        if rule in repr((field.annotation, field.metadata))
    }
    assert {"model.path", "data.cache_dir", "validation.inputs", "data.sources.mask_dir"} <= paths
    assert not list(same_run._settings(dict.fromkeys(paths)))


SLOW = """
import sys, time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from diffsynth_lite.training.distributed.watchdog import Watchdog

def hang_in_a_step():
    while not Path(sys.argv[1]).stat().st_size:
        time.sleep(0.01)

with Watchdog(SimpleNamespace(num_processes=1), timedelta(seconds=0.1)).watching():
    hang_in_a_step()
"""


def test_a_step_that_takes_too_long_writes_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    program = Program(tmp_path / "slow.py", [str(tmp_path / "printed")], tmp_path / "printed")
    assert program.wait() == 0
    assert "hang_in_a_step" in program.printed()


def test_steps_in_time_and_pauses_of_any_length_write_nothing(alarm) -> None:
    watchdog = Watchdog(SimpleNamespace(num_processes=1), timedelta(seconds=10))
    with watchdog.watching():
        for _ in range(3):
            alarm.sleep(7.0)
            with watchdog.paused():
                alarm.sleep(100.0)
            alarm.sleep(7.0)
            watchdog.reset()
        assert alarm.num_dumps == 0
        alarm.sleep(9.0)
    assert alarm.num_dumps == 1
    alarm.sleep(100.0)
    assert alarm.num_dumps == 1


def wait_for_one_that_hangs(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    accelerator = accelerator_of(rank, port)
    watchdog = Watchdog(accelerator, timedelta(seconds=2))
    accelerator.wait_for_everyone()  # one of them may take long to start
    with watchdog.watching():
        accelerator.reduce(torch.ones(1))
        with watchdog.paused():
            time.sleep(3 * rank)  # longer than a step may take
            accelerator.reduce(torch.ones(1))
        if rank == 1:
            time.sleep(LIMIT_S)
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
            accelerator.reduce(torch.ones(1))
    torch.distributed.destroy_process_group()


def test_a_process_gives_up_on_one_that_hangs_but_not_on_one_that_pauses() -> None:
    port = free_port()
    ranks = [FORKED.Process(target=wait_for_one_that_hangs, args=(rank, port)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        ranks[0].join(LIMIT_S)
        assert ranks[0].exitcode == 0
    finally:
        ranks[1].kill()
        ranks[1].join()
