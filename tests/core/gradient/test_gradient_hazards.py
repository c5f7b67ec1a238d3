"""What could spoil a gradient unseen, and what is left after a pass: in-place changes, errors, threads."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from gradient_models import (
    Case,
    by_turns,
    checkpointed_step,
    chroma,
    flux,
    forward,
    gradients,
    qwen_image,
    qwen_image_with_lora,
    sdxl_unet,
    training_step,
    wan,
    with_flags,
)
from lazy_backend import HazardError, LazyBackend
from torch import Tensor

from diffsynth_lite.core.gradient import (
    GradientEngine,
    blocks_of,
    gradient_checkpoint_forward,
    gradient_engine,
    intercept_blocks,
)
from diffsynth_lite.core.gradient.frames import OffloadedTensor
from diffsynth_lite.core.transfer.backends import PlainBackend
from diffsynth_lite.core.transfer.host_pool import HostPool

OFFLOAD = (False, True)
BACKENDS = [PlainBackend, LazyBackend]
MODELS = [qwen_image, qwen_image_with_lora, flux, wan, sdxl_unet]


@contextmanager
def scope(backend: Any = None, **settings: Any) -> Iterator[GradientEngine]:
    """A scope of an engine that leaves nothing behind."""
    engine = GradientEngine(backend=backend, **settings)
    with gradient_engine(engine):
        yield engine
    assert engine.host_pool.num_bytes_lent == 0
    if isinstance(backend, LazyBackend):
        backend.finish()


@pytest.mark.parametrize(
    ("make_case", "blocks", "make_backend"), by_turns(BACKENDS, MODELS, [(1, 1), (0, 0), (0, 2), (3, 1)])
)
def test_a_step_does_not_depend_on_when_the_copies_run(
    make_case: Callable[[], Case], blocks: tuple[int, int], make_backend: Callable[[], Any]
) -> None:
    case = make_case()
    reference = training_step(case)
    resident, prefetched = blocks
    with scope(make_backend(), resident_blocks=resident, prefetched_blocks=prefetched) as engine:
        for _ in range(2):
            assert checkpointed_step(case, OFFLOAD) == reference
    assert engine.report().tensors_offloaded > 0


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
@pytest.mark.parametrize("make_backend", BACKENDS)
def test_a_model_whose_blocks_are_wrapped_does_not_depend_on_when_the_copies_run(
    make_backend: Callable[[], Any],
) -> None:
    case = chroma()
    reference = training_step(case)
    blocks = blocks_of(case.model, ("transformer_blocks", "single_transformer_blocks"))
    with scope(make_backend()):
        run_blocks = intercept_blocks(case.model, with_flags(OFFLOAD), blocks=blocks)
        assert training_step(case, run_blocks) == reference


@pytest.mark.parametrize("make_backend", BACKENDS)
def test_two_graphs_a_retained_one_and_changing_batches_do_not_mix(make_backend: Callable[[], Any]) -> None:
    case = qwen_image_with_lora(batch_size=1)
    inputs = [case.inputs, qwen_image(batch_size=2).inputs, qwen_image(batch_size=3).inputs]
    references = [training_step(Case(case.model, one, case.block_names)).gradients for one in inputs]
    with scope(make_backend()):
        for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
            with intercept_blocks(case.model, with_flags(OFFLOAD)):
                losses = [forward(case.model, one).square().mean() for one in inputs]
            for index in (*order, *order):
                case.model.zero_grad(set_to_none=True)
                losses[index].backward(retain_graph=True)
                found = gradients(case.model)
                assert all(torch.equal(found[name], value) for name, value in references[index].items())
            del losses


def offloaded_step(backend: LazyBackend, *, num_blocks: int = 4) -> Tensor:
    """The gradient of a stack of blocks, each of which needs its input in backward."""
    weight = torch.linspace(0.5, 1.5, 8, requires_grad=True)
    with gradient_engine(GradientEngine(backend=backend)):
        x = weight * 1
        for _ in range(num_blocks):
            x = gradient_checkpoint_forward(lambda x: (x * weight).sin() * x, *OFFLOAD, x)
        x.sum().backward()
    del x
    assert weight.grad is not None
    return weight.grad


def test_a_copy_that_runs_late_is_waited_for() -> None:
    backend = LazyBackend()
    assert torch.equal(offloaded_step(backend), offloaded_step(PlainBackend()))
    backend.finish()


def test_use_before_the_wait_is_caught() -> None:
    assert offloaded_step(LazyBackend(forgets="in")).isnan().any()


def test_memory_given_away_before_its_copy_to_the_host_is_caught() -> None:
    backend = LazyBackend(forgets="out")
    offloaded_step(backend)
    with pytest.raises(HazardError, match=r"\(out\)"):
        backend.finish()


def abandoned_backward(backend: LazyBackend) -> None:
    """Drop a graph while a prefetch is under way."""

    def stops(gradient: Tensor) -> None:
        raise InterruptedError

    weight = torch.ones(8, requires_grad=True)
    with gradient_engine(GradientEngine(backend=backend, resident_blocks=0)):
        x = weight * 1
        for _ in range(2):
            x = gradient_checkpoint_forward(torch.sin, *OFFLOAD, x)
        x.register_hook(stops)
        x = gradient_checkpoint_forward(torch.sin, *OFFLOAD, x)
        with pytest.raises(InterruptedError):
            x.sum().backward()


def test_a_backward_pass_that_fails_waits_for_its_prefetches() -> None:
    backend = LazyBackend()
    abandoned_backward(backend)
    gc.collect()
    assert backend.num_pending == 0


def test_memory_given_away_before_its_prefetch_arrived_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadedTensor, "__del__", lambda self: None)
    backend = LazyBackend()
    abandoned_backward(backend)
    gc.collect()
    with pytest.raises(HazardError, match=r"\(in\)"):
        backend.finish()


def test_host_memory_used_again_before_its_copy_ran_is_caught() -> None:
    def restored(*, too_early: bool) -> Tensor:
        backend, pool = LazyBackend(), HostPool(512 * 8)
        first, second = torch.full((1024,), 1.0), torch.full((1024,), 2.0)
        piece = pool.take(4096, backend.allocate_host)
        offloaded = OffloadedTensor(first, piece, backend)
        offloaded.leave_device()
        offloaded.fetch()
        if too_early:
            piece.__del__()
        else:
            assert pool.take(4096, backend.allocate_host) is None
            pool = HostPool(None)
        other = OffloadedTensor(second, pool.take(4096, backend.allocate_host), backend)
        other.leave_device()
        return offloaded.restore()

    assert torch.equal(restored(too_early=False), torch.full((1024,), 1.0))
    assert torch.equal(restored(too_early=True), torch.full((1024,), 2.0))


@pytest.mark.parametrize("make_backend", BACKENDS)
@pytest.mark.parametrize("changed", [0, 1, 2])
@pytest.mark.parametrize("resident", [0, 1, 2])
def test_an_in_place_change_of_an_offloaded_tensor_raises(
    make_backend: Callable[[], Any], changed: int, resident: int
) -> None:
    weight = torch.ones(3, requires_grad=True)
    scales = [torch.full((3,), 2.0) for _ in range(3)]
    x = weight * 1
    with gradient_engine(GradientEngine(backend=make_backend(), resident_blocks=resident)):
        for index, scale in enumerate(scales):
            x = gradient_checkpoint_forward(torch.mul, *OFFLOAD, x, scale)
            # The next block call would send it away; those that were sent away before may change.
            if index == changed and resident:
                scale.zero_()
    if resident:
        with pytest.raises(RuntimeError, match=r"shape \(3,\).*changed in place"):
            x.sum().backward()
    else:
        scales[changed].zero_()
        x.sum().backward()
        assert torch.equal(weight.grad, torch.full((3,), 8.0))


@pytest.mark.parametrize("settings", [{"backend": LazyBackend(host_bytes=0)}, {"min_bytes": 1000}, {}])
def test_an_in_place_change_of_a_tensor_that_stayed_raises(settings: dict[str, Any]) -> None:
    weight, scale = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    with gradient_engine(GradientEngine(**settings)):
        loss = gradient_checkpoint_forward(torch.mul, *OFFLOAD, weight, scale).sum()
        loss = loss + gradient_checkpoint_forward(torch.mul, *OFFLOAD, weight, scale).sum()
    scale.zero_()
    with pytest.raises(RuntimeError, match=r"shape \(3,\).*changed in place"):
        loss.backward()


def test_an_in_place_change_without_a_backward_pass_is_no_error() -> None:
    weight, scale = torch.ones(3, requires_grad=True), torch.ones(3)
    with scope(LazyBackend()):
        for value in (1.0, 2.0, 3.0):
            assert gradient_checkpoint_forward(torch.mul, *OFFLOAD, weight, scale).tolist() == [value] * 3
            scale.add_(1)


def raise_in_forward(engine: GradientEngine) -> None:
    weight = torch.rand(8, requires_grad=True)

    def fails(x: Tensor) -> Tensor:
        raise ArithmeticError

    with gradient_engine(engine):
        x = gradient_checkpoint_forward(torch.sin, *OFFLOAD, weight * 2)
        with pytest.raises(ArithmeticError):
            gradient_checkpoint_forward(fails, *OFFLOAD, x * 2)


def raise_in_recompute(engine: GradientEngine) -> None:
    weight = torch.rand(8, requires_grad=True)
    calls: list[int] = []

    def fails_later(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise ArithmeticError
        return x.sin()

    with gradient_engine(engine):
        x = weight * 2
        for block in (torch.sin, fails_later, torch.cos):
            x = gradient_checkpoint_forward(block, *OFFLOAD, x)
    with pytest.raises(ArithmeticError):
        x.sum().backward()


def drop_the_loss(engine: GradientEngine) -> None:
    case = qwen_image_with_lora()
    with gradient_engine(engine), intercept_blocks(case.model, with_flags(OFFLOAD)):
        case.model(**case.inputs)


def keep_the_graph(engine: GradientEngine) -> None:
    case = qwen_image()
    with gradient_engine(engine), intercept_blocks(case.model, with_flags(OFFLOAD)):
        loss = case.model(**case.inputs, return_dict=False)[0].sum()
    loss.backward(retain_graph=True)
    assert engine.host_pool.num_bytes_lent > 0
    loss.backward()


def accumulate(engine: GradientEngine) -> None:
    case = qwen_image_with_lora()
    with gradient_engine(engine):
        for _ in range(3):
            checkpointed_step(case, OFFLOAD, keep_gradients=True)


def differentiate_twice(engine: GradientEngine) -> None:
    weight = torch.rand(8, requires_grad=True)
    with gradient_engine(engine):
        loss = gradient_checkpoint_forward(lambda x: x.sin().exp(), *OFFLOAD, weight * 2).sum()
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    gradient.sum().backward()
    del loss, gradient
    weight.grad = None


ENDINGS = [
    raise_in_forward,
    raise_in_recompute,
    drop_the_loss,
    keep_the_graph,
    accumulate,
    differentiate_twice,
]


@pytest.mark.parametrize("make_backend", [PlainBackend, LazyBackend])
@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_is_left_behind(
    ending: Callable[[GradientEngine], None], make_backend: Callable[[], Any]
) -> None:
    backend = make_backend()
    engine = GradientEngine(backend=backend)
    ending(engine)
    gc.collect()  # tracebacks refer to frames in cycles
    report = engine.report()
    assert report.tensors_offloaded > 0
    assert engine.host_pool.num_bytes_lent == 0
    if isinstance(backend, LazyBackend):
        assert backend.num_pending == 0
    torch.rand(3, requires_grad=True).exp().sum().backward()
    assert engine.report() == report
    with pytest.raises(RuntimeError, match="forward pass of a block"):
        engine.offload(torch.rand(3))


def test_a_pass_after_many_dropped_ones_is_like_the_first() -> None:
    case, engine = qwen_image_with_lora(), GradientEngine()
    reference = training_step(case)
    for _ in range(3):
        drop_the_loss(engine)
    engine.start_report()
    with gradient_engine(engine):
        assert checkpointed_step(case, OFFLOAD) == reference
    # What dropped passes showed of shared tensors holds too.
    assert (engine.report().tensors_offloaded, engine.report().tensors_shared) == (6, 15)
