"""Runs with ranks of layers, with other kinds of adapters, and from a LoRA that exists."""

import re
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from family_sample import pairs_on
from safetensors.torch import load_file, save, save_file
from tiny_run import UNWATCHED, TinyRun, checkpoint_part, checkpoint_tensors, differing, lora_metadata_of

from diffsynth_lite.cli.main import main
from diffsynth_lite.lora import add_finished_lora
from diffsynth_lite.lora.updates import pairs_of
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.training.lora_file import read_lora

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

    adapter = checkpoint_part(whole, 3)
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
    assert differing(checkpoint_part(first, 1), checkpoint_part(second, 1)) == []
    assert tiny_run.train("train.steps=1", *again[:1], f"output.dir={tiny_run.root / 'third'}") == 2
    assert "has rank 2, 4; set lora.rank to it" in caplog.text


KINDS = {
    # With what each may have next to it, and what of memory changes no number.
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
    assert "which cannot be combined with other LoRAs" in caplog.text
    assert main(["convert", str(file), str(tiny_run.root / "other.safetensors"), "--to", "kohya"]) == 2
    assert "cannot be joined" in caplog.text

    begun = tiny_run.root / "begun"
    start = [one for one in given if "lora.init" not in one and not one.startswith(("model.", "memory."))]
    start += [f"lora.init_from={whole}", "train.steps=1", f"output.dir={begun}", "train.ema_decay=null"]
    start += ["train.learning_rate=1e-30", "train.optimizer=adamw", "train.weight_decay=0"]
    assert tiny_run.train(*start) == 0
    begun_at = checkpoint_part(begun, 1)
    for name, tensor in checkpoint_part(whole, 2).items():
        torch.testing.assert_close(begun_at[name], tensor, rtol=1e-5, atol=0)
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


@pytest.fixture
def first(begun_run: TinyRun) -> Path:
    """An earlier run, which has a LoRA."""
    return begun_run.folder.rename(begun_run.root / "first")


@pytest.mark.parametrize("form", ["", "lora/pytorch_lora_weights.safetensors"])
def test_a_new_run_starts_at_the_values_of_the_lora_and_with_a_new_optimizer(
    begun_run: TinyRun, first: Path, form: str
) -> None:
    # The learning rate is so low that fp32 cannot hold what the one step changes.
    settings = ("train.steps=1", "train.learning_rate=1e-30", "train.weight_decay=0")
    assert begun_run.train(f"lora.init_from={first / form}", *settings) == 0
    assert differing(checkpoint_part(first, 2), checkpoint_part(begun_run.folder, 1)) == []
    new = begun_run.root / "new"
    assert begun_run.train(f"output.dir={new}", *settings) == 0
    assert differing(checkpoint_part(first, 2), checkpoint_part(new, 1)) != []
    steps = [
        value for name, value in checkpoint_tensors(begun_run.folder, 1).items() if name.endswith("::step")
    ]
    assert {step.item() for step in steps} == {1.0}


def as_kohya_writes_it(file: Path, target: Path, *, alpha: float) -> None:
    """The LoRA of a file, whose alpha is its rank, by kohya's names and with another alpha."""
    tensors = {}
    for name, tensor in load_file(file).items():
        layer, _, matrix = name.removeprefix("transformer.").rpartition(".lora_")
        key = f"lora_unet_{layer.replace('.', '_')}"
        down = matrix == "A.weight"
        tensors[f"{key}.{'lora_down' if down else 'lora_up'}.weight"] = tensor if down else tensor * 4 / alpha
        tensors[f"{key}.alpha"] = torch.tensor(alpha)
    target.parent.mkdir()
    save_file(tensors, target)


def test_a_lora_of_another_trainer_does_the_same_in_a_run_of_another_alpha(
    begun_run: TinyRun, first: Path
) -> None:
    settings = ("train.steps=1", "train.learning_rate=1e-30", "train.weight_decay=0", "lora.alpha=2")
    theirs = first.with_name("theirs")
    as_kohya_writes_it(first / "lora/pytorch_lora_weights.safetensors", theirs / "a.safetensors", alpha=16)
    assert begun_run.train(f"lora.init_from={theirs}", *settings) == 0
    before, after = checkpoint_part(first, 2), checkpoint_part(begun_run.folder, 1)
    for name, value in before.items():
        assert torch.equal(value * 4 if ".lora_B." in name else value, after[name]), name


def test_a_run_that_goes_on_does_not_look_at_it_any_more_and_may_write_files_of_another_dtype(
    begun_run: TinyRun, first: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, start = begun_run.root / "whole", f"lora.init_from={first / 'lora'}"
    assert begun_run.train(f"output.dir={whole}", start) == 0
    assert begun_run.train(start, "train.steps=4") == 0
    (first / "lora" / "pytorch_lora_weights.safetensors").unlink()
    assert "The LoRA file is in" not in caplog.text
    assert begun_run.train(start, "output.lora_dtype=bfloat16") == 0
    assert differing(checkpoint_tensors(whole, 6), checkpoint_tensors(begun_run.folder, 6)) == []
    assert re.search(
        r"The LoRA file is in bfloat16: its update is that of the checkpoint to 0\.\d+ %", caplog.text
    )
    (file,) = (begun_run.folder / "lora").glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("lora.rank=8",), "has rank 4; set lora.rank"),
        (
            ("lora.target_modules=[to_q]",),
            "it also has transformer_blocks.0.attn.add_k_proj); set 'lora.target_modules=[attn.add_k_proj, ",
        ),
    ],
)
def test_a_lora_of_another_shape_is_refused_with_what_would_do(
    begun_run: TinyRun, first: Path, caplog: pytest.LogCaptureFixture, settings: tuple[str, ...], message: str
) -> None:
    assert begun_run.train(f"lora.init_from={first / 'lora'}", *settings) == 2
    assert message in caplog.text
    assert "Loading the transformer" not in caplog.text.rsplit("settings from", 1)[-1]


def test_a_lora_with_a_number_that_is_not_finite_is_refused_by_name(
    tiny_run: TinyRun, whole_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = load_file(whole_run.folder / "lora" / "pytorch_lora_weights.safetensors")
    name = next(name for name in tensors if name.endswith(".lora_B.weight"))
    tensors[name][0, 0] = torch.inf
    file = tiny_run.root / "lora.safetensors"
    save_file(tensors, file)
    assert tiny_run.train(f"lora.init_from={file}") == 2
    assert f"lora.init_from: {file}: " in caplog.text
    assert f"{name.removeprefix('transformer.')} holds NaN or infinity" in caplog.text
    assert "Loading the transformer" not in caplog.text


OF_WAN = {"blocks.0.self_attn.q.lora_down.weight": (4, 8), "blocks.0.self_attn.q.lora_up.weight": (8, 4)}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *((content, "") for content in (None, b"", b"<html>", b"\x08\0\0\0\0\0\0\0{}      ")),
        (
            save({name: torch.ones(shape) for name, shape in OF_WAN.items()}),
            "it looks like a LoRA of wan or ",
        ),
        (
            save(
                {name: torch.ones(shape) for name, shape in OF_WAN.items()},
                {"diffsynth_lite.family": "wan_i2v"},
            ),
            "not known here, as the file is of wan_i2v: ",
        ),
    ],
)
def test_what_is_no_lora_of_the_model_is_refused_in_one_line(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture, content: bytes | None, words: str
) -> None:
    file = tiny_run.root / "lora.safetensors"
    if content is not None:
        file.write_bytes(content)
    assert tiny_run.train(f"lora.init_from={file}") == 2
    assert "lora.init_from: " in caplog.text
    assert words in caplog.text
    assert ("looks like" in caplog.text) == ("looks like" in words)
    assert ("looks like" in caplog.text) == ("looks like" in words)
    assert "Traceback" not in caplog.text
