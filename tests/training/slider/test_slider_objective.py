"""The objective of a slider against its own formula, and its gradients under all switches."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.loaders import PeftAdapterMixin
from peft.tuners.tuners_utils import BaseTunerLayer

from diffsynth_lite.core.gradient import GradientEngine, gradient_checkpoint_forward, gradient_engine
from diffsynth_lite.core.noise.losses import LossBreakdown, mean_losses
from diffsynth_lite.core.noise.paths import FlowMatchingPath
from diffsynth_lite.data.batches import Batch, SliderBatch
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.lora import add_adapter, at_strength, scalings_reader, without_adapter
from diffsynth_lite.lora.kinds import LORA, AdapterKind, Dora, Lokr
from diffsynth_lite.training.objective import NoiseLevels
from diffsynth_lite.training.slider.objective import SliderObjective

WIDTH = 6
FLAGS = [(False, False), (True, False), (True, True)]


class Blocks(torch.nn.Module, PeftAdapterMixin):  # type: ignore[misc]
    """Two blocks that see the latents times the prompt's number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        self.blocks = torch.nn.ModuleList([torch.nn.Sequential(layer, torch.nn.Tanh()) for layer in layers])

    def forward(self, seen: torch.Tensor, flags: tuple[bool, bool]) -> torch.Tensor:
        for block in self.blocks:
            seen = gradient_checkpoint_forward(block, *flags, seen)
        return seen


def model_of(kind: AdapterKind = LORA) -> Blocks:
    model = Blocks()
    add_adapter(model, ["blocks.0.0", "blocks.1.0"], rank=2, alpha=3, dropout=0.0, seed=0, kind=kind)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            torch.nn.init.normal_(parameter)
    return model.train()


def predict(
    model: Blocks, noisy: torch.Tensor, sigma: torch.Tensor, conditioning: Any, flags: Any = (True, False)
) -> torch.Tensor:
    prompts = torch.stack([one["prompt"] for one in conditioning])
    return model((noisy + sigma.view(-1, 1, 1)) * prompts.view(-1, 1, 1), flags)


def objective(flags: tuple[bool, bool] = (True, False), **changes: Any) -> SliderObjective:
    def predicted(model: Any, noisy: Any, sigma: Any, conditioning: Any) -> torch.Tensor:
        return predict(model, noisy, sigma, conditioning, flags)

    given = {
        "family": SimpleNamespace(predict=predicted, noise_path=FlowMatchingPath()),
        "noise_levels": NoiseLevels(
            density="uniform",
            logit_mean=0.0,
            logit_std=1.0,
            mode_scale=1.29,
            shift=lambda _: 1.0,
            sigma_min=0.0,
            sigma_max=1.0,
        ),
        "weighting": "none",
        "min_snr_gamma": 5.0,
        "device": torch.device("cpu"),
        "losses_by_kind": LossBreakdown(),
    }
    return SliderObjective(**(given | changes))


def prompts(*values: float) -> list[dict[str, torch.Tensor]]:
    return [{"prompt": torch.tensor(value)} for value in values]


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    latents, noise = torch.randn(2, 3, 4, WIDTH, generator=generator)
    return Batch(
        bucket=Bucket(width=16, height=16),
        positions=[4, 5],
        names=["a", "b"],
        latents=latents[:2],
        noise=noise[:2],
        uniform=torch.tensor([0.25, 0.75]),
        conditioning=prompts(1.0, 1.1),
        slider=SliderBatch(
            positive=prompts(2.0, 2.1),
            negative=prompts(0.5, 0.4),
            kept=prompts(0.8),
            latents=latents[2:],
            noise=noise[2:],
            uniform=torch.tensor([0.5]),
        ),
        step_samples=2,
    )


def gradients(tried: SliderObjective, model: Blocks) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for part in tried.losses(model, batch()):
        part.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.fixture
def engine() -> Iterator[GradientEngine]:
    engine = GradientEngine(min_bytes=0)
    with gradient_engine(engine):
        yield engine


@pytest.mark.parametrize(
    ("target", "eta", "wanted"),
    [
        ("ends", 1.0, lambda n, p, q: (p, q)),
        ("ends", 0.5, lambda n, p, q: ((n + p) / 2, (n + q) / 2)),
        ("difference", 1.0, lambda n, p, q: (n + p - q, n - p + q)),
        ("difference", 0.5, lambda n, p, q: (n + (p - q) / 2, n - (p - q) / 2)),
    ],
)
def test_each_end_learns_its_target_and_anchors_count_as_two_samples(
    target: Any, eta: float, wanted: Any
) -> None:
    model, given = model_of(), batch()
    tried = objective(target=target, eta=eta, anchor_weight=3.0)
    sigma = torch.tensor([0.25, 0.75, 0.5])
    levels = sigma.view(-1, 1, 1)
    noisy = (1 - levels) * torch.cat([given.latents, given.slider.latents])
    noisy = noisy + levels * torch.cat([given.noise, given.slider.noise])
    with torch.no_grad(), without_adapter(model):
        ends = [given.conditioning, given.slider.positive, given.slider.negative]
        targets = wanted(*(predict(model, noisy[:2], sigma[:2], end) for end in ends))
        kept = predict(model, noisy[2:], sigma[2:], given.slider.kept)
    losses = []
    for strength, end in zip((1.0, -1.0), targets, strict=True):
        with torch.no_grad(), at_strength(model, strength):
            own = predict(model, noisy[:2], sigma[:2], given.conditioning)
            anchor = predict(model, noisy[2:], sigma[2:], given.slider.kept)
        losses.append(((own - end).square().mean() + 3 * (anchor - kept).square().mean()) / 2)
    torch.testing.assert_close([one.detach() for one in tried.losses(model, given)], losses)
    found = mean_losses(0.0, tried.losses_by_kind.take(torch.device("cpu")).tolist())
    assert found.learned == pytest.approx((found.positive + found.negative) / 2)


@pytest.mark.parametrize("kind", [LORA, Dora(), Lokr(2)])
def test_the_gradient_of_both_sides_is_the_same_under_all_flags(kind: AdapterKind, engine: Any) -> None:
    model = model_of(kind)
    plain, *others = (gradients(objective(flags), model) for flags in FLAGS)
    assert plain
    assert all(one.any() for one in plain.values())
    for other in others:
        assert all(torch.equal(plain[name], other[name]) for name in plain)
    assert scalings_reader(model)() == [1.5], "as before"


@pytest.mark.parametrize("kind", [LORA, Dora(), Lokr(2)])
def test_an_update_is_in_proportion_to_its_strength(kind: AdapterKind) -> None:
    model = model_of(kind)
    [layer] = [part for part in model.blocks[:1].modules() if isinstance(part, BaseTunerLayer)]
    seen, found = torch.randn(3, WIDTH), {}
    for strength in (-1.0, 0.0, 2.0):
        with torch.no_grad(), at_strength(model, strength):
            found[strength] = layer(seen)
    update = found[0.0] - found[-1.0]
    assert update.norm() > 0.1
    torch.testing.assert_close(found[2.0] - found[0.0], 2 * update)


@pytest.mark.parametrize("flags", FLAGS)
def test_a_strength_that_changes_before_the_recompute_raises(flags: tuple[bool, bool], engine: Any) -> None:
    model, tried = model_of(), objective(flags)
    _, second = tried.losses(model, batch())  # the strength is 1 again before any backward pass
    if any(flags):
        changed = r"strength of an adapter was \[-1\.5\] in .* and is \[1\.5\] in .*; run backward before"
        with pytest.raises(RuntimeError, match=changed):
            second.backward()
    else:  # all that it needs is saved
        second.backward()
