"""This file takes training steps of released models with random weights, as a run of a config takes them.

The model is built from the numbers of its release, and its weights are made on the device: the time and the
memory of a step depend on their shapes only. Loading, quantising, streaming, the adapter, the gradient engine
and the optimizer are the trainer's; latents and prompts are random, of the size that the config names.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator, init_empty_weights
from checkpointing import measure_overlap
from meters import seconds_of
from torch import Tensor, nn

from diffsynth_lite.config import Config
from diffsynth_lite.core.gradient import GradientEngine, gradient_engine
from diffsynth_lite.core.weights import loading
from diffsynth_lite.core.weights.loading import StoredTensors, load_frozen
from diffsynth_lite.core.weights.stream import WeightStream
from diffsynth_lite.lora import add_adapter
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.model_function import INPUT
from diffsynth_lite.pipelines.base.quantized import set_formats
from diffsynth_lite.training.builder import build_compiler, build_engine, load_frozen_transformer
from diffsynth_lite.training.frozen_weights import (
    place_weights,
    share_host_memory,
    transformer_quantization,
)
from diffsynth_lite.training.layer_groups import adapter_kind, find_targets, layer_groups, rank_overrides
from diffsynth_lite.training.optimization.optimizers import build_optimizer
from diffsynth_lite.training.planning.subject import family_without_weights, largest_size, num_inputs_of

_NUM_ROWS = 2**14
_BANK_SIZE = 2**22
"""Random numbers of which all weights are made: views of them take no memory, however large a model is."""


def measure_config(
    config: Config,
    *,
    num_warmup: int = 2,
    num_steps: int = 7,
    keeps_host_pool: bool = True,
    has_copies: bool = False,
) -> dict[str, Any]:
    """Take steps of a config and measure them.

    Args:
        keeps_host_pool: False allocates the memory for offloaded tensors again in each step.
        has_copies: whether one more step is taken to see how much of its copying kernels hide.

    Returns:
        ``seconds`` of a step in the median, and ``spread`` from the shortest to the longest; ``peak_bytes``,
        most on the GPU in a step, weights and optimizer included; ``host_bytes``, of streamed weights and of
        what was offloaded; ``overlap``, share of the time of copies in which a kernel ran. What is not
        measured, or only a GPU shows, is None.

    Raises:
        torch.OutOfMemoryError: the device is too small for it.
    """
    on_gpu = torch.cuda.is_available()
    with family_without_weights(config) as family:
        steps = ReleaseSteps(config, family, Accelerator(mixed_precision=config.train.mixed_precision))
        for _ in range(num_warmup):
            steps.take()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(num_steps):
            if not keeps_host_pool:
                steps.renew_engine()
            seconds.append(seconds_of(steps.take, time.perf_counter))
        return {
            "seconds": statistics.median(seconds),
            "spread": [min(seconds), max(seconds)],
            "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
            "host_bytes": steps.host_bytes,
            "overlap": measure_overlap(steps.take) if on_gpu and has_copies else None,
        }


class ReleaseSteps:
    """Optimizer steps of a released model with random weights.

    Args:
        config: of which all that decides a step's time and memory is used.
        family: in a folder that holds the settings of the release.
        accelerator: gives device and precision.
    """

    def __init__(self, config: Config, family: ModelFamily, accelerator: Accelerator) -> None:
        self._config, self._family, self._accelerator = config, family, accelerator
        self._device = accelerator.device
        model, self._weights = self._load()
        self._model = accelerator.prepare_model(model, evaluation_mode=True)
        self._trained = [weight for weight in model.parameters() if weight.requires_grad]
        groups = layer_groups(config, family, self._layers)
        self._optimizer = build_optimizer(config, model, groups)
        self.renew_engine()
        self._make_samples()

    def _load(self) -> tuple[nn.Module, WeightStream]:
        config, family = self._config, self._family
        empty = family.empty_transformer().requires_grad_(False)
        self._layers = find_targets(family, empty, config)
        family.quantization = transformer_quantization(family, empty, config, self._device)
        host_blocks = share_host_memory(config, family, self._accelerator)
        with random_weights(family, self._device):
            model = load_frozen_transformer(config, family, host_blocks)
        add_adapter(
            model,
            self._layers,
            rank=config.lora.rank,
            alpha=config.lora.rank,
            own=rank_overrides(layer_groups(config, family, self._layers)),
            kind=adapter_kind(config),
            device=None if host_blocks is None else host_blocks.device,
            dropout=config.lora.dropout,
            seed=0,
        )
        build_compiler(config, family, model)
        return model.train(), place_weights(config, family, model, self._device, host_blocks)

    def _make_samples(self) -> None:
        config, family, device = self._config, self._family, self._device
        size = largest_size(config, family)
        shape = family.latents_shape(size.width, size.height, size.num_images)
        image = family.latents_shape(size.width, size.height, 1)
        conditioning = dict(family.example_conditioning(shape) or {})
        conditioning |= {
            f"{INPUT}{place}": torch.ones(image) for place in range(num_inputs_of(config, family))
        }
        conditioning = {
            name: torch.randn_like(value) if value.is_floating_point() else value
            for name, value in conditioning.items()
        }
        batch = config.train.micro_batch_size
        self._conditioning = [conditioning] * batch
        self._noisy = torch.randn(batch, *shape, device=device)
        self._sigma = torch.full((batch,), 0.5, device=device)
        self._num_micro_batches = config.train.global_batch_size // batch

    def _loss(self) -> Tensor:
        predicted = self._family.predict(self._model, self._noisy, self._sigma, self._conditioning)
        return predicted.float().square().mean()

    def renew_engine(self) -> None:
        """Give the next steps a gradient engine without memory for offloaded tensors."""
        self._engine: GradientEngine = build_engine(self._config, self._weights)

    def take(self) -> None:
        """Take one: the gradients of its micro-batches, clipped, change the adapter."""
        with gradient_engine(self._engine):
            for _ in range(self._num_micro_batches):
                self._accelerator.backward(self._loss() / self._num_micro_batches)
        torch.nn.utils.clip_grad_norm_(self._trained, self._config.train.max_grad_norm or float("inf"))
        self._optimizer.step()
        self._optimizer.zero_grad()

    @property
    def host_bytes(self) -> int:
        """In host memory: streamed weights, and the pool for what is offloaded."""
        return self._weights.host_bytes + self._engine.host_pool.num_bytes


@contextmanager
def random_weights(family: ModelFamily, device: torch.device) -> Iterator[None]:
    """Scope in which a family makes the weights of what it loads, on a device or in its streamed blocks."""
    assert isinstance(family, DiffusersFamily), "no other has releases"

    def load(name: str, dtype: torch.dtype) -> nn.Module:
        with init_empty_weights():
            model: nn.Module = family.component_class(name).from_config(family.folder.component_config(name))
        stored = StoredTensors(tensors=_random_views(model, device))
        set_formats(model, dtype, family.quantization)
        load_frozen(model, stored, device=device, host_blocks=family.host_blocks)
        return model.eval()

    # Rows at once: of weights in files few save memory, here many save the time to start kernels.
    with patch.object(family, "load_component", load), patch.object(loading, "_NUM_ROWS", _NUM_ROWS):
        yield


def _random_views(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Numbers for each tensor of a model, which overlap in memory, small as those of trained weights are."""
    bank = 0.02 * torch.randn(_BANK_SIZE, generator=torch.Generator().manual_seed(0)).to(device)
    return {name: _view(bank, tensor.shape) for name, tensor in model.state_dict().items()}


def _view(bank: Tensor, shape: torch.Size) -> Tensor:
    """Rows that begin at other places of the bank each."""
    if not shape:
        return bank[0]
    width = shape[1:].numel()
    stride = max(1, (len(bank) - width) // shape[0])
    return bank.as_strided((shape[0], width), (stride, 1)).reshape(shape) if width > 1 else bank[: shape[0]]
