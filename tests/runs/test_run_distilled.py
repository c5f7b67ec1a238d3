"""Runs on distilled models: a guided target, in whatever way memory is saved, and continued exactly."""

import pytest
from tiny_run import UNWATCHED, TinyRun, checkpoint_tensors, differing

SAVING_MEMORY = (
    *("--use_gradient_checkpointing_offload", "memory.stream_blocks=all", "memory.stream_slots=1"),
    "memory.save_attention=park",
)


def test_a_guided_run_goes_on_exactly_and_saves_memory_exactly(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    guided = ("objective.guidance_target=3", "train.steps=2", *UNWATCHED, "validation.loss_items=2")
    whole, parts = tiny_run.root / "whole", tiny_run.root / "parts"
    assert tiny_run.train(f"output.dir={whole}", *guided) == 0
    assert tiny_run.stopped_after(1, f"output.dir={parts}", *guided, *SAVING_MEMORY) == 75
    assert tiny_run.train(f"output.dir={parts}", *guided, *SAVING_MEMORY) == 0
    tensors = checkpoint_tensors(whole, 2)
    assert differing(tensors, checkpoint_tensors(parts, 2)) == []
    losses = [[row["loss"] for row in tiny_run.metrics(folder) if "loss" in row] for folder in (whole, parts)]
    assert losses[0] == losses[1]
    assert tiny_run.train(f"output.dir={parts}", "train.steps=3", *UNWATCHED) == 2
    assert "objective.guidance_target was 3.0, is None" in caplog.text
