"""LoRAs of a lower rank, and Kronecker products as two matrices: compared with the whole update."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.merging import in_two_matrices, reduce_rank
from diffsynth_lite.lora.reading import LoraContents
from diffsynth_lite.lora.updates import DoraUpdate, LayerUpdate, LokrUpdate, LoraPair

SHAPES = {
    "linear": ((6, 40), (30, 6)),
    "convolution": ((6, 8, 3, 3), (30, 6, 1, 1)),
    "wide": ((6, 4), (5, 6)),
}


def contents(**updates: LayerUpdate) -> LoraContents:
    return LoraContents(file=Path("mine.safetensors"), updates=updates, metadata={}, has_alpha=True)


def random_pair(down: tuple[int, ...], up: tuple[int, ...]) -> LoraPair:
    generator = torch.Generator().manual_seed(len(down))
    matrices = (torch.randn(shape, generator=generator) for shape in (down, up))
    return LoraPair(down=next(matrices), up=next(matrices), alpha=3.0)


def dense(pair: LoraPair) -> torch.Tensor:
    return pair.alpha / pair.rank * pair.up.flatten(1).double() @ pair.down.flatten(1).double()


@pytest.mark.parametrize(("down", "up"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_a_lower_rank_is_the_nearest_of_all_updates_and_its_loss_is_that_of_the_whole_update(
    down: tuple[int, ...], up: tuple[int, ...], rank: int
) -> None:
    pair = random_pair(down, up)
    reduced, norms = reduce_rank(contents(layer=pair), rank)
    kept = reduced.pairs["layer"]
    left, values, right = torch.linalg.svd(dense(pair), full_matrices=False)
    nearest = (left * values.where(torch.arange(len(values)) < rank, 0.0)) @ right
    # In float32 each number is off by an eighth of a millionth.
    torch.testing.assert_close(dense(kept), nearest, rtol=0, atol=1e-6 * float(values[0]))
    lost, norm = norms["layer"]
    assert lost == pytest.approx(float(values[rank:].norm()), abs=1e-9 * norm)
    assert norm == pytest.approx(float(values.norm()), rel=1e-6)
    assert (kept is pair) == (rank == 6)
    assert (kept.down.shape[1:], kept.up.shape[2:]) == (pair.down.shape[1:], pair.up.shape[2:])
    assert kept.rank <= rank


def test_an_update_of_zero_loses_nothing() -> None:
    pair = random_pair(*SHAPES["linear"])
    _, norms = reduce_rank(contents(layer=replace(pair, up=torch.zeros_like(pair.up))), 2)
    assert norms == {"layer": (0.0, 0.0)}


@pytest.mark.parametrize("shapes", [((2, 3), (5, 7)), ((2, 3), (5, 2), (2, 7))], ids=["whole", "product"])
def test_a_lokr_is_exactly_the_product_of_two_matrices(shapes: tuple[tuple[int, int], ...]) -> None:
    left, *right = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes)
    lokr = LokrUpdate(left=(left,), right=tuple(right), scale=0.5)
    pair = in_two_matrices(contents(layer=lokr)).pairs["layer"]
    whole = right[0] if len(right) == 1 else right[0] @ right[1]
    torch.testing.assert_close(dense(pair).float(), 0.5 * torch.kron(left, whole))
    assert pair.sizes == lokr.sizes
    assert pair.rank == 3 * right[-1].shape[0 if len(right) > 1 else 1]


def test_a_dora_is_refused_by_name() -> None:
    dora = DoraUpdate(pair=random_pair(*SHAPES["linear"]), magnitude=torch.ones(30))
    with pytest.raises(UserError, match=r"mine.safetensors: is a DoRA, .* merge it .* with --into-base"):
        in_two_matrices(contents(layer=dora))
