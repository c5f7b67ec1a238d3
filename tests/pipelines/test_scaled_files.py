"""Files with weights in formats of their own: what is read of them, and what is refused by name."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from original_layouts import convert_width_of, original_layout
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.base.folder import ComponentFile
from diffsynth_lite.pipelines.base.quantized import load_frozen_component
from diffsynth_lite.pipelines.flux import Flux, tiny

E4M3 = torch.float8_e4m3fn


def comfy_quant(kind: str) -> Tensor:
    """The marker of a layer in the newer spelling."""
    return torch.tensor(list(json.dumps({"format": kind}).encode()), dtype=torch.uint8)


def scaled(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights in 8 bits with scales of all or of rows, in both spellings by turns; and the products."""
    generator = torch.Generator().manual_seed(0)
    stored, dense = {"scaled_fp8": torch.zeros(0, dtype=E4M3)}, {}
    for place, (name, tensor) in enumerate(tensors.items()):
        stored[name] = dense[name] = tensor
        if tensor.ndim == 1 or not name.endswith(".weight"):
            continue
        layer = name.removesuffix(".weight")
        scale = torch.rand(len(tensor) if place % 3 else 1, generator=generator) + 0.5
        stored[name] = tensor.to(E4M3)
        dense[name] = stored[name].float() * scale.view(-1, *(1,) * (tensor.ndim - 1))
        if place % 2:
            stored |= {f"{layer}.scale_weight": scale, f"{layer}.scale_input": torch.ones(())}
        else:
            stored |= {f"{layer}.weight_scale": scale, f"{layer}.comfy_quant": comfy_quant("float8_e4m3fn")}
    return stored, dense


KEY = "model.transformer_file"


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux")
    tiny().save_pretrained(folder)
    return folder


def loaded(folder: Path, file: Path) -> dict[str, Tensor]:
    """FLUX.1 with its weights from a file, in fp32."""
    files = {"transformer": ComponentFile(path=file, key=KEY)}
    bound = PipelineFolder(path=folder, files=files)
    return load_frozen_component(FluxTransformer2DModel, bound, "transformer", torch.float32).state_dict()


def test_a_gguf_file_in_the_original_layout_gives_the_numbers_that_gguf_makes(
    flux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    model = FluxTransformer2DModel.from_pretrained(flux, subfolder="transformer")
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
    ours, theirs = (loaded(flux, tmp_path / f"flux.{ending}") for ending in ("gguf", "safetensors"))
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []


@pytest.fixture(scope="module")
def in_8_bits(flux: Path) -> dict[str, Tensor]:
    """The transformer's tensors with scales, in diffusers' layout."""
    tensors = load_file(flux / "transformer" / "diffusion_pytorch_model.safetensors")
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
        ({"x_embedder.scale_weight": None}, r"lack their scale or their weight, such as x_embedder\.weight"),
        (LEFT_OVER, r"1 of its scales belong to no layer of the model, such as that of b\.weight"),
        ({"x_embedder.comfy_quant": comfy_quant("nvfp4")}, "x_embedder is in nvfp4, which is not read"),
        (NVFP4, r"it is in nvfp4 \(x_embedder\.weight_scale_2\), which is not read; take one in bfloat16"),
        (
            INT8 | {"x_embedder.comfy_quant": comfy_quant("int8_tensorwise")},
            "x_embedder is in int8_tensorwise, which is not read; .*model.quantize makes it small",
        ),
        (INT8, r"x_embedder\.weight in int8 with a scale, as ComfyUI's int8_tensorwise and ConvRot, which"),
        ({"a.wscales": torch.ones(1)}, r"it is in SVDQuant \(Nunchaku\) \(a\.wscales\), which is not read"),
    ],
)
def test_a_file_with_scales_that_do_not_fit_or_in_another_format_is_refused(
    flux: Path, in_8_bits: dict[str, Tensor], tmp_path: Path, changed: dict[str, Tensor | None], words: str
) -> None:
    tensors = {name: tensor for name, tensor in (in_8_bits | changed).items() if tensor is not None}
    file = tmp_path / "flux.safetensors"
    save_file(tensors, file)
    with pytest.raises(UserError, match=f"{KEY}: {file} is not read: .*{words}"):
        loaded(flux, file)


def test_a_gguf_file_needs_a_package(flux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    file = tmp_path / "flux.gguf"
    file.touch()
    with pytest.raises(UserError, match=f"{KEY}: {file} needs gguf, which .*: pip install gguf"):
        loaded(flux, file)


def test_scales_in_a_folder_are_refused_whoever_would_load_it(
    flux: Path, in_8_bits: dict[str, Tensor], tmp_path: Path
) -> None:
    shutil.copytree(flux, tmp_path, dirs_exist_ok=True)
    save_file(in_8_bits, tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(UserError, match=r"transformer have scales .* are read from model\.transformer_file"):
        Flux(PipelineFolder(path=tmp_path)).check_folder()
