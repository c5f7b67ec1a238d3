"""The transformer from one file: the same weights in either layout of each family, and what is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    QwenImageTransformer2DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from family_sample import CPU, Sample
from original_layouts import convert_width_of, original_layout
from safetensors.torch import save_file
from test_scaled_files import scaled
from torch import Tensor, nn

from diffsynth_lite.core.weights import Int8, Quantization, StoredTensors
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import ModelFamily, PipelineFolder, flux2
from diffsynth_lite.pipelines.base.folder import ComponentFile
from diffsynth_lite.pipelines.base.quantized import quantizable_layers
from diffsynth_lite.pipelines.base.single_file import component_files, read_single_file
from diffsynth_lite.pipelines.flux2 import Flux2
from diffsynth_lite.pipelines.wan import tiny_wan_transformer

KEY = "model.transformer_file"
KINDS = {
    "AuraFlowTransformer2DModel": ("no model that is known here", "auraflow"),
    "ChromaTransformer2DModel": ("a Chroma", "chroma"),
    "CogVideoXTransformer3DModel": ("a CogVideoX", ""),
    "CosmosTransformer3DModel": ("an Anima in diffusers' layout", "an Anima"),
    "ErnieImageTransformer2DModel": ("an ERNIE-Image", "an ERNIE-Image"),
    "FluxTransformer2DModel": ("a FLUX.1", "flux-"),
    "Flux2Transformer2DModel": ("a FLUX.2", "flux-2-dev"),
    "Ideogram4Transformer2DModel": ("an Ideogram 4", ""),
    "Krea2Transformer2DModel": ("a Krea 2", "krea2"),
    "HunyuanVideoTransformer3DModel": ("a HunyuanVideo", "hunyuan-video"),
    "HunyuanVideo15Transformer3DModel": ("a HunyuanVideo 1.5", "-"),  # diffusers knows no other layout
    "LTX2VideoTransformer3DModel": ("an LTX-2", "an LTX-2"),
    "LTXVideoTransformer3DModel": ("an LTX-Video", "ltx-video"),
    "QwenImageTransformer2DModel": ("a Qwen-Image", "a Qwen-Image"),
    "QwenImage21Transformer2DModel": ("qwen-image-2.1", "qwen-image-2.1"),
    "SanaTransformer2DModel": ("a Sana", "sana"),
    "SD3Transformer2DModel": ("a Stable Diffusion 3", "a Stable Diffusion 3"),
    "UNet2DConditionModel": ("a UNet", "a UNet of SDXL"),
    "WanVACETransformer3DModel": ("a Wan VACE", "a Wan VACE"),
    "WanTransformer3DModel": ("a Wan", "wan-"),
    "ZImageTransformer2DModel": ("z-image", "z-image"),
}
"""What a file of a model is reported to be, in either layout, where another is asked for."""


def write(tensors: dict[str, Tensor], file: Path) -> ComponentFile:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return ComponentFile(path=file, key=KEY)


def bind(family: ModelFamily, file: ComponentFile) -> None:
    """Have the family read its transformer, or UNet, from a file."""
    family.take_files(component_files({file.key: str(file.path)}, family.denoisers))


def with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def layouts(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """The tensors of a model as they may be in a file, with the prefixes that names have in some."""
    found = {"diffusers": with_prefix(model.state_dict(), "transformer.")}
    original = original_layout(model) if type(model).__name__ in SINGLE_FILE_LOADABLE_CLASSES else None
    if original is not None:
        found["original"] = with_prefix(original, "model.diffusion_model.")
        found["original"]["vae.decoder.conv_in.weight"] = torch.ones(3)
    return found


def differing(ours: nn.Module, theirs: nn.Module) -> list[str]:
    """Names of the parameters and buffers that are not the same, bit for bit."""
    left, right = (dict(model.named_parameters()) | dict(model.named_buffers()) for model in (ours, theirs))
    assert left.keys() == right.keys()
    return [
        name
        for name, tensor in left.items()
        if tensor.dtype != right[name].dtype or not torch.equal(tensor, right[name])
    ]


@pytest.fixture
def family(sample: Sample) -> Iterator[ModelFamily]:
    """The sample's, which is as it was in the end."""
    family = sample.family
    before = family.folder
    yield family
    family.folder, family.quantization = before, None


def test_a_file_in_either_layout_gives_the_model_that_the_folder_gives(
    family: ModelFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = family.load_transformer(torch.float32)
    convert_width_of(stored, monkeypatch)
    plain = family.load_transformer(torch.bfloat16)
    layers = tuple(quantizable_layers(stored, family.block_lists))
    quantization = Quantization(format=Int8(), layers=layers, device=CPU)
    family.quantization = quantization
    quantised = family.load_transformer(torch.bfloat16)
    for name, tensors in layouts(stored).items():
        file = write(tensors, tmp_path / f"{name}.safetensors")
        bind(family, file)
        family.quantization = None
        assert differing(family.load_transformer(torch.bfloat16), plain) == [], name
    family.quantization = quantization
    assert differing(family.load_transformer(torch.bfloat16), quantised) == []


def test_tensors_are_converted_where_they_are_in_the_file(
    family: ModelFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family.load_transformer(torch.float32)
    convert_width_of(model, monkeypatch)
    *_, tensors = layouts(model).values()
    file = write(tensors, tmp_path / "x.safetensors")
    stored = StoredTensors.in_files([file.path])
    monkeypatch.setattr(StoredTensors, "in_files", lambda _: stored)
    places = {tensor.untyped_storage().data_ptr() for tensor in stored.tensors.values()}
    found = read_single_file(file, model).tensors
    copied = {
        name.rpartition(".")[0] for name in found if found[name].untyped_storage().data_ptr() not in places
    }
    # Scale and shift change places.
    assert copied <= {"norm_out.linear", "transformer_blocks.1.norm1_context.linear"}


def test_weights_with_scales_are_the_exact_products(
    family: ModelFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family.load_transformer(torch.float32)
    convert_width_of(model, monkeypatch)
    *_, tensors = layouts(model).values()
    loaded = []
    for stored in scaled(tensors):
        bind(family, write(stored, tmp_path / "x.safetensors"))
        loaded.append(family.load_transformer(torch.float32))
    assert differing(*loaded) == []


def test_a_file_of_another_model_is_named_for_what_it_is(family: ModelFamily, tmp_path: Path) -> None:
    model = family.load_transformer(torch.float32)
    of_wan = WanTransformer3DModel, WanVACETransformer3DModel  # one has the layers of the other
    other = QwenImageTransformer2DModel if isinstance(model, of_wan) else WanTransformer3DModel
    with torch.device("meta"):
        wanted = other(num_layers=1)
    tensors = layouts(model)
    for layout, kind in zip(("diffusers", "original"), KINDS[type(model).__name__], strict=True):
        if layout in tensors:
            file = write(tensors[layout], tmp_path / f"{layout}.safetensors")
            with pytest.raises(UserError, match=f"{KEY}: .* does not fit .* it seems to be .*{kind}"):
                read_single_file(file, wanted)


def test_files_are_those_of_the_denoisers_in_their_order() -> None:
    files = component_files({KEY: None, "second": "~/low.safetensors"}, ("transformer", "transformer_2"))
    assert files == {"transformer_2": ComponentFile(path=Path.home() / "low.safetensors", key="second")}
    with pytest.raises(UserError, match=f"{KEY}: x has no effect, .* of a family that reads no such file"):
        component_files({KEY: "x"}, ())


@pytest.fixture(scope="module")
def wan() -> nn.Module:
    return tiny_wan_transformer(16).to("meta")


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["blocks.0.attn1.to_q.lora_A.weight"], "is a LoRA"),
        (["lora_unet_blocks_0_self_attn_q.lora_down.weight"], "is a LoRA"),
        (["encoder.block.0.layer.0.SelfAttention.k.weight", "shared.weight"], "seems to be a text encoder"),
        (["decoder.conv_in.bias", "encoder.conv_in.bias"], "seems to be an autoencoder"),
        (
            [
                "conditioner.embedders.1.model.transformer.resblocks.9.mlp.c_proj.bias",
                "model.diffusion_model.a",
            ],
            "seems to be what diffusers calls xl_base",
        ),
        (["a.weight", "b.bias"], "names such as a.weight, b.bias"),
    ],
)
def test_a_file_of_something_else_is_refused_by_what_it_seems_to_be(
    wan: nn.Module, tmp_path: Path, names: list[str], kind: str
) -> None:
    file = write({name: torch.ones(1) for name in names}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=f"{KEY}: {file.path} .*{kind}"):
        read_single_file(file, wan)


def test_of_a_class_that_diffusers_knows_one_layout_of_is_reported_so(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = CogVideoXTransformer3DModel(num_layers=1, use_rotary_positional_embeddings=True)
    file = write({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"by diffusers' names: it knows no others of that class"):
        read_single_file(file, model)


def test_the_same_model_in_another_size_is_refused_with_a_shape(wan: nn.Module, tmp_path: Path) -> None:
    larger = original_layout(tiny_wan_transformer(36))
    assert larger is not None
    file = write(larger, tmp_path / "x.safetensors")
    message = r"linear_1.weight, which is \[24, 36\], not \[24, 16\]; it seems to be one of another size"
    with pytest.raises(UserError, match=message):
        read_single_file(file, wan)


def test_scales_of_a_file_in_8_bits_go_where_its_weights_go(tmp_path: Path) -> None:
    pipeline = flux2.tiny()
    pipeline.save_pretrained(tmp_path)
    family = Flux2(PipelineFolder(path=tmp_path))
    tensors = original_layout(pipeline.transformer)
    assert tensors is not None
    scaled = [name for name in tensors if "blocks" in name and tensors[name].ndim == 2]
    for place, name in enumerate(scaled, start=1):
        scale = torch.tensor(place / 512)
        weight = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors |= {name: weight, f"{name.removesuffix('weight')}scale_weight": scale}
    file = write(tensors | {"scaled_fp8": torch.zeros(2)}, tmp_path / "x.safetensors")
    bind(family, file)
    loaded = original_layout(family.load_transformer(torch.float32))
    assert loaded is not None
    for place, name in enumerate(scaled, start=1):
        assert torch.equal(loaded[name], tensors[name].float() * (place / 512)), name
    assert len(scaled) > 10

    tensors.pop(f"{scaled[0].removesuffix('weight')}scale_weight")
    write(tensors, file.path)
    with pytest.raises(UserError, match=f"{KEY}: {file.path} is not read: 1 of its layers in 8 bits lack"):
        family.check_folder()


def test_what_cannot_be_read_is_refused(wan: nn.Module, tmp_path: Path) -> None:
    whole = write({"a": torch.ones(100)}, tmp_path / "whole.safetensors").path.read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-10])
    (tmp_path / "model.ckpt").write_bytes(b"x")
    for name, problem in (
        ("none.safetensors", "is not there; give a file on this machine"),
        (".", "is a folder"),
        ("model.ckpt", r"is no \.safetensors, \.sft or \.gguf file"),
        ("cut.safetensors", "cannot be read .* get that file again"),
    ):
        with pytest.raises(UserError, match=problem):
            read_single_file(ComponentFile(path=tmp_path / name, key=KEY), wan)
