"""The losses of samples, by item: which are kept, and what is written of them."""

from pathlib import Path

import torch
from accelerate import Accelerator

from diffsynth_lite.core.noise import SampleLosses
from diffsynth_lite.run_folder.metrics import MetricsFile
from diffsynth_lite.training.evaluation import SampleLossLog


def add(losses: SampleLosses, *positions: int, loss: float = 0.5) -> None:
    names = [f"item {position % 3}" for position in positions]
    number = len(positions)
    losses.add(names, positions, torch.linspace(0.1, 0.9, number), torch.full((number,), loss))


def test_samples_are_written_by_item_after_logged_steps_and_when_asked(tmp_path: Path) -> None:
    losses, file = SampleLosses(), MetricsFile(tmp_path / "losses.jsonl")
    log = SampleLossLog(losses=losses, file=file, accelerator=Accelerator(cpu=True), every_steps=10)
    add(losses, 0, 1, 3, loss=0.123456)
    log.after_step(10)
    add(losses, 4, loss=float("nan"))
    log.after_step(11)
    log.write(12)  # as before a checkpoint, so that a run that goes on from there has lost none
    log.write(12)
    rows = [(row["step"], row["samples"]) for row in file.rows()]
    samples = {"item 0": [[0.1, 0.1235], [0.9, 0.1235]], "item 1": [[0.5, 0.1235]]}
    assert rows == [(10, samples), (12, {"item 1": [[0.1, None]]})]


def test_of_a_long_run_a_share_is_kept_that_only_the_seed_and_the_positions_decide() -> None:
    def kept(*micro_batches: range, seed: int = 0) -> list[str]:
        losses = SampleLosses.of_run(seed=seed, num_samples=800_000)
        for positions in micro_batches:
            add(losses, *positions)
        return [name for name, *_ in losses.take()]

    assert SampleLosses.of_run(seed=0, num_samples=1000).share == 1
    whole = kept(range(400))
    assert 60 < len(whole) < 140  # a quarter
    assert kept(range(100), range(100, 400)) == whole
    assert kept(range(400), seed=1) != whole
    assert len(kept(*[range(400)] * 40)) <= 26 * len(whole)  # no more than 10,000 wait to be written
