"""The models that the gradient benchmarks train: real classes, at real sizes or smaller, random weights."""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import LTXVideoTransformer3DModel, QwenImageTransformer2DModel, WanTransformer3DModel
from peft import LoraConfig
from torch import Tensor, nn

from diffsynth_lite.core.gradient import blocks_of, intercept_blocks
from diffsynth_lite.core.planning import ON_ALL_DEVICES, FusedKernels, backward_in_scope
from diffsynth_lite.pipelines.base.quantized import kept_in_fp32
from diffsynth_lite.pipelines.ltx_video import LTXVideo
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.pipelines.wan import Wan


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a model and its input are.

    Attributes:
        num_blocks: of the transformer.
        num_heads: of its attention; their width is the model's own, so that this sets the width of the model.
        height: of the image or clip, in pixels.
        width: of the image or clip, in pixels.
        num_frames: of the clip; 1 is an image.
    """

    num_blocks: int
    num_heads: int
    height: int
    width: int
    num_frames: int


@dataclass(frozen=True)
class Kind:
    """A model class.

    Attributes:
        build: makes the model.
        inputs: makes what its forward gets, for a batch of one.
        block_list: name of its list of blocks.
        unused_matmuls: layers of a block whose products a recompute may not need.
        full: the size of the published model.
        small: a size for a CPU.
    """

    build: Callable[[Size], nn.Module]
    inputs: Callable[[Size], dict[str, Any]]
    block_list: str
    unused_matmuls: tuple[str, ...]
    full: Size
    small: Size


def _ltx(size: Size) -> nn.Module:
    return LTXVideoTransformer3DModel(
        num_layers=size.num_blocks,
        num_attention_heads=size.num_heads,
        cross_attention_dim=64 * size.num_heads,
    )


def _ltx_inputs(size: Size) -> dict[str, Any]:
    frames, height, width = (size.num_frames - 1) // 8 + 1, size.height // 32, size.width // 32
    return {
        "hidden_states": torch.randn(1, frames * height * width, 128),
        "encoder_hidden_states": torch.randn(1, 128, 4096),
        "encoder_attention_mask": torch.ones(1, 128),
        "timestep": torch.full((1,), 500.0),
        "num_frames": frames,
        "height": height,
        "width": width,
    }


def _wan(size: Size) -> nn.Module:
    return WanTransformer3DModel(
        num_layers=size.num_blocks,
        num_attention_heads=size.num_heads,
        ffn_dim=13824 * size.num_heads // 40,
    )


def _wan_inputs(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(
            1, 16, (size.num_frames - 1) // 4 + 1, size.height // 8, size.width // 8
        ),
        "encoder_hidden_states": torch.randn(1, 512, 4096),
        "timestep": torch.full((1,), 500.0),
    }


def _qwen(size: Size) -> nn.Module:
    return QwenImageTransformer2DModel(num_layers=size.num_blocks, num_attention_heads=size.num_heads)


def _qwen_inputs(size: Size) -> dict[str, Any]:
    height, width = size.height // 16, size.width // 16
    return {
        "hidden_states": torch.randn(1, height * width, 64),
        "encoder_hidden_states": torch.randn(1, 512, 3584),
        "timestep": torch.full((1,), 0.5),
        "img_shapes": [[(1, height, width)]],
    }


KINDS = {
    "ltx": Kind(
        _ltx,
        _ltx_inputs,
        "transformer_blocks",
        LTXVideo.unused_matmuls,
        full=Size(num_blocks=28, num_heads=32, height=512, width=768, num_frames=81),
        small=Size(num_blocks=8, num_heads=4, height=256, width=384, num_frames=41),
    ),
    "wan": Kind(
        _wan,
        _wan_inputs,
        "blocks",
        Wan.unused_matmuls,
        full=Size(num_blocks=40, num_heads=40, height=480, width=832, num_frames=81),
        small=Size(num_blocks=8, num_heads=2, height=128, width=224, num_frames=33),
    ),
    "qwen": Kind(
        _qwen,
        _qwen_inputs,
        "transformer_blocks",
        QwenImage.unused_matmuls,
        full=Size(num_blocks=60, num_heads=24, height=1024, width=1024, num_frames=1),
        small=Size(num_blocks=8, num_heads=2, height=256, width=256, num_frames=1),
    ),
}
"""LTX-Video 2B, Wan 2.1 14B and Qwen-Image: their configs are the defaults of their diffusers classes."""


class TrainedModel:
    """A model with an input, ready for training steps.

    Args:
        model: with its blocks as they are; it is put into training mode.
        device: cpu, cuda, or meta, where nothing is computed but every tensor has its size.
        dtype: of the weights.
        lora: adapters to train; the model's own weights are then frozen. None: they train.
        adapter_dtype: of the adapters' weights.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        lora: LoraConfig | None = None,
        adapter_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.device, self.model = device, model.train()
        _cast_weights(self.model, dtype)
        if lora is not None:
            self.model.requires_grad_(False)
            self.model.add_adapter(lora)
            for weight in self.trained():
                weight.data = weight.data.to(device, adapter_dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(weight.nbytes for weight in self.model.parameters())

    def trained(self) -> list[nn.Parameter]:
        """The weights that train."""
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    def backward(self, loss: Tensor) -> None:
        """The backward pass of ``loss``."""
        if self.device.type != "meta":
            loss.backward()
            return
        with self.attention():
            backward_in_scope(loss)

    def attention(self) -> AbstractContextManager[Any]:
        """Scope in which attention is one kernel, also on meta."""
        return FusedKernels(ON_ALL_DEVICES) if self.device.type == "meta" else nullcontext()


def _cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast to ``dtype``, but for the parts that ``from_pretrained`` keeps in float32."""
    for name, weight in model.named_parameters():
        if not kept_in_fp32(model, name):
            weight.data = weight.data.to(dtype)


class Subject(TrainedModel):
    """A model of a kind, with an input.

    Args:
        kind: of model.
        size: of the model and its input.
        device: cpu, cuda, or meta.
        dtype: of the weights and the input.
        lora: adapters to train; None: the model's own weights train.
        adapter_dtype: of the adapters' weights.
    """

    def __init__(
        self,
        kind: Kind,
        size: Size,
        device: torch.device,
        dtype: torch.dtype,
        lora: LoraConfig | None = None,
        adapter_dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        with device:
            model = kind.build(size)
            inputs = kind.inputs(size)
        super().__init__(model, device, dtype, lora, adapter_dtype)
        self._block_list, self.unused_matmuls = kind.block_list, kind.unused_matmuls
        self._blocks = blocks_of(self.model, [kind.block_list])
        self._inputs = {
            name: value.to(dtype) if isinstance(value, Tensor) and value.ndim > 1 else value
            for name, value in inputs.items()
        }

    @property
    def num_blocks(self) -> int:
        """How many blocks a forward pass runs."""
        return len(self.model.get_submodule(self._block_list))

    def use_blocks(self, num_blocks: int) -> None:
        """From now on run the first ``num_blocks`` blocks only."""
        setattr(self.model, self._block_list, nn.ModuleList(self._blocks[:num_blocks]))

    def loss(self, run: Callable[..., Any]) -> Tensor:
        """A forward pass with every block called through ``run(index, block, *args, **kwargs)``."""
        with self.attention(), intercept_blocks(self.model, run):
            output = self.model(**self._inputs, return_dict=False)[0]
        return output.float().square().mean()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of model, size, training and device, which both benchmarks have."""
    devices, dtypes = ("cpu", "cuda", "meta"), ("float32", "bfloat16")
    parser.add_argument("--model", choices=KINDS, default="ltx", help="default: %(default)s")
    parser.add_argument(
        "--device",
        choices=devices,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="meta counts memory at any size and computes nothing, so that it has no times "
        "(default: cuda where there is one)",
    )
    parser.add_argument("--dtype", choices=dtypes, help="of the model (default: bfloat16, on cpu float32)")
    for name in ("height", "width", "frames", "heads"):
        parser.add_argument(f"--{name}", type=int, help="default: those of the model, on cpu fewer")
    parser.add_argument("--train", choices=("full", "lora"), default="full", help="default: %(default)s")
    parser.add_argument("--rank", type=int, default=16, help="of the LoRA (default: %(default)s)")
    parser.add_argument(
        "--target-modules",
        nargs="+",
        default=["to_q", "to_k", "to_v", "to_out.0"],
        help="of the LoRA (default: %(default)s)",
    )
    parser.add_argument(
        "--adapter-dtype", choices=dtypes, default="float32", help="of the LoRA (default: %(default)s)"
    )
    parser.add_argument("--warmup", type=int, default=2, help="steps before the measured ones")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each row")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")


def size_of(arguments: argparse.Namespace) -> Size:
    """The size that the options ask for."""
    kind = KINDS[arguments.model]
    asked = {"num_heads": arguments.heads, "num_frames": arguments.frames}
    asked |= {"height": arguments.height, "width": arguments.width}
    size = kind.small if arguments.device == "cpu" else kind.full
    return replace(size, **{name: value for name, value in asked.items() if value is not None})


def build_subject(arguments: argparse.Namespace, size: Size) -> Subject:
    """The model that the options ask for, in ``size``."""
    torch.set_num_threads(arguments.threads)
    lora = None
    if arguments.train == "lora":
        lora = LoraConfig(r=arguments.rank, target_modules=arguments.target_modules)
    dtype = arguments.dtype or ("float32" if arguments.device == "cpu" else "bfloat16")
    return Subject(
        KINDS[arguments.model],
        size,
        torch.device(arguments.device),
        getattr(torch, dtype),
        lora,
        getattr(torch, arguments.adapter_dtype),
    )
