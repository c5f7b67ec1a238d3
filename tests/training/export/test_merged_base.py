"""Weights with updates added: each kind as its adapter computes it, and files as diffusers names them."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import load_file

from diffsynth_lite.core.weights.loading import StoredTensors
from diffsynth_lite.lora import add_finished_lora, set_lora_weights
from diffsynth_lite.lora.updates import LoraPair, updates_of
from diffsynth_lite.training.export.merged_base import change_of, write_weights

LAYER = "transformer_blocks.0.attn.to_q"
ADAPTERS = {
    "lora": {"lora_A.weight": (4, 48), "lora_B.weight": (48, 4)},
    "dora": {"lora_A.weight": (4, 48), "lora_B.weight": (48, 4), "lora_magnitude_vector": (48,)},
    "lokr": {"lokr_w1": (6, 4), "lokr_w2_a": (8, 3), "lokr_w2_b": (3, 12)},
}


@pytest.mark.parametrize("parts", ADAPTERS.values(), ids=ADAPTERS)
def test_a_weight_with_an_update_computes_what_the_adapter_does_at_its_strength(
    parts: dict[str, tuple[int, ...]],
) -> None:
    torch.manual_seed(0)
    model = QwenImageTransformer2DModel(
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    weight = model.get_parameter(f"{LAYER}.weight").detach().clone()
    tensors = {f"{LAYER}.{part}": torch.randn(shape) for part, shape in parts.items()}
    update = updates_of(tensors, {})[LAYER]
    x = torch.randn(5, 48)
    expected = torch.nn.functional.linear(
        x, weight + 0.7 * change_of(update, weight), model.get_parameter(f"{LAYER}.bias")
    )
    add_finished_lora(model, "given", tensors, {})
    set_lora_weights(model, {"given": 0.7})
    # Both in float32, in another order.
    torch.testing.assert_close(model.get_submodule(LAYER)(x), expected, rtol=1e-4, atol=1e-4)


def test_files_are_cut_as_diffusers_reads_them_and_only_layers_with_updates_are_changed(
    tmp_path: Path,
) -> None:
    stored = {
        "a.weight": torch.randn(4, 6),
        "a.bias": torch.randn(4),
        "b.weight": torch.randn(3, 3),
        "n": torch.arange(2),
    }
    empty = {name: tensor.to("meta") for name, tensor in stored.items()}
    empty["a.weight"], empty["a.bias"] = empty["a.weight"].bfloat16(), empty["a.bias"].half()
    pair = LoraPair(down=torch.randn(2, 6), up=torch.randn(4, 2), alpha=1.0)
    updates = {"a": [(pair, 0.5), (pair, 1.5)]}
    norms = write_weights(
        tmp_path, StoredTensors(tensors=stored), empty, updates, metadata={"made_of": "it"}, shard_bytes=64
    )
    index = json.loads((tmp_path / "diffusion_pytorch_model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"diffusion_pytorch_model-0000{place}-of-00002.safetensors" for place in (1, 2)]
    found = {name: tensor for file in files for name, tensor in load_file(tmp_path / file).items()}
    assert set(index["weight_map"]) == set(found) == set(stored)
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: tensor.dtype for name, tensor in empty.items()
    }
    whole = stored["a.weight"] + 2 * 0.5 * pair.up @ pair.down
    assert torch.equal(found["a.weight"], whole.bfloat16())
    assert torch.equal(found["b.weight"], stored["b.weight"])
    ((lost, change),) = norms.values()
    assert lost == pytest.approx(float((whole.bfloat16().float() - whole).norm()), rel=1e-3)
    assert change == pytest.approx(float((pair.up @ pair.down).norm()), rel=1e-5)
