"""Runs of other kinds of adapters: stopped, continued, exported, drawn with, and started from."""

from pathlib import Path

import pytest
from tiny_run import UNWATCHED, TinyRun, checkpoint_tensors, differing

KINDS = {
    # With what each may have beside it, and what of memory changes no number.
    "dora": (
        *("lora.kind=dora", "lora.init=orthogonal", "lora.use_rslora=true", "lora.loraplus_ratio=4"),
        *(
            "model.quantize=int8",
            "memory.stream_blocks=all",
            "memory.stream_slots=1",
            "train.use_gradient_checkpointing_offload=true",
        ),
    ),
    "lokr": (
        *("lora.kind=lokr", "lora.lokr_factor=4", "lora.dropout=0", "train.optimizer=prodigy"),
        *("train.learning_rate=1", "train.use_gradient_checkpointing=false"),
    ),
}
STEPS = ("train.steps=2", "output.checkpoint_every_steps=2", "train.ema_decay=0.5", *UNWATCHED)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_exactly_and_its_file_is_drawn_with_and_started_from(
    tiny_run: TinyRun, tiny_model: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = (*STEPS, *KINDS[kind], "lora.groups=[{match: transformer_blocks.0, rank: 2, alpha: 6}]")
    whole, parts = tiny_run.root / "whole", tiny_run.root / "parts"
    assert tiny_run.train(f"output.dir={whole}", *given) == 0
    assert tiny_run.stopped_after(1, f"output.dir={parts}", *given) == 75
    assert tiny_run.train(f"output.dir={parts}", *given) == 0
    assert differing(checkpoint_tensors(whole, 2), checkpoint_tensors(parts, 2)) == []
