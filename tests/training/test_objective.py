"""The objective against its own formula, on a family that predicts what it is given."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.loaders import PeftAdapterMixin

from diffsynth_lite.core.noise.losses import LossBreakdown, MeanLosses, mean_losses
from diffsynth_lite.core.noise.paths import FlowMatchingPath
from diffsynth_lite.data.batches import Batch
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import add_adapter
from diffsynth_lite.training.objective import DenoisingObjective, NoiseLevels

SHAPE = (2, 16, 1, 4, 6)


def noise_levels(**changes: Any) -> NoiseLevels:
    settings = {
        "density": "uniform",
        "logit_mean": 0.0,
        "logit_std": 1.0,
        "mode_scale": 1.29,
        "shift": lambda _shape: 1.0,
        "sigma_min": 0.0,
        "sigma_max": 1.0,
    }
    return NoiseLevels(**(settings | changes))


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch(
        bucket=Bucket(width=48, height=32),
        positions=[0, 1],
        names=["a", "b"],
        latents=torch.randn(SHAPE, generator=generator),
        noise=torch.randn(SHAPE, generator=generator),
        uniform=torch.tensor([0.25, 0.75]),
        conditioning=[{}, {}],
        step_samples=2,
    )


def objective(predict: Any, **changes: Any) -> DenoisingObjective:
    settings = {
        "family": SimpleNamespace(predict=predict, noise_path=FlowMatchingPath()),
        "noise_levels": noise_levels(),
        "weighting": "none",
        "min_snr_gamma": 5.0,
        "device": torch.device("cpu"),
    }
    return DenoisingObjective(**(settings | changes))


def zeros(_transformer: Any, noisy: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.zeros_like(noisy)


def test_the_exact_velocity_has_no_loss() -> None:
    given = batch()

    def predict(
        _transformer: Any, noisy: torch.Tensor, sigma: torch.Tensor, _conditioning: Any, **_: Any
    ) -> Any:
        # From x_t = (1 - s) x0 + s n: the velocity n - x0 is (x_t - x0) / s.
        return (noisy - given.latents) / sigma.view(-1, 1, 1, 1, 1)

    # Rounding of the division only.
    assert objective(predict).loss(torch.nn.Identity(), given).item() < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_the_mean_squared_error_to_noise_minus_latents_in_fp32(dtype: torch.dtype) -> None:
    given = batch()
    loss = objective(lambda *given: zeros(*given).to(dtype)).loss(torch.nn.Identity(), given)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, (given.noise - given.latents).square().mean())


def test_a_guided_target_has_the_gradient_of_its_formula_and_no_other() -> None:
    given, scale = batch(), 3.5
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.5)).train()
    captions = [{"shift": torch.tensor(float(index))} for index in (1, 2)]
    empty = [{"shift": torch.tensor(0.0)}] * 2

    def predict(
        model: torch.nn.Module, noisy: torch.Tensor, _sigma: torch.Tensor, conditioning: Any
    ) -> torch.Tensor:
        shifts = torch.stack([one["shift"] for one in conditioning]).view(-1, 1, 1, 1, 1)
        return model(noisy + shifts)

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, model[0].weight)[0]

    guided = objective(predict, guidance_target=scale)
    samples = dataclasses.replace(given, conditioning=captions, unconditional=empty)
    torch.manual_seed(7)
    loss = guided.loss(model, samples)
    assert model.training

    sigma = given.uniform.view(-1, 1, 1, 1, 1)
    noisy = (1 - sigma) * given.latents + sigma * given.noise
    unguided = model[0](noisy).detach()  # without gradient, and without dropout
    target = unguided + scale * (given.noise - given.latents - unguided)
    torch.manual_seed(7)
    expected = (predict(model, noisy, sigma, captions) - target).square().mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss), gradient(expected))


def test_weights_multiply_each_samples_error() -> None:
    given = batch()
    errors = (given.noise - given.latents).square().flatten(1).mean(1)
    weighted = objective(zeros, weighting="sigma_sqrt")
    losses = errors / given.uniform.square()
    torch.testing.assert_close(weighted.loss(torch.nn.Identity(), given), losses.mean())
    min_snr = objective(zeros, weighting="min_snr", min_snr_gamma=2.0)  # by the family's own path
    by_snr = errors * torch.tensor([2 * 0.25**2, 0.25**2])
    torch.testing.assert_close(min_snr.loss(torch.nn.Identity(), given), by_snr.mean())
    # By tenth of the noise, what adds up to it.
    sums, counts = weighted.loss_by_tenth.take(given.latents.device)
    torch.testing.assert_close(sums[[2, 7]], losses)
    assert counts.tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 0, 0]


def test_the_shift_gets_the_shape_of_one_sample_and_moves_the_levels_up() -> None:
    shapes = []

    def shift(shape: torch.Size) -> float:
        shapes.append(tuple(shape))
        return 3.0

    sigma = noise_levels(shift=shift).sigma(torch.tensor([0.0, 0.5]), SHAPE[1:])
    assert shapes == [SHAPE[1:]]
    assert sigma[1].item() == pytest.approx(3 * 0.5 / (1 + 2 * 0.5))


def test_levels_stay_in_the_range_asked_for() -> None:
    uniform = torch.linspace(0, 1 - 1e-6, 1000)
    for density in ("uniform", "logit_normal", "mode", "cosmap"):
        sigma = noise_levels(density=density, sigma_min=0.875, sigma_max=0.95).sigma(uniform, SHAPE[1:])
        assert sigma.min() >= 0.875
        assert sigma.max() <= 0.95
        assert sigma.max() - sigma.min() > 0.05


def test_a_mask_of_ones_is_no_mask_bit_for_bit() -> None:
    given = batch()
    masked = dataclasses.replace(given, loss_mask=torch.ones(2, 1, 1, 4, 6))
    model = torch.nn.Identity()
    assert torch.equal(objective(zeros).loss(model, masked), objective(zeros).loss(model, given))


def test_a_mask_gives_the_mean_error_of_what_it_lets_through_in_each_sample() -> None:
    given = batch()
    mask = torch.zeros(2, 1, 1, 4, 6)
    mask[0, ..., :3] = 1  # the left half of the one, a corner of the other
    mask[1, ..., 0, 0] = 1
    loss = objective(zeros).loss(torch.nn.Identity(), dataclasses.replace(given, loss_mask=mask))
    squared = (given.noise - given.latents).square()
    expected = (squared[0, ..., :3].mean() + squared[1, ..., 0, 0].mean()) / 2
    torch.testing.assert_close(loss, expected)


def test_huber_is_the_squared_error_of_small_errors_and_linear_in_large_ones() -> None:
    given, model = batch(), torch.nn.Identity()
    errors = (given.noise - given.latents).abs()
    delta = errors.median().item()
    parts = torch.where(errors < delta, errors**2, 2 * delta * errors - delta**2)
    huber = objective(zeros, huber_delta=delta)
    torch.testing.assert_close(huber.loss(model, given), parts.mean())
    # Each sample is weighted by its level, and by its mask, as squared errors are.
    mask = torch.zeros(2, 1, 1, 4, 6)
    mask[..., :3] = 1
    masked = dataclasses.replace(given, loss_mask=mask)
    losses = parts[..., :3].flatten(1).mean(1) / given.uniform.square()
    weighted = objective(zeros, weighting="sigma_sqrt", huber_delta=delta)
    torch.testing.assert_close(weighted.loss(model, masked), losses.mean())
    # What is measured between steps stays the squared error, so that runs compare.
    squared = huber.errors(model, given, given.uniform).total
    torch.testing.assert_close(squared, errors.square().flatten(1).mean(1))


EXPERTS = ((0.875, 1.0), (0.0, 0.875))
UNIFORM = torch.arange(1000) / 1000


def levels_of_steps(levels: NoiseLevels, num_steps: int) -> list[torch.Tensor]:
    return [
        levels.sigma(UNIFORM, SHAPE[1:], step_uniform=(step + 0.5) / num_steps) for step in range(num_steps)
    ]


@pytest.mark.parametrize("density", ["uniform", "logit_normal", "mode", "cosmap"])
@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_each_step_trains_one_expert_and_all_steps_together_the_density(density: str, shift: float) -> None:
    levels = noise_levels(density=density, shift=lambda _shape: shift, ranges=EXPERTS)
    steps = levels_of_steps(levels, 1000)
    for sigma in steps:
        high = sigma >= 0.875
        assert high.all() or not high.any()
    whole = noise_levels(density=density, shift=lambda _shape: shift).sigma(UNIFORM, SHAPE[1:])
    quantiles = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    torch.testing.assert_close(
        torch.cat(steps).double().quantile(quantiles), whole.double().quantile(quantiles), rtol=0, atol=0.01
    )
    share = sum(bool((sigma >= 0.875).all()) for sigma in steps) / len(steps)
    assert share == pytest.approx((whole >= 0.875).double().mean().item(), abs=0.002)


@pytest.mark.parametrize("density", ["uniform", "logit_normal", "mode", "cosmap"])
def test_the_shares_of_ranges_are_those_of_what_their_steps_draw(density: str) -> None:
    levels = noise_levels(
        density=density, shift=lambda _shape: 3.0, sigma_min=0.1, sigma_max=0.95, ranges=EXPERTS
    )
    shares = levels.shares(SHAPE[1:])
    assert sum(part for part, _ in shares) == pytest.approx(1)
    steps = levels_of_steps(levels, 1000)
    for (low, high), (part, found) in zip(EXPERTS, shares, strict=True):
        drawn = torch.cat([sigma for sigma in steps if low <= sigma.min() and sigma.max() <= high]).double()
        assert part == pytest.approx(len(drawn) / (1000 * len(UNIFORM)), abs=1e-3)
        assert found.mean == pytest.approx(drawn.mean().item(), abs=1e-3)
        expected = torch.histc(drawn, bins=10, min=0, max=1) / len(drawn)
        tenths = torch.tensor(found.tenths, dtype=torch.float64)
        torch.testing.assert_close(tenths, expected, rtol=0, atol=2e-3)
    ((whole, one),) = noise_levels(shift=lambda _shape: 3.0).shares(SHAPE[1:])
    assert (whole, one.below_half) == (1, pytest.approx(0.25, abs=1e-6))


def test_one_expert_sees_its_part_of_the_density_and_nothing_else() -> None:
    high = noise_levels(shift=lambda _shape: 5.0, ranges=EXPERTS[:1]).sigma(UNIFORM, SHAPE[1:])
    whole = noise_levels(shift=lambda _shape: 5.0).sigma(UNIFORM, SHAPE[1:])
    part = whole[whole >= 0.875]
    assert 0.875 <= high.min() < high.max() <= 1
    assert high.double().mean().item() == pytest.approx(part.double().mean().item(), abs=1e-3)


def test_the_largest_draw_stays_below_the_next_experts_levels() -> None:
    levels = noise_levels(ranges=((0.0, 0.875),))
    assert levels.sigma(torch.tensor([1 - 2**-24]), SHAPE[1:]).item() < 0.875


def test_an_expert_that_would_see_no_noise_level_is_an_error() -> None:
    levels = noise_levels(sigma_max=0.5, ranges=EXPERTS)
    with pytest.raises(UserError, match=r"0\.0 to 0\.5 leaves nothing of the noise levels 0\.875 to 1\.0"):
        levels.sigma(UNIFORM, SHAPE[1:], step_uniform=0.5)


def test_levels_evenly_spread_cover_what_is_trained() -> None:
    assert noise_levels().quantile(0.3) == 0.3
    assert noise_levels(ranges=EXPERTS).quantile(0.3) == pytest.approx(0.3)
    assert noise_levels(ranges=EXPERTS[:1]).quantile(0.5) == pytest.approx(0.9375)
    assert noise_levels(ranges=((0.5, 0.75), (0.0, 0.25))).quantile(0.75) == pytest.approx(0.625)


def test_the_step_of_a_batch_chooses_its_expert() -> None:
    seen: list[float] = []

    def predict(_t: Any, noisy: torch.Tensor, sigma: torch.Tensor, *_args: Any, **_: Any) -> torch.Tensor:
        seen.extend(sigma.tolist())
        return torch.zeros_like(noisy)

    levels = noise_levels(ranges=EXPERTS)
    for step_uniform in (0.0, 0.9):
        given = dataclasses.replace(batch(), step_uniform=step_uniform)
        objective(predict, noise_levels=levels).loss(torch.nn.Identity(), given)
    assert min(seen[:2]) >= 0.875 > max(seen[2:])


class Adapted(torch.nn.Module, PeftAdapterMixin):  # type: ignore[misc]
    """One layer along the width of the latents, with an adapter that changes what it says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(SHAPE[-1], SHAPE[-1])
        self.seen: list[int] = []

    def forward(self, noisy: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(noisy))
        estimate: torch.Tensor = self.layer(noisy)
        return estimate


def adapted() -> Adapted:
    model = Adapted()
    add_adapter(model, ["layer"], rank=2, alpha=2, dropout=0.5, seed=0)
    for matrix in (model.layer.lora_A, model.layer.lora_B):
        torch.nn.init.normal_(matrix["default"].weight)
    return model.train()


def of_model(**changes: Any) -> DenoisingObjective:
    return objective(lambda model, noisy, *_args: model(noisy), **changes)


def loss_and_gradients(given: Batch, model: Adapted, of: DenoisingObjective) -> list[torch.Tensor]:
    torch.manual_seed(3)  # of the dropout masks
    loss = of.loss(model, given)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [loss, *torch.autograd.grad(loss, trained)]


def test_what_is_preserved_has_the_estimate_without_the_adapter_as_its_target() -> None:
    given = dataclasses.replace(batch(), preserved=(1,), loss_weights=torch.tensor([1.0, 0.25]))
    model, plain, tried = adapted(), Adapted(), of_model(losses_by_kind=LossBreakdown())
    found = loss_and_gradients(given, model, tried)
    assert model.seen == [1, 2]
    assert model.training

    noisy = FlowMatchingPath().add_noise(given.latents, given.noise, given.uniform)
    target = given.noise - given.latents
    target[1] = plain(noisy[1:]).detach()[0]
    torch.manual_seed(3)
    errors = (model(noisy) - target).square().flatten(1).mean(1)
    expected = (errors * torch.tensor([1.0, 0.25])).mean()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for one, other in zip(found, [expected, *torch.autograd.grad(expected, trained)], strict=True):
        assert torch.equal(one, other)

    # Without their weights, so that losses of runs with other ones compare.
    by_kind = tried.losses_by_kind.take(given.latents.device).tolist()
    learned, preserved = errors.tolist()
    assert mean_losses(found[0].item(), by_kind) == MeanLosses(learned=learned, preserved=preserved)
    assert tried.losses_by_kind.take(given.latents.device).tolist() == [0] * 12
    assert mean_losses(0.5, [0] * 12) == MeanLosses(learned=None)
    sums, counts = tried.loss_by_tenth.take(given.latents.device)
    assert (sums[2], counts.sum()) == (errors[0], 1)


def test_a_sample_that_processes_share_is_counted_by_one_of_them() -> None:
    given, found = batch(), {}
    for counts in (True, False):
        of = of_model(is_counted=counts, losses_by_kind=LossBreakdown())
        values = loss_and_gradients(given, adapted(), of)
        kept = [name for name, *_ in of.sample_losses.take()]
        totals = of.loss_by_tenth.take(given.latents.device), of.losses_by_kind.take(given.latents.device)
        found[counts] = values, (kept, *(total.any().item() for total in totals))
    assert [counted for _, counted in found.values()] == [(["a", "b"], True, True), ([], False, False)]
    assert all(torch.equal(*pair) for pair in zip(found[True][0], found[False][0], strict=True))


@pytest.mark.parametrize("preserved", [(), (0, 1)])
def test_a_pass_for_others_changes_nothing_and_all_of_a_batch_may_be_preserved(
    preserved: tuple[int, ...],
) -> None:
    model, given = adapted(), batch()
    alone = loss_and_gradients(given, model, of_model())
    found = loss_and_gradients(dataclasses.replace(given, preserved=preserved), model, of_model())
    assert model.seen == [2, len(preserved) or 1, 2]
    assert all(torch.equal(*pair) for pair in zip(alone, found, strict=True)) is not bool(preserved)
