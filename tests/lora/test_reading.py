"""Files as other trainers write them: each layer is found, each tensor accounted for, alpha honoured."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.layer_names import LayerNames
from diffsynth_lite.lora.reading import contents_of, known_pairs, read_contents
from diffsynth_lite.lora.updates import LoraPair
from diffsynth_lite.pipelines import load_family

FLUX, SDXL, WAN = (load_family(name).lora_layers for name in ("flux", "sdxl", "wan"))
DOUBLE, SINGLE = "transformer.transformer_blocks.1", "transformer.single_transformer_blocks.37"
QKV = ["attn.to_q", "attn.to_k", "attn.to_v"]
UNET = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1"
CLIP_LAYER = "text_model.encoder.layers.11"


def tensors(key: str, endings: str = "lora_A lora_B", outputs: int = 42) -> dict[str, torch.Tensor]:
    down, up = endings.split()
    return {f"{key}.{down}.weight": torch.randn(4, 6), f"{key}.{up}.weight": torch.randn(outputs, 4)}


def read(
    content: Mapping[str, torch.Tensor],
    names: Mapping[str, LayerNames],
    metadata: Mapping[str, str] | None = None,
) -> dict[str, LoraPair]:
    return known_pairs(contents_of(Path("lora.safetensors"), content, metadata or {}), names)


@pytest.mark.parametrize(
    ("key", "endings", "names", "layers"),
    [
        # kohya's sd-scripts and musubi-tuner
        ("lora_unet_double_blocks_1_img_attn_qkv", "lora_down lora_up", FLUX, [f"{DOUBLE}.{x}" for x in QKV]),
        ("lora_te1_text_model_encoder_layers_11_mlp_fc1", "lora_down lora_up", FLUX, None),
        (
            "lora_unet_single_blocks_37_linear1",
            "lora_down lora_up",
            FLUX,
            [f"{SINGLE}.{x}" for x in [*QKV, "proj_mlp"]],
        ),
        (
            "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_out_0",
            "lora_down lora_up",
            SDXL,
            [f"{UNET}.to_out.0"],
        ),
        (
            "lora_te2_text_model_encoder_layers_11_self_attn_q_proj",
            "lora_down lora_up",
            SDXL,
            [f"text_encoder_2.{CLIP_LAYER}.self_attn.q_proj"],
        ),
        (
            "lora_unet_blocks_29_cross_attn_k_img",
            "lora_down lora_up",
            WAN,
            ["transformer.blocks.29.attn2.add_k_proj"],
        ),
        # VideoX-Fun's
        (
            "lora_unet__blocks_0_ffn_2",
            "lora_down lora_up",
            WAN,
            ["transformer.blocks.0.ffn.net.2"],
        ),
        # ai-toolkit, and diffusion-pipe
        (
            "diffusion_model.double_blocks.1.txt_mlp.2",
            "lora_A lora_B",
            load_family("flux2").lora_layers,
            [f"{DOUBLE}.ff_context.linear_out"],
        ),
        (
            "diffusion_model.transformer_blocks.0.attn1.to_out.0",
            "lora_A lora_B",
            load_family("ltx_video").lora_layers,
            ["transformer.transformer_blocks.0.attn1.to_out.0"],
        ),
        ("transformer.single_transformer_blocks.37.proj_out", "lora_A lora_B", FLUX, [f"{SINGLE}.proj_out"]),
        # OneTrainer
        (
            "lora_transformer_transformer_blocks_1_ff_context_net_0_proj",
            "lora_down lora_up",
            FLUX,
            [f"{DOUBLE}.ff_context.net.0.proj"],
        ),
        (
            "text_encoders.clip_l.transformer.text_model.encoder.layers.11.mlp.fc1",
            "lora_A lora_B",
            SDXL,
            None,
        ),
        # DiffSynth-Studio
        (
            "pipe.dit.blocks.3.self_attn.o",
            "lora_A.default lora_B.default",
            WAN,
            ["transformer.blocks.3.attn1.to_out.0"],
        ),
        ("blocks.1.ff_b.0", "lora_A.default lora_B.default", FLUX, [f"{DOUBLE}.ff_context.net.0.proj"]),
        # peft
        (
            "base_model.model.transformer_blocks.1.img_mod.1",
            "lora_A lora_B",
            load_family("qwen_image").lora_layers,
            [f"{DOUBLE}.img_mod.1"],
        ),
        # diffusers before it used peft
        (f"{UNET}.processor.to_out_lora", "down up", SDXL, [f"{UNET}.to_out.0"]),
        (f"{UNET}.to_q", "lora.down lora.up", SDXL, [f"{UNET}.to_q"]),
        (
            f"text_encoder.{CLIP_LAYER}.self_attn.to_q_lora",
            "down up",
            SDXL,
            [f"text_encoder.{CLIP_LAYER}.self_attn.q_proj"],
        ),
        (
            f"text_encoder.{CLIP_LAYER}.mlp.fc1",
            "lora_linear_layer.down lora_linear_layer.up",
            SDXL,
            None,
        ),
        # XLabs
        ("double_blocks.1.processor.qkv_lora1", "down up", FLUX, [f"{DOUBLE}.{x}" for x in QKV]),
        # ComfyUI's names of Z-Image
        (
            "diffusion_model.noise_refiner.1.attention.qkv",
            "lora_A lora_B",
            load_family("z_image").lora_layers,
            [f"transformer.noise_refiner.1.attention.{x}" for x in ("to_q", "to_k", "to_v")],
        ),
    ],
)
def test_layers_are_found_by_the_names_that_trainers_give_them(
    key: str, endings: str, names: Mapping[str, LayerNames], layers: list[str] | None
) -> None:
    content = tensors(key, endings, outputs=42 if "linear1" in key else 18)
    pairs = read(content, names)
    assert list(pairs) == (layers or [f"text_encoder.{CLIP_LAYER}.mlp.fc1"])
    down, up = content.values()
    assert torch.equal(torch.cat([pair.up for pair in pairs.values()]), up)
    assert all(torch.equal(pair.down, down) and pair.alpha == 4 for pair in pairs.values())


@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize(
    ("settings", "alphas"),
    [
        ({"r": 4, "lora_alpha": 2}, (2.0, 2.0)),
        ({"r": 4, "lora_alpha": 2, "alpha_pattern": {"attn.to_k": 8}}, (2.0, 8.0)),
        ({"r": 4, "lora_alpha": 2, "use_rslora": True}, (4.0, 4.0)),
    ],
)
def test_alpha_is_that_of_pefts_settings(
    tmp_path: Path, settings: dict[str, object], alphas: tuple[float, float], in_folder: bool
) -> None:
    prefix = "base_model.model." if in_folder else "transformer."
    layers = [f"{prefix}transformer_blocks.1.attn.{layer}" for layer in ("to_q", "to_k")]
    header = {"lora_adapter_metadata": json.dumps({f"transformer.{name}": x for name, x in settings.items()})}
    if in_folder:
        header = {}
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    save_file(
        tensors(layers[0]) | tensors(layers[1]), tmp_path / "adapter_model.safetensors", metadata=header
    )
    contents = read_contents(tmp_path)
    assert contents.has_alpha
    pairs = known_pairs(contents, FLUX)
    assert tuple(pairs[f"{DOUBLE}.attn.{layer}"].alpha for layer in ("to_q", "to_k")) == alphas


def test_a_tensor_of_alpha_holds_for_its_own_layer() -> None:
    keys = [f"lora_unet_double_blocks_{block}_img_mlp_2" for block in range(2)]
    content = {
        **tensors(keys[0], "lora_down lora_up"),
        **tensors(keys[1], "lora_down lora_up"),
        f"{keys[1]}.alpha": torch.tensor(1, dtype=torch.bfloat16),
    }
    assert [pair.alpha for pair in read(content, FLUX).values()] == [4.0, 1.0]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lora_unet_single_blocks_0_linear1.lokr_t2", "a LoKr of convolutions"),
        ("lora_unet_single_blocks_0_linear1.hada_w1_a", "a LoHa"),
        ("transformer.proj_out.oft_R.weight", "an OFT"),
        ("transformer.proj_out.boft_R", "a BOFT"),
        ("lora_unet_input_blocks_1_0_in_layers_2.lora_mid.weight", "a LoCon whose convolutions"),
        ("diffusion_model.proj_out.diff_b", "a LoRA that also changes whole weights"),
        ("transformer.proj_out.lora_B.bias", "a LoRA with biases"),
        ("bundle_emb.word.clip_l", "a LoRA with embeddings"),
    ],
)
def test_other_kinds_than_a_plain_lora_are_refused_by_name(name: str, kind: str) -> None:
    with pytest.raises(UserError, match=rf"is {kind}.*\(1 tensors such as {name}\)"):
        read(tensors("transformer.proj_out") | {name: torch.zeros(4, 4)}, FLUX)


LOKR = {f"transformer.x_embedder.lokr_w{side}": torch.ones(2, 2) for side in (1, 2)}
DORA = tensors("transformer.proj_out") | {"transformer.proj_out.lora_magnitude_vector": torch.ones(42)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LOKR, "is a LoKr .1 layers such as transformer.x_embedder., which cannot be joined"),
        (DORA, "is a DoRA .1 layers such as transformer.proj_out., which cannot be joined"),
        (LOKR | DORA, "has layers of different kinds"),
        (
            LOKR | {"transformer.x_embedder.lokr_w1_a": torch.ones(2, 2)},
            "transformer.x_embedder is not a LoKr, with ",
        ),
        ({"transformer.proj_out.lokr_w1": torch.ones(2, 2)}, "is not a LoKr, with lokr_w1 .2, 2."),
        (
            {**tensors("transformer.proj_out"), "transformer.proj_out.dora_scale": torch.ones(4, 1)},
            "another prog",
        ),
        (
            DORA | {"transformer.proj_out.lora_magnitude_vector": torch.ones(3)},
            "lora_magnitude_vector .float32, 3",
        ),
    ],
)
def test_other_kinds_are_not_converted_and_what_is_no_whole_one_is_refused(
    content: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read(content, FLUX)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "is a DoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"lora_alpha": "much"}, "its settings of peft give no alpha for transformer.proj_out"),
        ({"lora_alpha": 0}, "lora_alpha is 0"),
        ({"lora_alpha": 4, "alpha_pattern": {"(": 2}}, "its settings of peft give no alpha"),
        ({"lora_alpha": 4, "alpha_pattern": ["x"]}, "its settings of peft give no alpha"),
        ({"peft_type": "LOHA"}, "is of the kind LOHA by its settings"),
        ({"layer_replication": [[0, 1]]}, "has layer_replication in its settings of peft, which is not comp"),
    ],
)
def test_what_pefts_settings_make_something_else_is_refused(
    settings: dict[str, object], message: str
) -> None:
    header = {"lora_adapter_metadata": json.dumps({f"transformer.{name}": x for name, x in settings.items()})}
    with pytest.raises(UserError, match=message):
        read(tensors("transformer.proj_out"), FLUX, header)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transformer.proj_out.scale": torch.zeros(4)}, "1 tensors belong to no layer.*: .*proj_out.scale"),
        ({"transformer.x_embedder.lora_A.weight": torch.zeros(4, 6)}, "x_embedder with one matrix"),
        ({"transformer.x_embedder.alpha": torch.tensor(4.0)}, "transformer.x_embedder.alpha"),
        ({"transformer.proj_out.alpha": torch.tensor(float("nan"))}, "transformer.proj_out.alpha"),
        # kohya's programs take 0 for the rank, diffusers and ComfyUI for no update.
        ({"transformer.proj_out.alpha": torch.zeros(1)}, r"proj_out.alpha \(float32, 1, 0.0\)"),
        ({"transformer.proj_out.lora_B.weight": torch.zeros(4, 5)}, "proj_out with ranks 4 and 5"),
        ({"transformer.proj_out.lora_A.weight": torch.zeros(0, 6)}, "transformer.proj_out.lora_A.weight"),
        ({"transformer.proj_out.lora_B.weight": torch.zeros(())}, r"lora_B.weight \(float32, no axes, 0.0\)"),
        ({"transformer.proj_out.alpha": torch.tensor(1j)}, r"proj_out.alpha \(complex64, no axes, 1j\)"),
        (tensors("transformer.proj_in"), r"1 of 2 layers are not known: transformer.proj_in \(6 to 42\)"),
        (tensors("lora_unet_double_blocks_0_img_attn_qkv"), r"not known: .*_img_attn_qkv \(6 to 42\)"),
        (tensors("lora_te3_encoder_block_0_layer_0_SelfAttention_q"), "layers are not known: lora_te3_enc"),
        (tensors("proj_out"), "has transformer.proj_out twice, the second time as proj_out"),
    ],
)
def test_no_tensor_is_left_out_silently(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tensors("transformer.proj_out") | change, FLUX)


def test_a_file_for_another_model_is_refused_with_its_family_and_few_of_its_layers() -> None:
    content = {name: each for place in range(9) for name, each in tensors(f"lora_unet_x_{place}").items()}
    with pytest.raises(UserError, match=r"9 of 9 layers .* here, as the file is of wan: ") as caught:
        read(content, FLUX, {"diffsynth_lite.family": "wan"})
    assert str(caught.value).count("lora_unet_x_") == 3


def test_text_encoders_are_left_out_when_asked_to() -> None:
    content = {**tensors("lora_unet_img_in"), **tensors("lora_te1_text_model_x"), **tensors("lora_te3_x")}
    contents = contents_of(Path("x"), content, {}).without_text_encoders()
    assert list(known_pairs(contents, FLUX)) == ["transformer.x_embedder"]


def test_metadata_and_files_that_never_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its settings of peft cannot be read"):
        read(tensors("transformer.proj_out"), FLUX, {"lora_adapter_metadata": "[" * 100_000})
    os.mkfifo(tmp_path / "pipe.safetensors")
    for place in (tmp_path, tmp_path / "pipe.safetensors"):
        with pytest.raises(UserError, match=r"pipe\.safetensors: there is no such file"):
            read_contents(place)


@pytest.mark.parametrize("content", [b"", b"<html>", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_file_that_is_not_a_lora_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match=r"name one file of safetensors; in this folder there is none"):
        read_contents(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"is not a readable safetensors file|holds no LoRA"):
        read_contents(tmp_path)
    with pytest.raises(UserError, match=r"there is no such file"):
        read_contents(tmp_path / "b.safetensors")
