"""Adapters and finished LoRAs on a tiny Qwen-Image transformer: layers, precision, tensors, weights."""

from collections.abc import Mapping

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor, nn

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import (
    LoraSize,
    adapter_settings,
    adapter_size,
    adapter_tensors,
    add_adapter,
    add_finished_lora,
    find_target_layers,
    layers_with,
    load_adapter_tensors,
    require_fit,
    set_lora_weights,
)
from diffsynth_lite.lora.updates import pairs_of

UNUSED = ("transformer_blocks.1.attn.to_add_out", "transformer_blocks.1.txt_mlp")


def tiny_transformer(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = QwenImageTransformer2DModel(
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def targets(model: nn.Module, *names: str) -> list[str]:
    return find_target_layers(model, names, unused_modules=UNUSED)


def test_of_many_layers_an_unknown_target_is_shown_the_first() -> None:
    model = nn.ModuleDict({f"layer_{place:02d}": nn.Linear(1, 1) for place in range(25)})
    with pytest.raises(UserError, match=r"layer_18; layer_19; and 5 more$"):
        find_target_layers(model, ["to_q"], unused_modules=())


BLOCK = "transformer_blocks"


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        (
            ("to_q", "to_add_out", "txt_mlp.net.2"),
            [
                f"{BLOCK}.0.attn.to_q",
                f"{BLOCK}.0.attn.to_add_out",
                f"{BLOCK}.0.txt_mlp.net.2",
                f"{BLOCK}.1.attn.to_q",
            ],
        ),
        (("proj_out",), ["proj_out"]),
        ((f"{BLOCK}.*.attn.to_q",), [f"{BLOCK}.0.attn.to_q", f"{BLOCK}.1.attn.to_q"]),
        (("norm_out.*",), ["norm_out.linear"]),
        ((f"{BLOCK}.0-1.attn.to_q",), [f"{BLOCK}.0.attn.to_q", f"{BLOCK}.1.attn.to_q"]),
        ((f"{BLOCK}.1-7.attn.to_q",), [f"{BLOCK}.1.attn.to_q"]),
        (("img_mlp.net.2-2",), [f"{BLOCK}.0.img_mlp.net.2", f"{BLOCK}.1.img_mlp.net.2"]),
    ],
)
def test_targets_match_whole_parts_of_names_and_leave_out_layers_whose_output_nobody_uses(
    names: tuple[str, ...], layers: list[str]
) -> None:
    assert targets(tiny_transformer(), *names) == layers


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("o_q",), "o_q match no linear layer"),
        (
            ("to_q", f"{BLOCK}.*.proj_out", "blocks.*.to_q"),
            rf"{BLOCK}\.\*\.proj_out; blocks\.\*\.to_q match no ",
        ),
        ((f"{BLOCK}.2-7.attn.to_q",), rf"{BLOCK}\.2-7\.attn\.to_q match no linear layer"),
        (
            ("to_q", "img_mlp.2", "to_x"),
            r"img_mlp\.2; to_x match no linear layer .* did you mean .*img_mlp\.net\.2",
        ),
        ((), r"lora\.target_modules is empty"),
    ],
)
def test_a_target_without_a_match_is_refused_with_the_close_one(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        targets(tiny_transformer(), *names)


def test_the_counted_size_of_an_adapter_is_the_trained_one() -> None:
    model = tiny_transformer()
    layers = targets(model, "to_q", "img_mod.1", "img_mlp.net.2")
    size = adapter_size(model, layers, rank=3)
    add_adapter(model, layers, rank=3, alpha=3, dropout=0, seed=0)
    assert size == sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def test_parts_of_names_are_found_anywhere_in_them() -> None:
    names = ["transformer.blocks.1.attn.to_q", "transformer_2.blocks.10.attn.to_q", "transformer_2.proj_out"]
    assert layers_with(names, "transformer_2") == names[1:]
    assert layers_with(names, "blocks.0-9") == names[:1]
    assert layers_with(names, "blocks.*.attn") == names[:2]
    assert layers_with(names, "to_q") == names[:2]
    assert layers_with(names, "transformer") == names[:1]
    assert layers_with(names, "transformer_2.proj_out.weight") == []


def with_own_sizes(layers: list[str], size: LoraSize) -> nn.Module:
    model = tiny_transformer()
    add_adapter(model, layers, rank=4, alpha=8, dropout=0, seed=0, own=dict.fromkeys(layers, size))
    return model


def test_layers_may_have_a_rank_and_an_alpha_of_their_own() -> None:
    model = tiny_transformer()
    # Also a name with which another begins.
    layers = [*targets(model, "to_q", "img_mlp.net.2"), "proj_out"]
    own = {
        "transformer_blocks.1.attn.to_q": LoraSize(2, 6.0),
        "proj_out": LoraSize(3, 4.0),
        "transformer_blocks.0.img_mlp.net.2": LoraSize(4, 1.0),
    }
    add_adapter(model, layers, rank=4, alpha=8, dropout=0, seed=0, own=own)
    sizes = {}
    for layer in layers:
        module = model.get_submodule(layer)
        down, up = module.lora_A["default"].weight, module.lora_B["default"].weight
        assert down.shape[0] == up.shape[1]
        sizes[layer] = LoraSize(down.shape[0], module.scaling["default"] * down.shape[0])
    assert sizes == {layer: own.get(layer, LoraSize(4, 8.0)) for layer in layers}
    assert adapter_size(tiny_transformer(), layers, rank=4, own=own) == sum(
        weight.numel() for weight in model.parameters() if weight.requires_grad
    )
    settings = adapter_settings(model)
    assert settings["rank_pattern"] == {"transformer_blocks.1.attn.to_q": 2, "proj_out": 3}
    assert settings["alpha_pattern"] == {layer: size.alpha for layer, size in own.items()}
    alike = adapter_settings(with_own_sizes(layers, LoraSize(4, 8.0)))
    assert alike.keys() == settings.keys() - {"rank_pattern", "alpha_pattern"}
    pairs = pairs_of(adapter_tensors(model), settings)
    assert {layer: LoraSize(pair.rank, pair.alpha) for layer, pair in pairs.items()} == sizes


def test_the_adapter_is_fp32_on_a_bf16_base_and_nothing_else_is_trained() -> None:
    model = tiny_transformer(torch.bfloat16)
    add_adapter(model, targets(model, "to_q"), rank=4, alpha=8, dropout=0.1, seed=0)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 4
    assert all(".lora_" in name for name in trained)
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    base = [parameter for name, parameter in model.named_parameters() if ".lora_" not in name]
    assert {parameter.dtype for parameter in base} == {torch.bfloat16}


def test_the_settings_name_every_layer_in_full_also_where_peft_shortens_their_names() -> None:
    model = tiny_transformer()
    names = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "img_mlp.net.2")
    layers = targets(model, *names, "img_mod.1", "txt_mod.1", "img_mlp.net.0.proj")
    assert len(layers) == 22
    add_adapter(model, layers, rank=4, alpha=8, dropout=0.0, seed=0)
    assert len(model.peft_config["default"].target_modules) < 22
    assert adapter_settings(model)["target_modules"] == sorted(layers)


def test_the_first_values_follow_the_seed_and_leave_the_global_state() -> None:
    values = []
    for seed in (7, 7, 8):
        model = tiny_transformer()
        state = torch.get_rng_state()
        add_adapter(model, targets(model, "to_q"), rank=4, alpha=4, dropout=0.0, seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        values.append(adapter_tensors(model)["transformer_blocks.0.attn.to_q.lora_A.weight"])
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


def test_tensors_taken_out_and_put_into_a_fresh_adapter_are_the_same() -> None:
    first, second = tiny_transformer(), tiny_transformer()
    for seed, model in enumerate((first, second)):
        add_adapter(model, targets(model, "to_q", "to_v"), rank=4, alpha=4, dropout=0.0, seed=seed)
    load_adapter_tensors(second, adapter_tensors(first))
    ours, theirs = adapter_tensors(first), adapter_tensors(second)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("names", "rank"), [(("to_q",), 4), (("to_q", "to_v", "to_k"), 4), (("to_q", "to_v"), 8)]
)
def test_tensors_of_another_adapter_are_refused(names: tuple[str, ...], rank: int) -> None:
    model, other = tiny_transformer(), tiny_transformer()
    add_adapter(model, targets(model, "to_q", "to_v"), rank=4, alpha=4, dropout=0.0, seed=0)
    add_adapter(other, targets(other, *names), rank=rank, alpha=4, dropout=0.0, seed=0)
    with pytest.raises(UserError, match="does not fit the model"):
        load_adapter_tensors(model, adapter_tensors(other))


def test_the_settings_hold_alpha_and_what_differs_from_the_defaults_except_training_settings() -> None:
    model = tiny_transformer()
    layers = targets(model, "to_q")
    add_adapter(model, layers, rank=4, alpha=4, dropout=0.25, seed=0)
    assert adapter_settings(model) == {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": sorted(layers),
    }


WIDTH = 48
LAYER = "transformer_blocks.{}.attn.{}"
BOTH, FIRST, SECOND = LAYER.format(0, "to_q"), LAYER.format(1, "to_q"), LAYER.format(1, "to_k")


def lora_on(ranks: Mapping[str, int], seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    first = {f"{layer}.lora_A.weight": torch.randn(rank, WIDTH) for layer, rank in ranks.items()}
    return first | {f"{layer}.lora_B.weight": torch.randn(WIDTH, rank) for layer, rank in ranks.items()}


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_several_have_the_weights_and_the_bits_that_they_have_in_diffusers() -> None:
    own, theirs, plain = tiny_transformer(), tiny_transformer(), tiny_transformer()
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
    model, plain = tiny_transformer(), tiny_transformer()
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
def test_a_lora_that_does_not_fit_is_named_before_there_are_weights(
    change: dict[str, Tensor], message: str
) -> None:
    with torch.device("meta"):
        model = tiny_transformer()
    tensors = lora_on({BOTH: 2}, seed=1)
    require_fit(model, tensors, place="lora.safetensors")
    with pytest.raises(UserError, match=rf"lora\.safetensors.*{message}"):
        require_fit(model, tensors | change, place="lora.safetensors")


def test_a_file_without_tensors_is_not_a_lora() -> None:
    with pytest.raises(UserError, match=r"lora\.safetensors holds no tensors"):
        require_fit(nn.Linear(1, 1), {}, place="lora.safetensors")
