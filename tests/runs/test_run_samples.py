"""What a run trains on at each step: the same samples whatever the number of workers and processes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded_train import read_records, recorded_step
from tiny_run import LOG_LINE, TinyRun, forked, make_mixed_run

from diffsynth_lite.training import trainer

SCRIPT = Path(__file__).with_name("recorded_train.py")


@pytest.fixture
def mixed_run(tmp_path: Path, tiny_model: Path) -> TinyRun:
    """Pictures of many shapes in three sources, one of them with masks."""
    run = make_mixed_run(tmp_path, tiny_model)
    steps = ("train.steps=10", "output.checkpoint_every_steps=10")
    return replace(run, settings=(*run.settings, *steps, "lora.dropout=0"))


def samples(run: TinyRun, name: str, *settings: str) -> list[dict[str, Any]]:
    """All samples of a run in this process."""
    folder = run.root / "records" / name
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trainer, "train_step", recorded_step(folder))
        assert run.train(*settings, f"output.dir={run.root / name}") == 0
    return read_records(folder)


def samples_of_processes(run: TinyRun, name: str, num_processes: int, *settings: str) -> list[dict[str, Any]]:
    """All samples of a run in processes of its own, which must end without a word that is not of the log."""
    folder = run.root / "records" / name
    settings = (*settings, f"output.dir={run.root / name}")
    program = forked(run, *settings, script=(SCRIPT, folder), num_processes=num_processes)
    assert program.wait() == 0, program.printed()
    assert [line for line in program.printed().splitlines() if not LOG_LINE.match(line)] == []
    return read_records(folder)


@pytest.mark.slow
def test_workers_processes_and_a_resume_change_no_sample_of_any_step(mixed_run: TinyRun) -> None:
    alone = samples(mixed_run, "alone")
    assert [row["position"] for row in alone] == list(range(40))
    assert [row["step"] for row in alone] == [position // 4 for position in range(40)]
    assert len({row["bucket"] for row in alone}) > 3
    assert any("loss_mask" in row["tensors"] for row in alone)
    assert samples_of_processes(mixed_run, "workers", 1, "data.num_workers=2") == alone

    samples(mixed_run, "parts", "train.steps=4")
    assert samples_of_processes(mixed_run, "parts", 2, "data.num_workers=1") == alone
