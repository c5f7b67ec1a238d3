"""Runs that learn some items, and on others keep the model what it is without the LoRA."""

import json
from pathlib import Path

import pytest
from tiny_run import TinyRun, checkpoint_tensors, differing, lora_metadata_of


def sources(data: Path, *changes: str) -> tuple[str, str]:
    """A folder that is learned, and the same one once more, which is preserved."""
    preserved = ", ".join((f"path: {data}", "preserve: true", *changes))
    return "data.path=null", f"data.sources=[{{path: {data}, trigger: ohwx}}, {{{preserved}}}]"


def test_a_run_that_preserves_goes_on_exactly_wherever_its_memory_is_and_tells_its_losses_apart(
    watched_run: TinyRun,
) -> None:
    whole, parts = watched_run.root / "whole", watched_run.root / "parts"
    given = (
        *sources(watched_run.root / "data", "captions: none", "weight: 0.5", "loss_weight: 0.25"),
        *("train.steps=4", "output.checkpoint_every_steps=4", "model.quantize=int8"),
        *("validation.prompts=[]", "validation.item_losses=20", "data.caption_dropout=0.1"),
    )
    kept = "train.use_gradient_checkpointing=false"
    moved = (
        *("train.use_gradient_checkpointing_offload=true", "memory.stream_blocks=all"),
        "memory.stream_slots=1",
    )
    assert watched_run.train(f"output.dir={whole}", *given, kept) == 0
    assert watched_run.stopped_after(2, f"output.dir={parts}", *given, *moved) == 75
    assert watched_run.train(f"output.dir={parts}", *given, *moved) == 0
    assert differing(checkpoint_tensors(whole, 4), checkpoint_tensors(parts, 4)) == []

    steps, others = (
        [row for row in watched_run.metrics(folder) if "grad_norm" in row] for folder in (whole, parts)
    )
    assert steps == others
    assert {len(row.keys() & {"loss", "preservation_loss"}) for row in steps} == {1, 2}
    preserved = [row["preservation_loss"] for row in steps if "preservation_loss" in row]
    assert preserved[0] < 1e-9 < preserved[-1] < min(row["loss"] for row in steps if "loss" in row) / 100
    assert "Loss of what is preserved" in (whole / "report.html").read_text()
    # Only what is learned is measured, and told of.
    items = [json.loads(line)["name"] for line in (whole / "items.jsonl").read_text().splitlines()]
    assert [name[:2] for name in items] == ["0/"] * 5
    metadata = lora_metadata_of(whole / "lora")
    assert metadata["modelspec.trigger_phrase"] == "ohwx"
    assert (metadata["ss_num_train_images"], metadata["ss_num_reg_images"]) == ("5", "2")


def test_what_is_preserved_has_captions_of_its_own_and_is_part_of_what_a_run_is(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    data, folder = tiny_run.root / "data", tiny_run.root / "run"
    assert tiny_run.train("train.steps=1", *sources(data)) == 0
    assert tiny_run.train("train.steps=2", *sources(data, "captions: none")) == 2
    assert "data.items was" in caplog.text
    assert tiny_run.train("train.steps=2", *sources(data, "loss_weight: 2")) == 2
    assert "data.loss_weight was [1.0, 1.0], is [1.0, 2.0]" in caplog.text
    assert tiny_run.train("train.steps=2", *sources(data, "weight: 2"), "resume.allow=[data]") == 0
    assert [row["step"] for row in tiny_run.metrics(folder) if "grad_norm" in row] == [1, 2]
