"""Layers that another program has as one: apart and together again, with the same updates."""

import pytest
import torch

from diffsynth_lite.lora.fused import join, split
from diffsynth_lite.lora.layer_names import Original, fused
from diffsynth_lite.lora.pairs import LoraPair

QKV = fused("q", "k", "v")
LINEAR_1 = fused("q", "k", "v", "mlp", rows=(1, 1, 1, 4))


def pair(outputs: int, rank: int = 4, alpha: float = 2.0, seed: int = 0) -> LoraPair:
    generator = torch.Generator().manual_seed(seed)
    down, up = (torch.randn(shape, generator=generator) for shape in ((rank, 5), (outputs, rank)))
    return LoraPair(down=down, up=up, alpha=alpha)


def delta(one: LoraPair) -> torch.Tensor:
    return (one.up @ one.down) * (one.alpha / one.rank)


def same(one: LoraPair, other: LoraPair) -> bool:
    return one.alpha == other.alpha and torch.equal(one.down, other.down) and torch.equal(one.up, other.up)


@pytest.mark.parametrize("rank", [4, 12])  # 12 is divisible, but the shares overlap
def test_layers_that_were_trained_as_one_share_the_first_matrix(rank: int) -> None:
    whole = pair(42, rank)
    parts = split(whole, LINEAR_1)
    assert torch.equal(torch.cat([part.up for part in parts.values()]), whole.up)
    assert [len(part.up) for part in parts.values()] == [6, 6, 6, 24]
    assert all(torch.equal(part.down, whole.down) and part.alpha == 2 for part in parts.values())
    assert same(join(parts, LINEAR_1), whole)


def test_layers_that_were_trained_apart_keep_their_own_rank() -> None:
    parts = {name: pair(6, seed=seed) for seed, name in enumerate("qkv")}
    whole = join(parts, QKV)
    assert (whole.rank, whole.alpha) == (12, 6.0)
    assert torch.allclose(delta(whole), torch.cat([delta(part) for part in parts.values()]), atol=1e-6)
    again = split(whole, QKV)
    assert all(same(again[name], parts[name]) for name in parts)


def test_a_layer_without_a_lora_is_left_out_again() -> None:
    parts = {"q": pair(6), "mlp": pair(24, seed=1)}
    whole = join(parts, LINEAR_1)
    assert whole.up.shape == (42, 16)
    assert not delta(whole)[6:18].any()
    again = split(whole, LINEAR_1)
    assert again.keys() == parts.keys()
    assert all(same(again[name], parts[name]) for name in parts)


def test_layers_of_other_strengths_and_ranks_become_one_of_the_same_update() -> None:
    parts = {"q": pair(6, alpha=8.0), "k": pair(6, seed=1), "v": pair(6, rank=2, seed=2)}
    whole = join(parts, QKV)
    together = torch.cat([delta(part) for part in parts.values()])
    assert torch.allclose(delta(whole), together, atol=1e-6)
    again = split(whole, QKV)
    assert [part.rank for part in again.values()] == [4, 4, 2]
    assert torch.allclose(torch.cat([delta(one) for one in again.values()]), together, atol=1e-6)


def test_a_lora_of_zeros_has_no_shares() -> None:
    whole = LoraPair(down=torch.ones(12, 5), up=torch.zeros(18, 12), alpha=12.0)
    assert [part.rank for part in split(whole, QKV).values()] == [12, 12, 12]


def test_halves_in_the_other_order_are_swapped_there_and_back() -> None:
    place, whole = Original(("norm",), halves_swapped=True), pair(10)
    (part,) = split(whole, place).values()
    assert torch.equal(part.up, torch.cat([whole.up[5:], whole.up[:5]]))
    assert same(join({"norm": part}, place), whole)
    # It has more than scale and shift: those of other blocks of Stable Diffusion 3.
    (others,) = split(pair(30), place).values()
    assert same(others, pair(30))
    assert same(join({"norm": others}, place), pair(30))
