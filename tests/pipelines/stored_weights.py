"""A model's tensors as files in 8 bits hold them, and the numbers that these stand for."""

import json

import torch
from torch import Tensor

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
