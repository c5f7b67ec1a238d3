"""Finished LoRAs on a tiny Qwen-Image transformer: several with weights, as diffusers has them."""

from collections.abc import Mapping

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor, nn

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import add_finished_lora, require_fit, set_lora_weights

WIDTH = 48
LAYER = "transformer_blocks.{}.attn.{}"
BOTH, FIRST, SECOND = LAYER.format(0, "to_q"), LAYER.format(1, "to_q"), LAYER.format(1, "to_k")


def transformer() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = QwenImageTransformer2DModel(
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    return model


def lora_on(ranks: Mapping[str, int], seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    first = {f"{layer}.lora_A.weight": torch.randn(rank, WIDTH) for layer, rank in ranks.items()}
    return first | {f"{layer}.lora_B.weight": torch.randn(WIDTH, rank) for layer, rank in ranks.items()}


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_several_have_the_weights_and_the_bits_that_they_have_in_diffusers() -> None:
    own, theirs, plain = transformer(), transformer(), transformer()
    given = {
        "one": (lora_on({BOTH: 4, FIRST: 4}, seed=1), {"r": 4, "lora_alpha": 3}),
        "two": (lora_on({BOTH: 2, SECOND: 2}, seed=2), {"r": 2, "lora_alpha": 2}),
    }
    state = torch.get_rng_state()
    for name, (tensors, settings) in given.items():
        add_finished_lora(own, name, tensors, settings)
    assert torch.equal(torch.get_rng_state(), state)
    for name, (tensors, settings) in given.items():
        metadata = settings | {"target_modules": sorted({key.rsplit(".lora_", 1)[0] for key in tensors})}
        theirs.load_lora_adapter(dict(tensors), adapter_name=name, prefix=None, metadata=metadata)
    inputs = torch.randn(3, WIDTH)
    for weights in ({"one": 0.7, "two": -0.3}, {"two": 1.0}, {"one": 0.0, "two": 0.0}):
        set_lora_weights(own, weights)
        theirs.set_adapters(list(weights), list(weights.values()))
        for layer in (BOTH, FIRST, SECOND):
            output = own.get_submodule(layer)(inputs)
            assert torch.equal(output, theirs.get_submodule(layer)(inputs))
            is_changed = any(
                weight and f"{layer}.lora_A.weight" in given[name][0] for name, weight in weights.items()
            )
            assert torch.equal(output, plain.get_submodule(layer)(inputs)) is not is_changed


def test_layers_may_have_ranks_of_their_own_and_without_an_alpha_none_is_scaled() -> None:
    model, plain = transformer(), transformer()
    tensors = lora_on({"proj_out": 4, BOTH: 2, FIRST: 4} | {LAYER.format(0, "to_out.0"): 3}, seed=1)
    tensors["proj_out.lora_B.weight"] = torch.randn(64, 4)
    add_finished_lora(model, "one", tensors, {})
    set_lora_weights(model, {"one": 1.0})
    inputs = torch.randn(3, WIDTH)
    for layer in {name.rsplit(".lora_", 1)[0] for name in tensors}:
        first, second = (tensors[f"{layer}.lora_{part}.weight"] for part in "AB")
        expected = plain.get_submodule(layer)(inputs) + inputs @ first.T @ second.T
        torch.testing.assert_close(model.get_submodule(layer)(inputs), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {f"{SECOND}.lora_magnitude_vector": torch.ones(WIDTH)},
            "1 of its 2 layers",
        ),
        ({"blocks.0.q.lora_A.weight": torch.ones(2, WIDTH)}, r"1 of its 2 layers .* such as blocks\.0\.q"),
        ({f"{BOTH}.lora_B.weight": torch.ones(WIDTH, 3)}, "1 of its 1 layers"),
        ({f"{BOTH}.lora_A.weight": torch.ones(2, WIDTH - 1)}, "1 of its 1 layers"),
        ({f"{BOTH}.lora_A.weight": torch.full((2, WIDTH), torch.nan)}, "not finite; get the LoRA again"),
    ],
)
def test_what_does_not_fit_is_named_before_there_are_weights(change: dict[str, Tensor], message: str) -> None:
    with torch.device("meta"):
        model = transformer()
    tensors = lora_on({BOTH: 2}, seed=1)
    require_fit(model, tensors, place="lora.safetensors")
    with pytest.raises(UserError, match=rf"lora\.safetensors.*{message}"):
        require_fit(model, tensors | change, place="lora.safetensors")


def test_a_file_without_tensors_is_no_lora() -> None:
    with pytest.raises(UserError, match=r"lora\.safetensors holds no tensors"):
        require_fit(nn.Linear(1, 1), {}, place="lora.safetensors")
