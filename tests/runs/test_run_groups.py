"""A run whose layers are trained in groups: continued, exported, and changed where that is allowed."""

from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from family_sample import pairs_on
from tiny_run import TinyRun, checkpoint_tensors, differing

from diffsynth_lite.lora.updates import pairs_of

GROUPS = (
    "{match: transformer_blocks.0, rank: 2, alpha: 6, learning_rate: %s}, {match: to_q, weight_decay: 0.5}"
)
SETTINGS = (
    *("train.steps=3", "output.checkpoint_every_steps=3", "lora.loraplus_ratio=4", "train.warmup_steps=2"),
    "lora.target_modules=[attention]",
)


def test_a_run_with_groups_goes_on_exactly_and_its_file_does_the_same(
    tiny_run: TinyRun, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, parts = tiny_run.root / "whole", tiny_run.root / "parts"
    given = (*SETTINGS, f"lora.groups=[{GROUPS % 0.002}]")
    assert tiny_run.train(f"output.dir={whole}", *given) == 0
    assert tiny_run.stopped_after(1, f"output.dir={parts}", *given) == 75
    assert tiny_run.train(f"output.dir={parts}", *given) == 0
    tensors = checkpoint_tensors(whole, 3)
    assert differing(tensors, checkpoint_tensors(parts, 3)) == []

    rates = [row for row in tiny_run.metrics(whole) if "learning_rate" in row][-1]
    labels = {"others": 0.01, "transformer_blocks.0": 0.002, "to_q": 0.01}
    expected = {
        f"learning_rate/{label}.{half}": pytest.approx(rate * times)
        for label, rate in labels.items()
        for half, times in (("lora_A", 1), ("lora_B", 4))
    }
    assert {name: rate for name, rate in rates.items() if name.startswith("learning_rate/")} == expected
    assert "learning_rate/to_q.lora_B" in (whole / "report.html").read_text()
    assert "rank 2, alpha 6" in (whole / "lora" / "README.md").read_text()

    adapter = {name.removeprefix("adapter/"): value for name, value in tensors.items() if "adapter/" in name}
    alphas = {
        name.rpartition(".lora_")[0]: 6.0 for name in adapter if name.startswith("transformer_blocks.0.")
    }
    trained = pairs_of(adapter, {"lora_alpha": 8.0, "alpha_pattern": alphas})
    assert {(pair.rank, pair.alpha) for pair in trained.values()} == {(2, 6.0), (4, 8.0)}
    pipeline = QwenImagePipeline.from_pretrained(tiny_model, dtype=torch.float32)
    pipeline.load_lora_weights(whole / "lora")
    loaded = pairs_on(pipeline.transformer)
    assert loaded.keys() == trained.keys()
    assert all(
        pair.distance(loaded[layer]) <= pair.rounding_bound(torch.float32) for layer, pair in trained.items()
    )

    more = (f"output.dir={parts}", "train.steps=4", *SETTINGS[1:])
    lower = f"lora.groups=[{GROUPS % 0.001}]"
    assert tiny_run.train(*more, lower) == 2
    assert "train.learning_rate of transformer_blocks.0 was 0.002, is 0.001" in caplog.text
    assert tiny_run.train(*more, lower, "resume.allow=[train.learning_rate]") == 0
    other = lower.replace("rank: 2", "rank: 4")
    assert tiny_run.train(*more, other, "resume.allow=[train.learning_rate]", "train.steps=5") == 2
    assert "lora.groups was" in caplog.text


def test_a_new_run_takes_a_lora_with_ranks_of_layers(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    groups = "lora.groups=[{match: transformer_blocks.0, rank: 2, alpha: 8}]"
    first, second = tiny_run.root / "first", tiny_run.root / "second"
    one = ("train.steps=1", "lora.dropout=0", groups)
    assert tiny_run.train(*one, f"output.dir={first}") == 0
    again = (
        f"lora.init_from={first}",
        "train.learning_rate=1e-30",
        f"output.dir={second}",
        "train.weight_decay=0",
    )
    assert tiny_run.train(*one, *again) == 0
    adapters = [
        {name: value for name, value in checkpoint_tensors(folder, 1).items() if name.startswith("adapter/")}
        for folder in (first, second)
    ]
    assert differing(*adapters) == []
    assert tiny_run.train("train.steps=1", *again[:1], f"output.dir={tiny_run.root / 'third'}") == 2
    assert "has rank 2, 4; set lora.rank to it" in caplog.text
