"""One optimizer step of SGD against gradients from autograd, and what follows each step, in order."""

import dataclasses
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from rich.console import Console

from diffsynth_lite.config import LoadedConfig, load_config
from diffsynth_lite.core.gradient import BlockCompiler
from diffsynth_lite.core.weights.stream import WeightStream
from diffsynth_lite.data.batches import Batch
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.errors import RunDivergedError
from diffsynth_lite.report.page import ReportWriter
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.progress import RunningStatus, StepResult
from diffsynth_lite.training import trainer
from diffsynth_lite.training.builder import TrainingObjects
from diffsynth_lite.training.checkpoint.divergence import Divergence
from diffsynth_lite.training.checkpoint.store import SavedBytes
from diffsynth_lite.training.session import Run, StartupClock, build_accelerator
from diffsynth_lite.training.stopping import Patience, Requests, StopRequest
from diffsynth_lite.training.trainer import train, train_step

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
    """Each sample is a function of its position only, like the real ones."""

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


def parts_of(loss: Any) -> Any:
    """The parts of a loss that has one, which is computed when it is asked for."""
    return lambda model, given: (one(model, given) for one in [loss])


def objects(model: torch.nn.Module, *steps: Sequence[Batch], **changes: Any) -> TrainingObjects:
    """Steps of SGD with a constant learning rate and without clipping, unless changed."""
    accelerator = changes.pop("accelerator", None) or Accelerator(cpu=True)
    settings = {
        "accelerator": accelerator,
        "transformer": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=123.0),  # the step has to replace it
        "losses": parts_of(squared_error),
        "learning_rate": lambda _step: LEARNING_RATE,
        "max_grad_norm": float("inf"),
        "averaged": None,
        "seed": 0,
        "batches": iter(steps),
        "totals_by_kind": lambda: torch.empty(0),
        "totals_by_noise": lambda _step: torch.empty(0),
        "validation_loss": None,
        "item_losses": None,
        "sample_losses": None,
        "layer_updates": None,
        "previews": None,
        "scores": None,
        "weights": WeightStream([], accelerator.device),
        "compiler": BlockCompiler([]),
    }
    return TrainingObjects(**(settings | changes))


def take(model: torch.nn.Module, micro_batches: Sequence[Batch], step: int = 1, **changes: Any) -> StepResult:
    """One step on the given micro-batches."""
    return train_step(objects(model, micro_batches, **changes), step)


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
    result = take(model, batches(*sizes))
    assert close(before - flat(model), LEARNING_RATE * expected)
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(expected.norm().item(), rel=1e-6)


def test_each_part_of_a_step_is_timed() -> None:
    marks: list[str] = []
    timer = SimpleNamespace(mark=marks.append, seconds=lambda: {"data": 2.0})
    result = take(linear(), batches(1, 2), timer=timer)
    assert marks == ["between", "data", *["forward", "backward"] * 2, "update"]
    assert (result.parts, result.sizes) == ({"data": 2.0}, "3 of 16x16")


def test_equal_micro_batches_are_divided_by_their_number_bit_for_bit() -> None:
    taken, plain = linear(), linear()
    take(taken, batches(4, 4, 4))
    for given in batches(4, 4, 4):
        (squared_error(plain, given) / 3).backward()
    torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE).step()
    assert torch.equal(flat(taken), flat(plain))


def test_each_sample_of_all_processes_weighs_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with 1 + 4 and 2 + 5 samples; each divides by two, and they are added up here."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda _gradients: None)
    micro_batches = batches(1, 2, 4, 5)
    gradients = []
    for rank in range(2):
        model = linear()
        before = flat(model)
        take(model, micro_batches[rank::2], accelerator=TwoProcesses(Accelerator(cpu=True)))
        gradients.append((before - flat(model)) / LEARNING_RATE)
    assert close(sum(gradients), gradient(linear(), batch(range(12))))


class TwoProcesses:
    """An accelerator that says it is one of two."""

    num_processes = 2

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


@pytest.mark.parametrize("ratio", [0.25, 0.9, 1.1])
def test_a_norm_above_the_limit_is_scaled_down_to_it_and_one_below_changes_nothing(ratio: float) -> None:
    model, free = linear(), linear()
    before, expected = flat(model), gradient(model, batch(range(4)))
    norm = expected.norm().item()
    result = take(model, batches(2, 2), max_grad_norm=ratio * norm)
    assert result.grad_norm == pytest.approx(norm, rel=1e-6)  # before clipping
    if ratio < 1:
        # torch divides by the norm + 1e-6.
        assert torch.allclose(before - flat(model), LEARNING_RATE * ratio * expected, rtol=1e-4, atol=1e-7)
    else:
        take(free, batches(2, 2))
        assert torch.equal(flat(model), flat(free))


def test_the_norm_is_taken_over_the_parameters_of_all_groups_together() -> None:
    model = linear()
    expected = gradient(model, batch(range(4)))
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    before, limit = flat(model), 0.5 * expected.norm().item()
    take(model, batches(4), optimizer=torch.optim.SGD(groups, lr=9.0), max_grad_norm=limit)
    assert torch.allclose(before - flat(model), LEARNING_RATE * 0.5 * expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_the_learning_rate_is_that_of_the_step(step: int) -> None:
    model = linear()
    before, expected = flat(model), gradient(model, batch(range(4)))
    rates = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625]
    result = take(model, batches(4), step, learning_rate=rates.__getitem__)
    assert close(before - flat(model), rates[step - 1] * expected)
    assert result.learning_rate == rates[step - 1]
    assert result.step == step


def test_gradients_do_not_reach_the_next_step() -> None:
    model = linear()
    first, second = batch(range(4)), batch(range(4, 8))
    built = objects(model, [first], [second])
    train_step(built, 1)
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
    before, expected = flat(model), gradient(model, second)
    train_step(built, 2)
    assert close(before - flat(model), LEARNING_RATE * expected)
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def drawn_in_a_step(micro_batches: Sequence[Batch], *, seed: int = 0, step: int = 1) -> list[torch.Tensor]:
    """The dropout mask of each micro-batch."""
    dropout, masks = torch.nn.Dropout(0.5), []

    def loss(model: torch.nn.Module, given: Batch) -> torch.Tensor:
        masks.append(dropout(torch.ones(64)))
        return squared_error(model, given)

    take(linear(), micro_batches, step, losses=parts_of(loss), seed=seed)
    return masks


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_dropout_masks_follow_only_the_seed_and_the_positions() -> None:
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


def config_of(*overrides: str) -> LoadedConfig:
    return load_config("qwen_lora.yaml", ["data.path=pictures", "train.mixed_precision=no", *overrides])


def built_accelerator(folder: Path) -> Accelerator:
    return build_accelerator(config_of().config, folder / "trackers")


def test_a_launchers_variable_does_not_scale_the_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    model = linear()
    before, expected = flat(model), gradient(model, batch(range(4)))
    take(model, batches(2, 2), accelerator=built_accelerator(tmp_path))
    assert close(before - flat(model), LEARNING_RATE * expected)


class Life:
    """A run whose steps, evaluations and saves are only written down; ``asked``: files put at a step."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **asked: int) -> None:
        self.done: list[tuple[str, int]] = []
        self._folder, self._asked, self._saved = folder, asked, 0
        self._saver = SimpleNamespace(
            repair_loras=lambda: None,
            save=self._save,
            log_rounding_error=lambda: None,
            patience=Patience(None),
        )
        monkeypatch.setattr(trainer, "train_step", lambda _built, step: self._step(step))
        monkeypatch.setattr(
            trainer,
            "evaluate",
            lambda _built, _saver, _metrics, step, _shutdown: self._note("evaluate", step),
        )
        monkeypatch.setattr(trainer, "report_memory", lambda *_: None)
        monkeypatch.setattr(trainer, "measure_updates", lambda *_: None)

    def train(self, *settings: str, start_step: int = 0) -> int:
        process = SimpleNamespace(
            num_processes=1, is_main_process=True, device=torch.device("cpu"), log=lambda *_, **__: None
        )
        run = Run(
            loaded=config_of(*settings),
            accelerator=process,
            folder=RunFolder(self._folder),
            store=None,
            checked=SimpleNamespace(saved=SavedBytes(checkpoint=0, lora=0)),
            page=ReportWriter(self._folder, is_main=False),
            console=Console(file=io.StringIO()),
            clock=StartupClock(0.0),
            grace=None,
            requests=Requests(RunFolder(self._folder), StopRequest(), process, None),
            status=RunningStatus(RunFolder(self._folder)),
            arguments=(),
        )
        built = SimpleNamespace(
            weights=WeightStream([], process.device),
            compiler=BlockCompiler([]),
            divergence=Divergence(),
            sample_losses=SimpleNamespace(after_step=lambda _step: None, write=lambda _step: None),
        )
        return train(run, built, self._saver, start_step)

    def _note(self, what: str, step: int) -> None:
        self.done.append((what, step))

    def _step(self, step: int) -> StepResult:
        self._note("step", step)
        for name in (name for name, at in self._asked.items() if at == step):
            (self._folder / name).touch()
        return StepResult(step=step, loss=1.0, grad_norm=1.0, learning_rate=0.1, num_samples=1, seconds=1.0)

    def _save(self, step: int) -> None:
        if step != self._saved:  # As the real one.
            self._note("save", step)
        self._saved = step


def test_what_is_due_and_what_is_asked_for_follow_a_step_once_the_evaluation_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path, monkeypatch, SAVE=1, SAMPLE=1)
    settings = ("train.steps=5", "output.checkpoint_every_steps=2", "validation.every_steps=null")
    assert life.train(*settings) == 5
    assert life.done == [
        *[("evaluate", 0), ("step", 1), ("evaluate", 1), ("save", 1), ("step", 2), ("save", 2)],
        *[("step", 3), ("step", 4), ("save", 4), ("step", 5), ("evaluate", 5), ("save", 5)],
    ]


def test_a_run_that_is_stopped_saves_where_it_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(tmp_path, monkeypatch, STOP=4)
    settings = ("train.steps=9", "output.checkpoint_every_steps=100", "validation.every_steps=4")
    assert life.train(*settings, start_step=2) == 4
    assert life.done == [("step", 3), ("step", 4), ("evaluate", 4), ("save", 4)]


@pytest.mark.parametrize(("start_step", "saves"), [(5, [("save", 5)]), (7, [])])
def test_a_run_without_a_step_left_saves_what_it_started_from_and_nothing_of_a_longer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_step: int, saves: list[tuple[str, int]]
) -> None:
    life = Life(tmp_path, monkeypatch)
    assert life.train("train.steps=5", start_step=start_step) == 5
    assert life.done == saves


def test_steps_that_are_not_finite_are_skipped_until_too_many_follow_each_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = dataclasses.replace(batch(range(4)), latents=torch.full((4, INPUTS), float("nan")))
    good = batch(range(4))
    model = linear()
    built = objects(model, *([bad] for _ in range(4)), [good], *([bad] for _ in range(5)))
    built.divergence.note_save(0)
    before = flat(model)
    for step in range(1, 5):
        assert math.isnan(train_step(built, step).loss)
    assert torch.equal(flat(model), before)
    assert "Step 4 is skipped: loss nan" in caplog.text
    built.divergence.note_save(4)
    assert built.divergence.sound_step is None
    assert train_step(built, 5).num_skipped == 4
    assert built.divergence.sound_step == 4  # its weights are those that step 5 found good
    built.divergence.note_save(5)
    assert not torch.equal(flat(model), before)
    for step in range(6, 11):
        built.divergence.require_few_in_a_row(step - 1)
        train_step(built, step)
    message = (
        r"step 10: .* not finite in 5 steps in a row; last on 0.png.* resume from checkpoints/step-00000004"
    )
    with pytest.raises(RunDivergedError, match=message):
        built.divergence.require_few_in_a_row(10)


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_gradients_that_are_not_finite_are_skipped_though_the_loss_is(
    caplog: pytest.LogCaptureFixture, number: float
) -> None:
    model = linear()
    model.bias.register_hook(lambda gradient: gradient * number)
    before = flat(model)
    result = take(model, batches(4), max_grad_norm=1.0)
    assert math.isfinite(result.loss)
    assert (math.isfinite(result.grad_norm), result.num_skipped) == (False, 1)
    assert torch.equal(flat(model), before)
    assert f"gradient norm {number}" in caplog.text


def test_a_loss_on_fixed_noise_that_was_not_finite_counts_until_a_step_is_taken_again() -> None:
    divergence = Divergence.of_checkpoint({"step": 4, "divergence": {"is_loss_finite": False}})
    with pytest.raises(RunDivergedError, match=r"after step 4, the last one, the loss on fixed noise is not"):
        divergence.require_none(4, total_steps=4)
    divergence.note_taken()
    divergence.require_none(5, total_steps=5)
