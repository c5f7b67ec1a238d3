"""Adapters on a tiny Qwen-Image transformer: which layers, in which precision, and their tensors."""

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch import nn

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import (
    LoraSize,
    adapter_settings,
    adapter_size,
    adapter_tensors,
    add_adapter,
    find_target_layers,
    layers_with,
    load_adapter_tensors,
)
from diffsynth_lite.lora.pairs import pairs_of

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


def test_targets_are_full_names_without_those_of_layers_and_in_modules_that_nobody_uses() -> None:
    assert targets(tiny_transformer(), "to_q", "to_add_out", "txt_mlp.net.2") == [
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.0.attn.to_add_out",
        "transformer_blocks.0.txt_mlp.net.2",
        "transformer_blocks.1.attn.to_q",
    ]


def test_a_target_matches_whole_parts_of_a_name_only() -> None:
    assert targets(tiny_transformer(), "proj_out") == ["proj_out"]
    with pytest.raises(UserError, match="o_q match no linear layer"):
        targets(tiny_transformer(), "o_q")


def test_the_size_of_an_adapter_is_that_of_what_is_trained() -> None:
    model = tiny_transformer()
    layers = targets(model, "to_q", "img_mod.1", "img_mlp.net.2")
    size = adapter_size(model, layers, rank=3)
    add_adapter(model, layers, rank=3, alpha=3, dropout=0, seed=0)
    assert size == sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def test_a_star_in_a_target_stands_for_one_part_of_a_name() -> None:
    model = tiny_transformer()
    assert targets(model, "transformer_blocks.*.attn.to_q") == targets(model, "to_q")
    assert targets(model, "norm_out.*") == ["norm_out.linear"]
    with pytest.raises(UserError, match=r"transformer_blocks\.\*\.proj_out; blocks\.\*\.to_q match no "):
        targets(model, "to_q", "transformer_blocks.*.proj_out", "blocks.*.to_q")


def test_numbers_in_a_target_stand_for_those_between_them() -> None:
    model = tiny_transformer()
    assert targets(model, "transformer_blocks.0-1.attn.to_q") == targets(model, "to_q")
    assert targets(model, "transformer_blocks.1-7.attn.to_q") == ["transformer_blocks.1.attn.to_q"]
    assert targets(model, "img_mlp.net.2-2") == targets(model, "img_mlp.net.2")
    with pytest.raises(UserError, match=r"transformer_blocks\.2-7\.attn\.to_q match no linear layer"):
        targets(model, "transformer_blocks.2-7.attn.to_q")


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


def test_each_target_without_a_match_is_named_with_the_close_one() -> None:
    with pytest.raises(
        UserError, match=r"img_mlp\.2; to_x match no linear layer .* did you mean .*img_mlp\.net\.2"
    ):
        targets(tiny_transformer(), "to_q", "img_mlp.2", "to_x")


def test_no_targets_at_all_are_refused() -> None:
    with pytest.raises(UserError, match=r"lora\.target_modules is empty"):
        targets(tiny_transformer())


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


def test_the_first_values_follow_the_seed_and_leave_the_global_state_alone() -> None:
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


def test_the_settings_hold_alpha_and_what_differs_from_the_defaults_but_for_what_is_of_training() -> None:
    model = tiny_transformer()
    layers = targets(model, "to_q")
    add_adapter(model, layers, rank=4, alpha=4, dropout=0.25, seed=0)
    assert adapter_settings(model) == {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": sorted(layers),
    }


def test_the_settings_name_every_layer_also_where_peft_shortens_the_names() -> None:
    model = tiny_transformer()
    layers = targets(
        model,
        "to_q",
        "to_k",
        "to_v",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "img_mlp.net.2",
        "to_out.0",
        "img_mod.1",
        "txt_mod.1",
    )
    add_adapter(model, layers, rank=4, alpha=4, dropout=0.0, seed=0)
    assert len(model.peft_config["default"].target_modules) < len(layers)  # type: ignore[union-attr,index]
    assert adapter_settings(model)["target_modules"] == sorted(layers)
