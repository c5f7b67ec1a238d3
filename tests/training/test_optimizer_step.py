"""One optimizer step of SGD against gradients from autograd: what is summed, clipped, drawn and left."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from diffsynth_lite.config import load_config
from diffsynth_lite.data import Batch, Bucket
from diffsynth_lite.training.builder import build_accelerator
from diffsynth_lite.training.optimizer_step import OptimizerStep

INPUTS, OUTPUTS = 5, 3
LEARNING_RATE = 0.5


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def linear() -> torch.nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Linear(INPUTS, OUTPUTS)


def batch(positions: Sequence[int], step_samples: int = 0) -> Batch:
    """Each sample is a function of its position alone, like the real ones."""

    def draw(position: int, size: int) -> torch.Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(100 * position + size))

    return Batch(
        bucket=Bucket(width=16, height=16),
        positions=list(positions),
        names=[f"{position}.png" for position in positions],
        latents=torch.stack([draw(position, INPUTS) for position in positions]),
        noise=torch.stack([draw(position, OUTPUTS) for position in positions]),
        uniform=torch.full((len(positions),), 0.5),
        conditioning=[{} for _ in positions],
        step_samples=step_samples or len(positions),
    )


def batches(*sizes: int) -> list[Batch]:
    """Micro-batches of the given sizes over consecutive positions."""
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [batch(range(start, start + size), sum(sizes)) for start, size in zip(starts, sizes, strict=True)]


def squared_error(model: torch.nn.Module, given: Batch) -> torch.Tensor:
    return (model(given.latents) - given.noise).square().mean()


def optimizer_step(model: torch.nn.Module, *steps: Sequence[Batch], **changes: Any) -> OptimizerStep:
    """Steps of SGD with a constant learning rate and without clipping, unless changed."""
    accelerator = changes.pop("accelerator", None) or Accelerator(cpu=True)
    settings = {
        "accelerator": accelerator,
        "model": accelerator.prepare(model),
        "optimizer": torch.optim.SGD(model.parameters(), lr=123.0),  # the step has to replace it
        "loss": squared_error,
        "learning_rate": lambda _step: LEARNING_RATE,
        "max_grad_norm": float("inf"),
        "averaged": None,
        "seed": 0,
        "batches": iter(steps),
    }
    return OptimizerStep(**(settings | changes))


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def gradient(model: torch.nn.Module, given: Batch) -> torch.Tensor:
    """By autograd on a whole batch, as one vector."""
    gradients = torch.autograd.grad(squared_error(model, given), list(model.parameters()))
    return torch.nn.utils.parameters_to_vector(gradients)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for the order in which fp32 numbers are added."""
    return torch.allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sizes", [(12,), (6, 6), (3, 3, 3, 3), (1,) * 12, (7, 1, 4)])
def test_micro_batches_make_the_update_of_one_large_batch(sizes: tuple[int, ...]) -> None:
    model, whole = linear(), batch(range(12))
    before, expected = flat(model), gradient(model, whole)
    loss = squared_error(model, whole).item()
    result = optimizer_step(model, batches(*sizes)).take(0)
    assert close(before - flat(model), LEARNING_RATE * expected)
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(expected.norm().item(), rel=1e-6)


def test_equal_micro_batches_are_divided_by_their_number_bit_for_bit() -> None:
    taken, plain = linear(), linear()
    optimizer_step(taken, batches(4, 4, 4)).take(0)
    for given in batches(4, 4, 4):
        (squared_error(plain, given) / 3).backward()
    torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE).step()
    assert torch.equal(flat(taken), flat(plain))


def test_each_sample_of_all_processes_weighs_the_same() -> None:
    """Two processes with 1 + 4 and 2 + 5 samples; the mean over them is taken here."""
    micro_batches = batches(1, 2, 4, 5)
    gradients = []
    for rank in range(2):
        model = linear()
        step = optimizer_step(model, micro_batches[rank::2])
        step = dataclasses.replace(step, accelerator=TwoProcesses(step.accelerator))
        before = flat(model)
        step.take(0)
        gradients.append((before - flat(model)) / LEARNING_RATE)
    assert close(sum(gradients) / 2, gradient(linear(), batch(range(12))))


class TwoProcesses:
    """An accelerator that says it is one of two."""

    num_processes = 2

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


@pytest.mark.parametrize("ratio", [0.25, 0.9])
def test_a_norm_above_the_limit_is_scaled_down_to_it(ratio: float) -> None:
    model = linear()
    before, expected = flat(model), gradient(model, batch(range(4)))
    norm = expected.norm().item()
    result = optimizer_step(model, batches(2, 2), max_grad_norm=ratio * norm).take(0)
    # torch divides by the norm + 1e-6.
    assert torch.allclose(before - flat(model), LEARNING_RATE * ratio * expected, rtol=1e-4, atol=1e-7)
    assert result.grad_norm == pytest.approx(norm, rel=1e-6)  # before clipping


def test_a_norm_below_the_limit_changes_nothing() -> None:
    clipped, free = linear(), linear()
    norm = gradient(clipped, batch(range(4))).norm().item()
    result = optimizer_step(clipped, batches(2, 2), max_grad_norm=1.1 * norm).take(0)
    optimizer_step(free, batches(2, 2)).take(0)
    assert torch.equal(flat(clipped), flat(free))
    assert result.grad_norm == pytest.approx(norm, rel=1e-6)


def test_the_norm_is_taken_over_the_parameters_of_all_groups_together() -> None:
    model = linear()
    expected = gradient(model, batch(range(4)))
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    before, limit = flat(model), 0.5 * expected.norm().item()
    optimizer_step(model, batches(4), optimizer=torch.optim.SGD(groups, lr=9.0), max_grad_norm=limit).take(0)
    assert torch.allclose(before - flat(model), LEARNING_RATE * 0.5 * expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("step", [0, 1, 4])
def test_the_learning_rate_is_that_of_the_step_counted_from_zero(step: int) -> None:
    model = linear()
    before, expected = flat(model), gradient(model, batch(range(4)))
    rates = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625]
    result = optimizer_step(model, batches(4), learning_rate=rates.__getitem__).take(step)
    assert close(before - flat(model), rates[step] * expected)
    assert result.learning_rate == rates[step]
    assert result.step == step + 1  # the number of steps done


def test_gradients_do_not_reach_the_next_step() -> None:
    model = linear()
    first, second = batch(range(4)), batch(range(4, 8))
    taken = optimizer_step(model, [first], [second])
    taken.take(0)
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
    before, expected = flat(model), gradient(model, second)
    taken.take(1)
    assert close(before - flat(model), LEARNING_RATE * expected)
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def drawn_in_a_step(micro_batches: Sequence[Batch], *, seed: int = 0, step: int = 0) -> list[torch.Tensor]:
    """The dropout mask of each micro-batch."""
    dropout, masks = torch.nn.Dropout(0.5), []

    def loss(model: torch.nn.Module, given: Batch) -> torch.Tensor:
        masks.append(dropout(torch.ones(64)))
        return squared_error(model, given)

    optimizer_step(linear(), micro_batches, loss=loss, seed=seed).take(step)
    return masks


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_dropout_masks_follow_the_seed_and_the_positions_alone() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = drawn_in_a_step(batches(2, 2))
        torch.manual_seed(2)
        assert same(drawn_in_a_step(batches(2, 2)), first)
        assert same(drawn_in_a_step(batches(2, 2), step=7), first)
    assert not torch.equal(first[0], first[1])
    assert not same(drawn_in_a_step(batches(2, 2), seed=1)[:1], first[:1])
    # The micro-batch that starts at position 2 has its mask wherever it stands.
    assert same(drawn_in_a_step([batch([2, 3])]), first[1:])


def test_the_global_random_state_is_left_as_it_was() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        before = torch.get_rng_state()
        drawn_in_a_step(batches(2, 2))
        assert torch.equal(torch.get_rng_state(), before)


def built_accelerator(folder: Path) -> Accelerator:
    file = folder / "run.yaml"
    file.write_text(
        "model: {family: qwen_image, path: model}\ndata: {path: pictures}\noutput: {dir: run}\n"
        'train: {mixed_precision: "no"}\n'
    )
    return build_accelerator(load_config(file).config, folder / "trackers")


def test_a_launchers_variable_does_not_scale_the_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    model = linear()
    before, expected = flat(model), gradient(model, batch(range(4)))
    optimizer_step(model, batches(2, 2), accelerator=built_accelerator(tmp_path)).take(0)
    assert close(before - flat(model), LEARNING_RATE * expected)
