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


@pytest.mark.slow
def test_workers_processes_and_a_resume_change_no_sample_of_any_step(mixed_run: TinyRun) -> None:
    alone = samples(mixed_run, "alone")
    assert [row["position"] for row in alone] == list(range(40))
    assert [row["step"] for row in alone] == [position // 4 for position in range(40)]
    assert len({row["bucket"] for row in alone}) > 3
    assert any("loss_mask" in row["tensors"] for row in alone)

    samples(mixed_run, "parts", "train.steps=4")
    records = mixed_run.root / "records" / "parts"
    # tests/data proves that several workers of one process give what one does.
    settings = ("data.num_workers=1", f"output.dir={mixed_run.root / 'parts'}")
    program = forked(mixed_run, *settings, script=(SCRIPT, records), num_processes=2)
    assert program.wait() == 0, program.printed()
    assert [line for line in program.printed().splitlines() if not LOG_LINE.match(line)] == []
    assert read_records(records) == alone
