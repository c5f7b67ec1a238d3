"""This file does what pipelines of two experts have in common: one model for much noise, one for little."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from diffsynth_lite.core.gradient import blocks_in
from diffsynth_lite.core.transfer.backends import backend_for, smallest_worth_moving
from diffsynth_lite.core.transfer.host_pool import available_host_bytes
from diffsynth_lite.core.transfer.shared_memory import HostMemory
from diffsynth_lite.core.weights.packing import HostBlocks, frozen_weights, packed_bytes
from diffsynth_lite.core.weights.stream import SLOTS_TO_GENERATE, WeightStream, require_saving
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.base.composite import Composite
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import Conditioning
from diffsynth_lite.pipelines.base.folder import PipelineFolder
from diffsynth_lite.pipelines.base.model_settings import shortened
from diffsynth_lite.pipelines.base.quantized import set_formats

_EXPERTS = MappingProxyType({"transformer": "high_noise", "transformer_2": "low_noise"})
"""Folders of the two, and the noise that each removes."""


class ExpertFamily(DiffusersFamily):
    """A family of which some folders hold two experts, and others one transformer.

    Unless ``lora.components`` names one expert, both are trained and in memory together; each optimizer step
    trains one of them. Each LoRA is a file of its own. Previews always generate with both: where only one is
    trained, the other is read from disk each time, in the format of the first, and the weights of its blocks
    visit the device from host memory, one after the other, so that the two are never there together.
    """

    lora_prefixes: ClassVar[Mapping[str, str]] = {"transformer_2": "transformer."}
    """Each file is that of a pipeline with one transformer."""

    @cached_property
    def boundary(self) -> float | None:
        """The noise level from which on ``transformer`` is used, and below it ``transformer_2``; or None."""
        return _boundary_of(self.folder)

    @property
    def trainable(self) -> tuple[str, ...]:
        return ("transformer",) if self.boundary is None else tuple(_EXPERTS)

    @property
    def trained_by_default(self) -> tuple[str, ...]:
        return self.trainable

    @property
    def noise_ranges(self) -> tuple[tuple[float, float], ...]:
        if self.boundary is None:
            return ((0.0, 1.0),)
        ranges = {"transformer": (self.boundary, 1.0), "transformer_2": (0.0, self.boundary)}
        return tuple(ranges[name] for name in self.trained)

    @property
    def pipeline_settings(self) -> dict[str, Any]:
        return {"boundary_ratio": self.boundary}

    def fingerprint(self) -> str:
        base = super().fingerprint()
        return base if self.boundary is None else f"{base} boundary {self.boundary}"

    @property
    def lora_file_names(self) -> Mapping[str, str]:
        if self.boundary is None:
            return {}
        return {name: f"pytorch_lora_weights_{noise}.safetensors" for name, noise in _EXPERTS.items()}

    def predict(
        self,
        transformer: torch.nn.Module,
        noisy_latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
    ) -> torch.Tensor:
        if len(self.trained) == 1:
            return super().predict(transformer, noisy_latents, sigma, conditioning)
        boundary = self.boundary
        assert boundary is not None, "several transformers are trained only where there are two experts"

        def run(experts: Composite) -> torch.Tensor:
            def of_expert(name: str, places: list[int]) -> torch.Tensor:
                batch = noisy_latents[places], sigma[places], [conditioning[place] for place in places]
                return super(ExpertFamily, self).predict(experts.get_submodule(name), *batch)

            return estimates_by_expert(sigma, boundary, of_expert)

        estimates: torch.Tensor = transformer(run)
        return estimates

    def preview_models(self, trained: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """All transformers of the pipeline by name; what is not trained is read from disk, and streamed."""
        transformers: dict[str, Any] = dict(self.parts_of(trained))
        one = transformers[self.trained[0]]
        for name in set(self.trainable) - transformers.keys():
            transformers[name] = self._load_streamed(name, one.dtype, one.device)
            if self.context is not None:
                self.context.apply_to(transformers[name])
        return transformers

    def _load_streamed(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
        """A frozen expert with its blocks in host memory, where that has room and something is saved.

        Where what is trained is sharded, it is, too, and nothing is in host memory.
        """
        if self.shards is not None:
            shared: torch.nn.Module = self.load_component(name, dtype)
            return shared.requires_grad_(False)
        empty = self.empty_component(name).requires_grad_(False)
        set_formats(empty, dtype, self.quantization)
        blocks, min_bytes = blocks_in(empty, self.block_lists), smallest_worth_moving(device)
        num_slots = min(SLOTS_TO_GENERATE, len(blocks) - 1)
        if not _can_stream(blocks, device, num_slots=num_slots, min_bytes=min_bytes):
            whole: torch.nn.Module = self.load_component(name, dtype).requires_grad_(False)
            return whole.to(device)
        self.host_blocks = HostBlocks(
            lambda model: blocks_in(model, self.block_lists),
            device,
            min_bytes=min_bytes,
            memory=HostMemory(backend_for(device)),
        )
        try:
            expert: torch.nn.Module = self.load_component(name, dtype).requires_grad_(False)
            # The stream lives as long as the blocks, which call it.
            WeightStream(
                [blocks_in(expert, self.block_lists)],
                device,
                num_slots=num_slots,
                min_bytes=min_bytes,
                loaded=self.host_blocks,
            )
        finally:
            self.host_blocks = None
        return expert.to(device)


def _can_stream(
    blocks: Sequence[torch.nn.Module], device: torch.device, *, num_slots: int, min_bytes: int
) -> bool:
    """Whether these blocks, on the meta device, take less of the device so, and the host has the room."""
    try:
        require_saving([blocks], device, num_slots=num_slots, min_bytes=min_bytes)
    except ValueError:
        return False
    num_bytes = sum(packed_bytes(frozen_weights(block, min_bytes)) for block in blocks)
    available = available_host_bytes()
    return num_slots > 0 and (available is None or num_bytes <= available)


def estimates_by_expert(
    sigma: torch.Tensor, boundary: float, estimate: Callable[[str, list[int]], torch.Tensor]
) -> torch.Tensor:
    """Estimates of a batch, each sample's by the expert of its noise level.

    Args:
        sigma: (B,), noise levels.
        boundary: the noise level from which on the first expert is used.
        estimate: of the samples at some places of the batch, by the expert of this name; (len(places), ...).
    """
    # This waits for the device once a micro-batch, which is little next to a model that is worth two experts.
    is_high = (sigma >= boundary).tolist()
    places = [[place for place, high in enumerate(is_high) if high == wanted] for wanted in (True, False)]
    used = [(name, chosen) for name, chosen in zip(_EXPERTS, places, strict=True) if chosen]
    estimates = [estimate(name, chosen) for name, chosen in used]
    if len(estimates) == 1:
        return estimates[0]
    order = torch.tensor([place for _, chosen in used for place in chosen])
    return torch.cat(estimates)[order.argsort().to(sigma.device)]


def _boundary_of(folder: PipelineFolder) -> float | None:
    index, file = folder.pipeline_config(), folder.path / "model_index.json"
    boundary = index.get("boundary_ratio")
    parts = folder.parts()
    missing = [name for name in _EXPERTS if name not in parts]
    if boundary is None and "transformer_2" in missing:
        return None
    if boundary is None:
        raise UserError(
            f"model.path: {file} names transformer_2, but no boundary_ratio: the noise level below which it "
            "is used; get the folder again"
        )
    if missing:
        raise UserError(
            f"model.path: {file} gives the boundary_ratio {boundary} of two transformers, but names no "
            f"{' and no '.join(missing)}; get the whole folder (lora.components trains one of the two only)"
        )
    if isinstance(boundary, bool) or not isinstance(boundary, int | float) or not 0 < boundary < 1:
        raise UserError(
            f"model.path: {file}: boundary_ratio is {shortened(boundary)}, and no noise level between 0 and "
            "1; get the folder again"
        )
    return float(boundary)
