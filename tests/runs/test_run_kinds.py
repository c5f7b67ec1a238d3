"""Runs of other kinds of adapters: stopped, continued, exported, drawn with, and started from."""

from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import load_file
from tiny_run import UNWATCHED, TinyRun, checkpoint_tensors, differing, lora_metadata_of

from diffsynth_lite.cli.main import main
from diffsynth_lite.lora import add_finished_lora
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.training.lora_file import read_lora

KINDS = {
    # With what each may have beside it, and what of memory changes no number.
    "dora": (
        *("lora.kind=dora", "lora.init=orthogonal", "lora.use_rslora=true", "lora.loraplus_ratio=4"),
        *("model.quantize=int8", "memory.stream_blocks=all", "memory.stream_slots=1"),
        "train.use_gradient_checkpointing_offload=true",
    ),
    "lokr": (
        *("lora.kind=lokr", "lora.lokr_factor=4", "lora.dropout=0", "train.optimizer=adafactor"),
        "train.use_gradient_checkpointing=false",
    ),
}
STEPS = ("train.steps=2", "output.checkpoint_every_steps=2", "train.ema_decay=0.5", *UNWATCHED)
NAMES = {
    "dora": ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector", "dora_scale"),
    "lokr": ("lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b"),
}
FILE = "pytorch_lora_weights.safetensors"


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_exactly_and_its_file_is_drawn_with_and_started_from(
    tiny_run: TinyRun, tiny_model: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    groups = "lora.groups=[{match: transformer_blocks.0, rank: 2%s}]" % (
        "" if kind == "lokr" else ", alpha: 6"
    )
    given = (*STEPS, *KINDS[kind], groups)
    whole, parts = tiny_run.root / "whole", tiny_run.root / "parts"
    assert tiny_run.train(f"output.dir={whole}", *given) == 0
    assert tiny_run.stopped_after(1, f"output.dir={parts}", *given) == 75
    assert tiny_run.train(f"output.dir={parts}", *given) == 0
    assert differing(checkpoint_tensors(whole, 2), checkpoint_tensors(parts, 2)) == []
    other = [one for one in given if "use_rslora" not in one and "lokr_factor" not in one]
    assert tiny_run.train(f"output.dir={parts}", *other, "train.steps=3") == 2
    assert f"lora.{'use_rslora' if kind == 'dora' else 'lokr_factor'} was" in caplog.text

    file = whole / "lora" / FILE
    assert {name.partition(".attn.")[2].partition(".")[2] for name in load_file(file)} & set(NAMES[kind])
    assert all(name.endswith(NAMES[kind]) for name in load_file(file))
    assert lora_metadata_of(whole / "lora")["diffsynth_lite.kind"].lower() == kind
    card = (whole / "lora" / "README.md").read_text()
    call = "pipeline.load_lora_weights(" if kind == "dora" else "pipeline.transformer.load_lora_adapter("
    assert call in card

    # What our own reader puts on a model is what diffusers does.
    family = QwenImage(PipelineFolder(path=tiny_model))
    ours, theirs = (family.load_transformer(torch.float32).eval() for _ in range(2))
    add_finished_lora(ours, "drawn", *read_lora(family, str(whole), key="--lora"))
    assert isinstance(theirs, QwenImageTransformer2DModel)
    theirs.load_lora_adapter(whole / "lora", weight_name=FILE, prefix="transformer")
    inputs = {
        "hidden_states": torch.randn(1, 4, theirs.config.in_channels),
        "encoder_hidden_states": torch.randn(1, 3, theirs.config.joint_attention_dim),
        "encoder_hidden_states_mask": None,
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 2, 2)]],
    }
    with torch.no_grad():
        drawn, expected, base = (
            model(**inputs).sample for model in (ours, theirs, family.load_transformer(torch.float32))
        )
    torch.testing.assert_close(drawn, expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(drawn, base)
    sampling = ("sample", "--lora", str(whole), "--size", "32x32", "--steps", "2", "--scale", "0,1")
    assert main([*sampling, "--prompt", "a red circle"]) == 0
    assert main([*sampling, "--lora", str(file), "--prompt", "a red circle"]) == 2
    assert "which is not drawn together with others" in caplog.text
    assert main(["convert", str(file), str(tiny_run.root / "other.safetensors"), "--to", "kohya"]) == 2
    assert "cannot be joined" in caplog.text

    begun = tiny_run.root / "begun"
    start = [one for one in given if "lora.init" not in one and not one.startswith(("model.", "memory."))]
    start += [f"lora.init_from={whole}", "train.steps=1", f"output.dir={begun}", "train.ema_decay=null"]
    start += ["train.learning_rate=1e-30", "train.optimizer=adamw", "train.weight_decay=0"]
    assert tiny_run.train(*start) == 0
    for name, tensor in checkpoint_tensors(whole, 2).items():
        if name.startswith("adapter/"):
            torch.testing.assert_close(checkpoint_tensors(begun, 1)[name], tensor, rtol=1e-5, atol=0)
    plain = [one for one in start if not one.startswith(("lora.kind", "lora.lokr", "output.dir"))]
    assert tiny_run.train(*plain, f"output.dir={tiny_run.root / 'refused'}") == 2
    assert f"is a {'DoRA' if kind == 'dora' else 'LoKr'}, and this run trains a LoRA" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("lora.kind=loha", "neither diffusers nor this trainer can read a file of the kind loha back"),
        ("lora.kind=pissa", "changes the base's weights"),
        ("lora.init=olora", "olora changes the base's weights"),
        ("lora.init=orthogonal lora.rank=3", "take an even rank"),
        ("lora.kind=lokr", "is not for a LoKr, which drops no inputs"),
        ("lora.lokr_factor=8", "has no effect with lora.kind lora; remove it, or set kind: lokr"),
        ("lora.kind=dora train.optimizer=muon", "does not train the magnitudes of a DoRA"),
        ("lora.kind=lokr lora.dropout=0 model.training_adapter=x", "puts no LoRA on layers with a LoKr"),
    ],
)
def test_what_a_kind_does_not_have_is_refused_before_weights_load(
    tiny_run: TinyRun, settings: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert tiny_run.train(*settings.split()) == 2
    assert message in caplog.text
