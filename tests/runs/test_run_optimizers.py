"""Runs with other optimizers than AdamW, and with a moving average of the LoRA."""

import json
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from card_code import assert_diffusers_loads
from safetensors.torch import load_file
from tiny_run import (
    UNWATCHED,
    TinyRun,
    checkpoint_part,
    checkpoint_tensors,
    differing,
    lora_metadata_of,
    make_run,
)

from diffsynth_lite.lora import by_peft_names

STEPS = ("train.steps=3", "output.checkpoint_every_steps=1", "output.keep_checkpoints=3")


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
    first = whole / "checkpoints" / "step-00000001"
    assert tiny_run.train(f"output.dir={parts}", *given, "--resume", str(first)) == 0
    assert differing(checkpoint_tensors(whole, 3), checkpoint_tensors(parts, 3)) == []
    rows = tiny_run.metrics(whole)
    losses, resumed = ([row["loss"] for row in of if "loss" in row] for of in (rows, tiny_run.metrics(parts)))
    assert losses[-2:] == resumed[-2:]
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
    assert watched_run.stopped_after(2, f"output.dir={parts}", *given, *UNWATCHED) == 75
    assert watched_run.train(f"output.dir={parts}", *given, *UNWATCHED) == 0
    tensors = checkpoint_tensors(whole, 3)
    assert differing(tensors, checkpoint_tensors(parts, 3)) == []

    trained, average = checkpoint_part(whole, 3), checkpoint_part(whole, 3, "ema")
    for name, value in average.items():
        z = tensors[f"optimizer/{name}::z"]
        own = trained[name.replace(".default.", ".")]
        assert torch.equal(value, own.lerp(z, weight=1 - 1 / 0.9))
    assert any(not torch.equal(value, trained[name]) for name, value in by_peft_names(average).items())
    assert_diffusers_loads(whole / "lora", by_peft_names(average), tiny_model)
    assert not (whole / "lora_ema").exists()
    assert lora_metadata_of(whole / "lora")["diffsynth_lite.weights"] == "average"
    assert "moving average" not in (whole / "lora" / "README.md").read_text()
    document = json.loads((whole / "checkpoints" / "step-00000003" / "optimizer.json").read_text())
    assert document["groups"][0]["plain"]["k"] == 3


AVERAGED = (
    *("train.ema_decay=0.6", "train.lr_scheduler=cosine", "train.warmup_steps=2"),
    *("data.caption_dropout=0.3", "validation.every_steps=3"),
)


def test_a_resumed_average_is_the_one_of_the_whole_run_bit_for_bit(watched_run: TinyRun) -> None:
    whole, parts = watched_run.root / "whole", watched_run.root / "parts"
    assert watched_run.train(f"output.dir={whole}", *AVERAGED) == 0
    assert watched_run.stopped_after(2, f"output.dir={parts}", *AVERAGED, *UNWATCHED) == 75
    assert (
        watched_run.train(
            f"output.dir={parts}", *AVERAGED, *UNWATCHED, "--use_gradient_checkpointing_offload"
        )
        == 0
    )
    tensors = checkpoint_tensors(whole, 6)
    assert any(name.startswith("ema/") for name in tensors)
    assert differing(tensors, checkpoint_tensors(parts, 6)) == []
    exported = [
        load_file(folder / "lora_ema" / "pytorch_lora_weights.safetensors") for folder in (whole, parts)
    ]
    assert differing(*exported) == []
    metadata = lora_metadata_of(whole / "lora_ema")
    assert metadata["diffsynth_lite.weights"] == "average"
    thumbnail = metadata.pop("modelspec.thumbnail")
    assert thumbnail.startswith("data:image/jpeg;base64,")
    assert thumbnail == lora_metadata_of(whole / "lora")["modelspec.thumbnail"]
    assert metadata == lora_metadata_of(parts / "lora_ema")  # which draws nothing


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> TinyRun:
    """A run without an average, with one that is evaluated, also half-way, and with one that is not."""
    run = make_run(tmp_path_factory.mktemp("evaluated"), tiny_model)
    for name, settings in (
        ("plain", ()),
        ("averaged", ("train.ema_decay=0.9",)),
        ("own", ("train.ema_decay=0.9", "validation.use_ema=false")),
    ):
        given = ("train.steps=3", "validation.every_steps=2", *settings)
        assert run.train(f"output.dir={run.root / name}", *given) == 0
        AcceleratorState._reset_state(reset_partial_state=True)
    return run


def test_the_average_is_exported_next_to_the_lora_and_changes_nothing_in_it(
    evaluated: TinyRun, tiny_model: Path
) -> None:
    plain, averaged = evaluated.root / "plain", evaluated.root / "averaged"
    tensors = checkpoint_tensors(averaged, 3)
    own = {name: value for name, value in tensors.items() if not name.startswith("ema/")}
    assert differing(own, checkpoint_tensors(plain, 3)) == []
    average = by_peft_names(checkpoint_part(averaged, 3, "ema"))
    assert_diffusers_loads(averaged / "lora_ema", average, tiny_model)
    assert not (plain / "lora_ema").exists()
    cards = [(averaged / name / "README.md").read_text() for name in ("lora", "lora_ema")]
    assert ["The moving average of a LoRA for" in card for card in cards] == [False, True]
    assert ["Samples and loss are of the moving average" in card for card in cards] == [True, False]


def test_previews_and_loss_are_those_of_the_average_unless_asked_otherwise(evaluated: TinyRun) -> None:
    def shown(name: str) -> tuple[bytes, float]:
        folder = evaluated.root / name
        (preview,) = (folder / "previews").glob("step-00000003-prompt-00-*.png")
        losses = [
            row["train_fixed_noise_loss"]
            for row in evaluated.metrics(folder)
            if "train_fixed_noise_loss" in row
        ]
        assert len(losses) == 3
        return preview.read_bytes(), losses[-1]

    plain, averaged = shown("plain"), shown("averaged")
    assert shown("own") == plain
    assert averaged[0] != plain[0]
    assert averaged[1] != plain[1]


def test_an_average_may_begin_in_the_middle_when_that_is_allowed(begun_run: TinyRun) -> None:
    assert begun_run.train("train.ema_decay=0.6") == 2
    assert begun_run.train("train.ema_decay=0.6", "resume.allow=[train.ema_decay]") == 0
    assert any(name.startswith("ema/") for name in checkpoint_tensors(begun_run.folder, 6))
