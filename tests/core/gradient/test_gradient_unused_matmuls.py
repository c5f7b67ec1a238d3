"""Products that no gradient needs are left out of the recompute, whatever layers are named for it."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from gradient_models import (
    Case,
    Step,
    flux,
    qwen_image,
    qwen_image_with_lora,
    sdxl_unet,
    training_step,
    wan,
)
from peft import LoraConfig
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode

from diffsynth_lite.core.gradient import (
    GradientEngine,
    GradientReport,
    block_runner,
    checkpoint_blocks,
    gradient_checkpoint_forward,
    gradient_engine,
    intercept_blocks,
)

FEED_FORWARD = ("img_mlp.net.2", "txt_mlp.net.2")


def step_of(
    case: Case, engine: GradientEngine, layers: Sequence[str] = FEED_FORWARD
) -> tuple[Step, GradientReport]:
    engine.start_report()
    with gradient_engine(engine):
        run = block_runner(len(case.block_names), True, False, unused_matmuls=layers)
        step = training_step(case, intercept_blocks(case.model, run))
    return step, engine.report()


def every_product_in(case: Case) -> list[str]:
    """Names of all layers in the blocks that end in a matrix product or a convolution."""
    blocks = [case.model.get_submodule(name) for name in case.block_names]
    products = (nn.Linear, nn.Conv2d)
    return sorted({n for b in blocks for n, layer in b.named_modules() if isinstance(layer, products)})


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("make_case", [qwen_image, flux, wan, sdxl_unet])
def test_no_bit_changes_in_any_architecture_where_all_layers_are_named(
    make_case: Callable[[], Case], frozen: bool
) -> None:
    case = make_case()
    if frozen:
        case.model.requires_grad_(False)
        for name, parameter in case.model.named_parameters():
            parameter.requires_grad_("to_q" in name)
    reference, engine, layers = training_step(case), GradientEngine(), every_product_in(case)
    for _ in range(2):
        step, report = step_of(case, engine, layers)
        assert step == reference
    if frozen:
        assert report.dead_ops_skipped > 0


def test_in_lora_training_the_last_products_of_both_feed_forward_parts_are_skipped() -> None:
    case = qwen_image_with_lora()
    step, report = step_of(case, GradientEngine())
    assert step == training_step(case)
    # Of each of the 3 blocks: the image's frozen product and its adapter's second one, and the text's.
    assert report.dead_ops_skipped == 9
    step, report = step_of(case, GradientEngine(skip_dead_ops=False))
    assert step == training_step(case)
    assert report.dead_ops_skipped == 0


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")
def test_freezing_and_switching_adapters_between_steps_changes_no_bit() -> None:
    case, engine = qwen_image_with_lora(), GradientEngine()
    case.model.add_adapter(LoraConfig(r=2, target_modules=["img_mod.1", "to_q"]), adapter_name="gates")
    skipped = []
    for adapters in ("default", "gates", ["default", "gates"], "gates", "default"):
        case.model.set_adapter(adapters)
        for frozen in ("nothing", "img_mod"):
            for name, parameter in case.model.named_parameters():
                if frozen in name:
                    parameter.requires_grad_(False)
            step, report = step_of(case, engine)
            assert step == training_step(case)
            skipped.append(report.dead_ops_skipped)
    assert len(set(skipped)) > 1


def test_layers_whose_products_were_needed_do_not_wait_again(monkeypatch: pytest.MonkeyPatch) -> None:
    case, engine = qwen_image_with_lora(), GradientEngine()
    for name, parameter in case.model.named_parameters():
        if "_mod." in name:
            parameter.requires_grad_(True)
    for has_waited in (True, False):
        counted: list[int] = []
        monkeypatch.setattr(
            engine, "count", lambda dead_ops_skipped=0, counted=counted, **_: counted.append(dead_ops_skipped)
        )
        step_of(case, engine)
        assert sum(counted) == 0
        assert any(counted) == has_waited


class Tail(nn.Module):
    """A block whose last product no gradient needs, unless something before the end of the block reads it."""

    def __init__(self, read: Callable[[Tensor], Any] = lambda product: None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.read = read
        self.gate = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        product = self.last(self.first(x).sin())
        self.read(product)
        return x + self.gate * product


def gradient_of(
    block: nn.Module, flag: bool, engine: GradientEngine, autocast: bool = False, num_backward: int = 1
) -> Tensor:
    """The gradient of a block's first weight, through a recompute or not."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, requires_grad=True)
    with gradient_engine(engine), torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = block_runner(1, flag, False, unused_matmuls=["last"])(0, block, x).square().sum()
    for _ in range(num_backward):
        (gradient,) = torch.autograd.grad(loss, block.first.weight, retain_graph=True)
    return gradient


READS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "nothing": (lambda product: None, 1),
    "its shape": (lambda product: product.shape, 1),
    "a view": (lambda product: product.t()[1:].unsqueeze(0), 1),
    "a copy whose device is named": (lambda product: product.to(product.device, torch.float64), 0),
    "the type of another tensor": (lambda product: (2 * product).type_as(product.double()), 0),
    "its data": (lambda product: product.data.sum(), 0),
    "a value": (lambda product: product.sum().item(), 0),
    "all values": (lambda product: product.detach().tolist(), 0),
    "a comparison": (lambda product: bool((product > 0).any()), 0),
    "a change in place": (lambda product: product.add_(1), 0),
    "a change of a part in place": (lambda product: product[1:].mul_(2), 0),
    "a use that is saved": (lambda product: product.exp(), 0),
    "half precision that is clipped": (lambda product: (2 * product).clip(-1, 1), 0),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", READS)
def test_a_product_that_is_read_is_run(name: str, autocast: bool) -> None:
    read, num_skipped = READS[name]
    block, engine = Tail(read), GradientEngine()
    expected = gradient_of(block, False, engine, autocast)
    for num_backward in (1, 2):
        engine.start_report()
        assert torch.equal(gradient_of(block, True, engine, autocast, num_backward), expected)
        assert engine.report().dead_ops_skipped == num_skipped * num_backward


class RealProducts(TorchDispatchMode):
    """Scope that counts the products that run on tensors with values."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() in ("aten::mm", "aten::addmm") and args[0].device.type != "meta"
        return func(*args, **(kwargs or {}))


def test_what_is_skipped_does_not_run() -> None:
    counts = []
    for skips in (True, False):
        with RealProducts() as products:
            gradient_of(Tail(), True, GradientEngine(skip_dead_ops=skips))
        counts.append(products.count)
    assert counts[1] - counts[0] == 1


def test_a_gate_that_trains_gets_its_gradient() -> None:
    block, engine = Tail(), GradientEngine()
    block.gate.requires_grad_(True)
    gradients = []
    for flag in (False, True):
        torch.manual_seed(0)
        with gradient_engine(engine):
            run = block_runner(1, flag, False, unused_matmuls=["last"])
            run(0, block, torch.randn(3, 4)).square().sum().backward()
        gradients.append(block.gate.grad)
        block.gate.grad = None
    assert torch.equal(*gradients)
    assert gradients[0].any()
    assert engine.report().dead_ops_skipped == 0


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_a_parameter_that_multiplies_a_product_without_history_gets_its_gradient(
    shape: tuple[int, ...],
) -> None:
    block = Tail()
    block.first.requires_grad_(False)
    block.gate = nn.Parameter(torch.ones(shape))
    gradients = []
    for flag in (False, True):
        # Autograd saves the product as it is, not detached, since it has no history.
        loss = (
            block_runner(1, flag, False, unused_matmuls=["last"])(0, block, torch.ones(3, 4)).square().sum()
        )
        gradients += torch.autograd.grad(loss, block.gate, create_graph=True)
    assert torch.equal(*gradients)
    # In the backward pass nothing waits any more: not the gradient either, which may be one product of two.
    assert type(gradients[1]) is Tensor


def test_an_input_that_changes_in_place_before_the_product_runs_is_an_error() -> None:
    class Changing(Tail):
        def forward(self, x: Tensor) -> Tensor:
            inner = self.first(x) * 1
            product = self.last(inner)
            inner.add_(1)
            return x + self.gate * product.exp()

    with pytest.raises(RuntimeError, match=r"changed an input of aten::addmm in place.*skip_dead_ops"):
        gradient_of(Changing(), True, GradientEngine())


class Storageless(nn.Module):
    """Gives its layer a tensor that has no address, as a collective gives it before it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(Collective.apply(self.first(x).sin()))


class Collective(torch.autograd.Function):
    """Stands for an all-gather in its forward and a reduce-scatter in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return AsyncCollectiveTensor(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_tensors_without_an_address_are_left_alone() -> None:
    block, engine = Storageless(), GradientEngine()
    assert torch.equal(gradient_of(block, True, engine), gradient_of(block, False, engine))
    assert engine.report().dead_ops_skipped == 0


def test_a_layer_that_no_block_has_is_an_error() -> None:
    case = qwen_image()
    with (
        pytest.raises(
            ValueError, match=r"unused_matmuls: no block of QwenImageTransformer2DModel has 'proj'"
        ),
        checkpoint_blocks(
            case.model,
            ["transformer_blocks"],
            gradient_checkpoint_forward,
            True,
            False,
            unused_matmuls=["img_mlp.net.2", "proj"],
        ),
    ):
        pass


def test_functions_that_are_no_modules_are_left_alone() -> None:
    block, engine = Tail(), GradientEngine()
    with gradient_engine(engine):
        run = block_runner(1, True, False, unused_matmuls=["last"])
        run(0, lambda x: block(x), torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert engine.report().dead_ops_skipped == 0


def test_a_layers_forward_is_its_own_again_after_backward() -> None:
    block = Tail()
    gradient_of(block, True, GradientEngine())
    assert "forward" not in vars(block.last)
