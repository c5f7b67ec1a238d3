"""The transformer from one file: the same weights in either layout of each family, and what is refused."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    WanAnimateTransformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from family_sample import CPU, Sample
from original_layouts import convert_width_of, functions_for, original_layout
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from diffsynth_lite.core.weights.formats import Int8
from diffsynth_lite.core.weights.frozen_linear import Quantization
from diffsynth_lite.core.weights.loading import StoredTensors
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import ModelFamily, PipelineFolder
from diffsynth_lite.pipelines.base.folder import ComponentFile
from diffsynth_lite.pipelines.base.quantized import load_frozen_component, quantizable_layers
from diffsynth_lite.pipelines.base.single_file import component_files, read_single_file
from diffsynth_lite.pipelines.flux import Flux, tiny
from diffsynth_lite.pipelines.wan import tiny_wan_transformer

KEY = "model.transformer_file"
KINDS = {
    "AuraFlowTransformer2DModel": ("an AuraFlow in diffusers' layout", "auraflow"),
    "ChromaTransformer2DModel": ("a Chroma", "chroma"),
    "CogVideoXTransformer3DModel": ("a CogVideoX", ""),
    "CosmosTransformer3DModel": ("an Anima in diffusers' layout", "an Anima"),
    "ErnieImageTransformer2DModel": ("an ERNIE-Image", "an ERNIE-Image"),
    "FluxTransformer2DModel": ("a FLUX.1", "flux-"),
    "Flux2Transformer2DModel": ("a FLUX.2", "flux-2-dev"),
    "Flux3Transformer2DModel": ("a FLUX.3", "flux-3-image"),
    "HiDreamImageTransformer2DModel": ("a HiDream-I1", "a HiDream-I1"),
    "Ideogram4Transformer2DModel": ("an Ideogram 4", ""),
    "Kandinsky5Transformer3DModel": ("a Kandinsky 5", "a Kandinsky 5"),
    "Krea2Transformer2DModel": ("a Krea 2", "krea2"),
    "HunyuanVideoTransformer3DModel": ("a HunyuanVideo", "hunyuan-video"),
    "HunyuanVideo15Transformer3DModel": ("a HunyuanVideo 1.5", "-"),  # diffusers knows no other layout
    "LongCatImageTransformer2DModel": ("a LongCat-Image in diffusers' layout", "flux-"),
    "LTX2VideoTransformer3DModel": ("an LTX-2", "an LTX-2"),
    "LTXVideoTransformer3DModel": ("an LTX-Video", "ltx-video"),
    "Lumina2Transformer2DModel": ("a Lumina 2 in diffusers' layout", "lumina2"),
    "MiniMaxH3Transformer3DModel": ("a MiniMax-H3", "minimax-h3"),
    "QwenImageTransformer2DModel": ("a Qwen-Image", "a Qwen-Image"),
    "QwenImage21Transformer2DModel": ("qwen-image-2.1", "qwen-image-2.1"),
    "SanaTransformer2DModel": ("a Sana", "sana"),
    "SD3Transformer2DModel": ("a Stable Diffusion 3", "a Stable Diffusion 3"),
    "UNet2DConditionModel": ("a UNet", "a UNet of S"),
    "WanAnimateTransformer3DModel": ("a Wan", "wan-"),
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
    original = original_layout(model) if functions_for(model) else None
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
    sample: Sample, family: ModelFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = sample.model
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


@pytest.mark.of_the_model
def test_tensors_are_converted_where_they_are_in_the_file(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_width_of(sample.model, monkeypatch)
    *_, tensors = layouts(sample.model).values()
    file = write(tensors, tmp_path / "x.safetensors")
    stored = StoredTensors.in_files([file.path])
    monkeypatch.setattr(StoredTensors, "in_files", lambda _: stored)
    places = {tensor.untyped_storage().data_ptr() for tensor in stored.tensors.values()}
    found = read_single_file(file, sample.model).tensors
    copied = {
        name.rpartition(".")[0] for name in found if found[name].untyped_storage().data_ptr() not in places
    }
    # Scale and shift change places, and in MiniMax-H3 gate and value.
    gates = {name for name in copied if name.endswith(".ff.net.0.proj") and sample.name == "minimax_h3"}
    assert copied - gates <= {"norm_out.linear", "transformer_blocks.1.norm1_context.linear"}


@pytest.mark.of_the_model
def test_weights_with_scales_are_the_exact_products(
    sample: Sample, family: ModelFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_width_of(sample.model, monkeypatch)
    *_, tensors = layouts(sample.model).values()
    loaded = []
    for stored in scaled(tensors):
        bind(family, write(stored, tmp_path / "x.safetensors"))
        loaded.append(family.load_transformer(torch.float32))
    assert differing(*loaded) == []


@pytest.mark.of_the_model
def test_a_file_of_another_model_is_named_for_what_it_is(sample: Sample, tmp_path: Path) -> None:
    model = sample.model
    of_wan = (
        WanTransformer3DModel,
        WanVACETransformer3DModel,
        WanAnimateTransformer3DModel,
    )  # one has the layers of the other
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


def test_what_cannot_be_read_is_refused(wan: nn.Module, tmp_path: Path) -> None:
    whole = write({"a": torch.ones(100)}, tmp_path / "whole.safetensors").path.read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-10])
    (tmp_path / "model.ckpt").write_bytes(b"x")
    for name, problem in (
        ("none.safetensors", "is not there; give a file on this machine"),
        (".", "is a folder"),
        ("model.ckpt", r"is not a \.safetensors, \.sft or \.gguf file"),
        ("cut.safetensors", "cannot be read .* get that file again"),
    ):
        with pytest.raises(UserError, match=problem):
            read_single_file(ComponentFile(path=tmp_path / name, key=KEY), wan)


E4M3 = torch.float8_e4m3fn


def comfy_quant(kind: str, **settings: object) -> Tensor:
    """The marker of a layer in the newer spelling."""
    return torch.tensor(list(json.dumps({"format": kind} | settings).encode()), dtype=torch.uint8)


def scaled(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights in 8 bits with scales of all or of rows, in all spellings by turns; and the products."""
    generator = torch.Generator().manual_seed(0)
    stored, dense = {"scaled_fp8": torch.zeros(0, dtype=E4M3)}, {}
    for place, (name, tensor) in enumerate(tensors.items()):
        stored[name] = dense[name] = tensor
        if tensor.ndim == 1 or not name.endswith(".weight"):
            continue
        layer = name.removesuffix(".weight")
        scale = torch.rand(len(tensor) if place % 3 else 1, generator=generator) + 0.5
        stored[name] = tensor.to(E4M3)
        if tensor.ndim == 2 and tensor.shape[1] % 4 == 0 and place % 4 == 1:
            stored[name] = (tensor * 50).clamp(-128, 127).to(torch.int8)
            marker = comfy_quant("int8_tensorwise", convrot=True, convrot_groupsize=4)
            stored |= {f"{layer}.weight_scale": scale, f"{layer}.comfy_quant": marker}
        elif place % 2:
            stored |= {f"{layer}.scale_weight": scale, f"{layer}.scale_input": torch.ones(())}
        else:
            stored |= {f"{layer}.weight_scale": scale, f"{layer}.comfy_quant": comfy_quant("float8_e4m3fn")}
        numbers = stored[name].float()
        if stored[name].dtype == torch.int8:  # half the sum of four columns, less the opposite one
            fours = numbers.unflatten(1, (-1, 4))
            numbers = (fours.sum(2, keepdim=True) / 2 - fours.flip(2)).flatten(1)
        dense[name] = numbers * scale.view(-1, *(1,) * (tensor.ndim - 1))
    return stored, dense


@pytest.fixture(scope="module")
def flux_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux")
    tiny().save_pretrained(folder)
    return folder


def loaded_from_file(folder: Path, file: Path) -> dict[str, Tensor]:
    """FLUX.1 with its weights from a file, in fp32."""
    files = {"transformer": ComponentFile(path=file, key=KEY)}
    bound = PipelineFolder(path=folder, files=files)
    return load_frozen_component(FluxTransformer2DModel, bound, "transformer", torch.float32).state_dict()


def test_a_gguf_file_in_the_original_layout_gives_the_numbers_that_gguf_makes(
    flux_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    model = FluxTransformer2DModel.from_pretrained(flux_folder, subfolder="transformer")
    convert_width_of(model, monkeypatch)
    writer = gguf.GGUFWriter(tmp_path / "flux.gguf", "flux")
    original, dense = original_layout(model), {}
    assert original is not None
    for name, tensor in original.items():
        can_be_q8 = tensor.ndim == 2 and tensor.shape[1] % 32 == 0
        kind = gguf.GGMLQuantizationType.Q8_0 if can_be_q8 else gguf.GGMLQuantizationType.F32
        stored = gguf.quants.quantize(tensor.numpy(), kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        dense[name] = torch.from_numpy(gguf.quants.dequantize(stored, kind).copy())
    assert any(not torch.equal(dense[name], tensor) for name, tensor in original.items())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(dense, tmp_path / "flux.safetensors")
    ours, theirs = (
        loaded_from_file(flux_folder, tmp_path / f"flux.{ending}") for ending in ("gguf", "safetensors")
    )
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []


@pytest.fixture(scope="module")
def in_8_bits(flux_folder: Path) -> dict[str, Tensor]:
    """The transformer's tensors with scales, in diffusers' layout."""
    tensors = load_file(flux_folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return scaled(tensors)[0]


NVFP4 = {
    "x_embedder.weight": torch.ones(32, 8, dtype=torch.uint8),
    "x_embedder.weight_scale": torch.ones(32, 1).to(E4M3),
    "x_embedder.weight_scale_2": torch.tensor(1.0),
}
INT8 = {
    "x_embedder.weight": torch.ones(32, 16, dtype=torch.int8),
    "x_embedder.weight_scale": torch.ones(32, 1),
}
LEFT_OVER = {"b.weight": torch.ones(2, 2).to(E4M3), "b.scale_weight": torch.tensor(0.5)}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"x_embedder.scale_weight": None}, "x_embedder lacks its weight or a scale of it"),
        (LEFT_OVER, r"1 of its scales belong to no layer of the model, such as that of b\.weight"),
        ({"x_embedder.comfy_quant": comfy_quant("nvfp4")}, r"x_embedder\.weight is float8_e4m3fn, but mark"),
        (NVFP4, r"nvfp4 without ComfyUI's marker \(x_embedder\.weight_scale_2\), which is not read"),
        (INT8, r"x_embedder\.weight in int8 with a scale, but without ComfyUI's marker, which is not"),
        ({"a.wscales": torch.ones(1)}, r"it is in SVDQuant \(Nunchaku\) \(a\.wscales\), which is not read"),
    ],
)
def test_a_file_with_scales_that_do_not_fit_or_in_another_format_is_refused(
    flux_folder: Path,
    in_8_bits: dict[str, Tensor],
    tmp_path: Path,
    changed: dict[str, Tensor | None],
    words: str,
) -> None:
    tensors = {name: tensor for name, tensor in (in_8_bits | changed).items() if tensor is not None}
    file = tmp_path / "flux.safetensors"
    save_file(tensors, file)
    with pytest.raises(UserError, match=f"{KEY}: {file} is not read: .*{words}"):
        loaded_from_file(flux_folder, file)


def test_a_gguf_file_needs_a_package(
    flux_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    file = tmp_path / "flux.gguf"
    file.touch()
    with pytest.raises(UserError, match=f"{KEY}: {file} needs gguf, which .*: pip install gguf"):
        loaded_from_file(flux_folder, file)


def test_scales_in_a_folder_are_refused_whoever_would_load_it(
    flux_folder: Path, in_8_bits: dict[str, Tensor], tmp_path: Path
) -> None:
    shutil.copytree(flux_folder, tmp_path, dirs_exist_ok=True)
    save_file(in_8_bits, tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(UserError, match=r"transformer have scales .* are read from model\.transformer_file"):
        Flux(PipelineFolder(path=tmp_path)).check_folder()
