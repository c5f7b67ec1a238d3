"""Runs with other optimizers than AdamW: stopped, continued and exported."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from family_sample import pairs_on
from tiny_run import UNWATCHED, TinyRun, checkpoint_tensors, differing, lora_metadata_of

from diffsynth_lite.lora import by_peft_names
from diffsynth_lite.lora.updates import pairs_of

STEPS = ("train.steps=3", "output.checkpoint_every_steps=3")


@pytest.mark.parametrize(
    ("name", "settings", "written"),
    [
        (
            "adamw8bit",
            (),
            "bitsandbytes.optim.adamw.AdamW8bit(",
        ),
        ("muon", (), "torch.optim.Muon(weight_decay=0.01,adjust_lr_fn=match_rms_adamw)"),
        (
            "adafactor",
            ("train.optimizer_options={d: 2.0}",),
            "torch.optim.Adafactor(weight_decay=0.01,d=2.0)",
        ),
        ("prodigy", ("train.learning_rate=1", "train.warmup_steps=2"), "prodigyopt.prodigy.Prodigy("),
    ],
)
def test_a_run_goes_on_exactly_with_another_optimizer(
    tiny_run: TinyRun, name: str, settings: tuple[str, ...], written: str
) -> None:
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    given = (*STEPS, f"train.optimizer={name}", *settings)
    whole, parts = tiny_run.root / "whole", tiny_run.root / "parts"
    assert tiny_run.train(f"output.dir={whole}", *given) == 0
    assert tiny_run.stopped_after(1, f"output.dir={parts}", *given) == 75
    assert tiny_run.train(f"output.dir={parts}", *given) == 0
    assert differing(checkpoint_tensors(whole, 3), checkpoint_tensors(parts, 3)) == []
    rows, resumed = tiny_run.metrics(whole), tiny_run.metrics(parts)
    assert [row["loss"] for row in rows if "loss" in row] == [row["loss"] for row in resumed if "loss" in row]
    found = [row["learned_rate"] for row in rows if "learned_rate" in row]
    assert len(found) == (3 if name == "prodigy" else 0)
    assert found == sorted(found)
    assert lora_metadata_of(whole / "lora")["ss_optimizer"].startswith(written)


def test_the_average_of_schedule_free_is_what_is_shown_and_exported_and_training_does_not_see_it(
    watched_run: TinyRun, tiny_model: Path
) -> None:
    given = (*STEPS, "train.optimizer=schedule_free", "validation.every_steps=1")
    whole, parts = watched_run.root / "whole", watched_run.root / "parts"
    assert watched_run.train(f"output.dir={whole}", *given) == 0
    for steps in (1, 1):
        assert watched_run.stopped_after(steps, f"output.dir={parts}", *given, *UNWATCHED) == 75
    assert watched_run.train(f"output.dir={parts}", *given, *UNWATCHED) == 0
    tensors = checkpoint_tensors(whole, 3)
    assert differing(tensors, checkpoint_tensors(parts, 3)) == []

    trained = {
        name.removeprefix("adapter/"): tensors[name] for name in tensors if name.startswith("adapter/")
    }
    average = {name.removeprefix("ema/"): tensors[name] for name in tensors if name.startswith("ema/")}
    for name, value in average.items():
        z = tensors[f"optimizer/{name}::z"]
        own = trained[name.replace(".default.", ".")]
        assert torch.equal(value, own.lerp(z, weight=1 - 1 / 0.9))
    assert any(not torch.equal(value, trained[name]) for name, value in by_peft_names(average).items())
    pipeline = QwenImagePipeline.from_pretrained(tiny_model, dtype=torch.float32)
    pipeline.load_lora_weights(whole / "lora")
    expected, loaded = pairs_of(by_peft_names(average), {"lora_alpha": 8}), pairs_on(pipeline.transformer)
    assert loaded.keys() == expected.keys() != set()
    assert all(pair.distance(loaded[layer]) == 0 for layer, pair in expected.items())

    assert not (whole / "lora_ema").exists()
    assert lora_metadata_of(whole / "lora")["diffsynth_lite.weights"] == "average"
    assert "moving average" not in (whole / "lora" / "README.md").read_text()
    document = json.loads((whole / "checkpoints" / "step-00000003" / "optimizer.json").read_text())
    assert document["groups"][0]["plain"]["k"] == 3
