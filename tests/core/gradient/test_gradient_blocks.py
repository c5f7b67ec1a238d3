"""Every block call of a diffusers model goes through our function, and afterwards the model is as before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import HunyuanDiT2DModel, QwenImageTransformer2DModel
from diffusers.models.unets.unet_3d_condition import UNet3DConditionModel
from gradient_models import (
    Case,
    checkpointed_step,
    chroma,
    flux,
    forward,
    qwen_image,
    sdxl_unet,
    training_step,
    wan,
)
from torch import nn

from diffsynth_lite.core.gradient import (
    blocks_of,
    count_blocks,
    gradient_checkpoint_forward,
    intercept_blocks,
)

HOOK = ("gradient_checkpointing", "_gradient_checkpointing_func")


def hook_state(model: nn.Module) -> list[dict[str, Any]]:
    """The hook's attributes of every module, where they are set."""
    return [
        {name: vars(module)[name] for name in (*HOOK, "forward") if name in vars(module)}
        for module in model.modules()
    ]


def plain(index: int, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return block(*args, **kwargs)


@pytest.mark.parametrize("make_case", [qwen_image, flux, wan, sdxl_unet])
def test_every_block_is_run_once_in_call_order(make_case: Callable[[], Case]) -> None:
    case = make_case()
    names = {module: name for name, module in case.model.named_modules()}
    seen: list[tuple[int, str]] = []

    def run(index: int, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append((index, names[block]))
        return gradient_checkpoint_forward(block, True, True, *args, **kwargs)

    before = hook_state(case.model)
    reference = training_step(case)
    assert training_step(case, intercept_blocks(case.model, run)) == reference
    assert seen == list(enumerate(case.block_names))
    assert hook_state(case.model) == before
    assert training_step(case) == reference


def test_the_index_counts_all_calls_of_a_scope() -> None:
    case, seen = qwen_image(num_layers=2), []
    with intercept_blocks(case.model, lambda index, *args: seen.append(index) or plain(index, *args)):
        forward(case.model, case.inputs)
        forward(case.model, case.inputs)
    assert seen == [0, 1, 2, 3]


def test_without_grad_the_model_runs_its_blocks_itself() -> None:
    case, seen = qwen_image(num_layers=2), []
    with torch.no_grad():
        expected = forward(case.model, case.inputs)
        with intercept_blocks(case.model, lambda *args, **_kwargs: seen.append(args)):
            assert torch.equal(forward(case.model, case.inputs), expected)
    assert seen == []


@pytest.mark.parametrize("make_case", [qwen_image, sdxl_unet])
def test_a_model_is_as_before_after_an_exception(make_case: Callable[[], Case]) -> None:
    case = make_case()
    before = hook_state(case.model)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ArithmeticError("in a block")

    with pytest.raises(ArithmeticError, match="in a block"), intercept_blocks(case.model, fail):
        forward(case.model, case.inputs)
    assert hook_state(case.model) == before


def test_an_inner_scope_gives_back_to_the_outer_one_and_that_to_diffusers() -> None:
    case, seen = qwen_image(num_layers=1), []
    case.model.enable_gradient_checkpointing()
    before = hook_state(case.model)

    def named(name: str) -> Callable[..., Any]:
        return lambda index, block, *args: seen.append(name) or block(*args)

    with intercept_blocks(case.model, named("outer")):
        with intercept_blocks(case.model, named("inner")):
            forward(case.model, case.inputs)
        forward(case.model, case.inputs)
    assert seen == ["inner", "outer"]
    assert hook_state(case.model) == before


class ModelWithBoundHook(nn.Module):
    """Calls the hook as PRX and HunyuanImage do: with a bound method, and with keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.block = nn.Bilinear(2, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            return self._gradient_checkpointing_func(self.block.__call__, x, input2=x)
        return self.block(x, x)


def test_a_hook_may_be_given_a_bound_method_and_keywords() -> None:
    model, x, seen = ModelWithBoundHook(), torch.ones(1, 2), []
    with intercept_blocks(
        model, lambda index, block, *args, **kwargs: seen.append(block) or block(*args, **kwargs)
    ):
        output = model(x)
    assert seen == [model.block]
    assert torch.equal(output, model(x))
    assert not hasattr(model, "_gradient_checkpointing_func")


def test_a_model_without_a_hook_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Linear has no gradient checkpointing hook"):
        intercept_blocks(nn.Linear(1, 1), plain).__enter__()
    with pytest.raises(ValueError, match="Sequential has no gradient checkpointing hook"):
        blocks_of(nn.Sequential(nn.ModuleList([nn.Linear(1, 1)])), ["0"])


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True)])
def test_given_blocks_are_run_where_the_hook_drops_an_argument(flags: tuple[bool, bool]) -> None:
    case = chroma()
    blocks = blocks_of(case.model, ["transformer_blocks", "single_transformer_blocks"])
    indices: list[int] = []

    def run(index: int, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        indices.append(index)
        return gradient_checkpoint_forward(block, *flags, *args, **kwargs)

    before = hook_state(case.model)
    reference = training_step(case)
    assert training_step(case, intercept_blocks(case.model, run, blocks=blocks)) == reference
    assert indices == [0, 1, 2]
    assert hook_state(case.model) == before
    # The reason for this way: when this fails, diffusers has mended the hook and Chroma needs it no more.
    assert checkpointed_step(case, flags) != reference


def test_given_blocks_must_be_of_the_model() -> None:
    with pytest.raises(ValueError, match="modules that Sequential does not have"):
        intercept_blocks(nn.Sequential(nn.Linear(1, 1)), plain, blocks=[nn.Linear(1, 1)]).__enter__()


def test_blocks_come_in_the_order_of_the_lists_also_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = QwenImageTransformer2DModel(num_layers=2, num_attention_heads=2)
    assert blocks_of(model, ["transformer_blocks"]) == list(model.transformer_blocks)
    model = flux().model
    expected = [*model.single_transformer_blocks, *model.transformer_blocks]
    assert blocks_of(model, ["single_transformer_blocks", "transformer_blocks"]) == expected


def test_a_single_module_of_a_list_is_a_block_too() -> None:
    model = qwen_image().model
    names = ["transformer_blocks.1", "transformer_blocks"]
    assert blocks_of(model, names) == [model.transformer_blocks[1], *model.transformer_blocks]
    assert count_blocks(model, names) == 1 + len(model.transformer_blocks)


@pytest.mark.parametrize("name", ["blocks", "proj_out", "", "transformer_blocks.0.attn"])
def test_a_missing_block_list_is_an_error_that_names_those_there_are(name: str) -> None:
    message = rf"QwenImageTransformer2DModel has no block list '{name}'.*\['transformer_blocks'\]"
    with pytest.raises(ValueError, match=message):
        blocks_of(qwen_image().model, [name])


def test_an_empty_block_list_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'transformer_blocks' of QwenImageTransformer2DModel is empty"):
        blocks_of(QwenImageTransformer2DModel(num_layers=0, num_attention_heads=1), ["transformer_blocks"])


@pytest.mark.parametrize("model_class", [HunyuanDiT2DModel, UNet3DConditionModel])
def test_a_class_without_gradient_checkpointing_is_an_error(model_class: type[nn.Module]) -> None:
    model = model_class.__new__(model_class)
    nn.Module.__init__(model)
    with pytest.raises(ValueError, match=f"{model_class.__name__} does not support gradient checkpointing"):
        blocks_of(model, ["blocks"])
