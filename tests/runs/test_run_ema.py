"""Runs that keep a moving average of the LoRA beside it."""

import torch
from diffusers import QwenImagePipeline
from safetensors.torch import load_file
from tiny_run import UNWATCHED, TinyRun, checkpoint_tensors, differing

SETTINGS = (
    *("train.ema_decay=0.6", "train.lr_scheduler=cosine", "train.warmup_steps=2"),
    *("data.caption_dropout=0.3", "validation.every_steps=3"),
)


def test_a_resumed_average_is_the_one_of_the_whole_run_bit_for_bit(watched_run: TinyRun) -> None:
    whole, parts = watched_run.root / "whole", watched_run.root / "parts"
    assert watched_run.train(f"output.dir={whole}", *SETTINGS) == 0
    for steps in (1, 1, 2):
        assert watched_run.stopped_after(steps, f"output.dir={parts}", *SETTINGS, *UNWATCHED) == 75
    assert (
        watched_run.train(
            f"output.dir={parts}", *SETTINGS, *UNWATCHED, "--use_gradient_checkpointing_offload"
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


def test_a_run_that_forgets_its_average_would_be_another(tiny_run: TinyRun, monkeypatch) -> None:
    whole, parts = tiny_run.root / "whole", tiny_run.root / "parts"
    settings = ("train.ema_decay=0.6",)
    assert tiny_run.train(f"output.dir={whole}", *settings) == 0
    assert tiny_run.train(f"output.dir={parts}", *settings, "train.steps=4") == 0
    monkeypatch.setattr(
        "diffsynth_lite.training.ema.AveragedWeights.load", lambda self, *_args: self.restart()
    )
    assert tiny_run.train(f"output.dir={parts}", *settings) == 0
    changed = differing(checkpoint_tensors(whole, 6), checkpoint_tensors(parts, 6))
    assert changed
    assert all(name.startswith("ema/") for name in changed)


def test_the_average_is_exported_beside_the_lora_and_changes_nothing_in_it(
    watched_run: TinyRun, tiny_model
) -> None:
    plain, averaged = watched_run.root / "plain", watched_run.root / "averaged"
    assert watched_run.train(f"output.dir={plain}", *UNWATCHED) == 0
    assert watched_run.train(f"output.dir={averaged}", "train.ema_decay=0.6", "validation.every_steps=2") == 0
    tensors = checkpoint_tensors(averaged, 6)
    own = {name: value for name, value in tensors.items() if not name.startswith("ema/")}
    assert differing(own, checkpoint_tensors(plain, 6)) == []
    pipeline = QwenImagePipeline.from_pretrained(tiny_model, dtype=torch.float32)
    pipeline.load_lora_weights(averaged / "lora_ema")
    loaded = {name: value for name, value in pipeline.transformer.named_parameters() if ".lora_" in name}
    for name, value in loaded.items():
        assert torch.equal(value, tensors[f"ema/{name.replace('.default_0', '.default')}"]), name
    assert pipeline.transformer.peft_config["default_0"].lora_alpha == 8
    assert not (plain / "lora_ema").exists()


def test_previews_and_loss_are_those_of_the_average_unless_asked_otherwise(watched_run: TinyRun) -> None:
    def evaluated(name: str, *settings: str) -> tuple[bytes, float]:
        folder = watched_run.root / name
        assert watched_run.train(f"output.dir={folder}", "train.steps=3", *settings) == 0
        (preview,) = (folder / "previews").glob("step-00000003-prompt-00-*.png")
        loss = next(
            row["train_fixed_noise_loss"] for row in watched_run.metrics(folder)[::-1] if "train" in str(row)
        )
        return preview.read_bytes(), loss

    plain = evaluated("plain")
    averaged = evaluated("averaged", "train.ema_decay=0.9")
    own = evaluated("own", "train.ema_decay=0.9", "validation.use_ema=false")
    assert own == plain
    assert averaged[0] != plain[0]
    assert averaged[1] != plain[1]


def test_an_average_may_begin_in_the_middle_when_that_is_allowed(tiny_run: TinyRun) -> None:
    assert tiny_run.train("train.steps=4") == 0
    assert tiny_run.train("train.ema_decay=0.6") == 2
    assert tiny_run.train("train.ema_decay=0.6", "resume.allow=[train.ema_decay]") == 0
    assert any(name.startswith("ema/") for name in checkpoint_tensors(tiny_run.folder, 6))
