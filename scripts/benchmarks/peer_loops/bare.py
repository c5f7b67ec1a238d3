"""The loop that a person would write by hand with diffusers and peft."""

from collections.abc import Generator, Iterator, Sequence
from itertools import cycle
from pathlib import Path

import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from peft import LoraConfig
from torch import Tensor, nn

from peer_loops import LEARNING_RATE, WEIGHT_DECAY, MicroBatch, Work, noise_levels, padded

_CPU = torch.device("cpu")


class BareLoop:
    """What a person would write by hand with diffusers and peft, without any of the trainer's code.

    Args:
        base: folder of the base model.
        layers: names of those with an adapter.
        batches: the micro-batches of each step.
        rank: of the adapter.
        checkpointing: whether blocks are recomputed.
        dtype: of the frozen weights.
        autocast: in bfloat16.
    """

    def __init__(
        self,
        base: Path,
        layers: Sequence[str],
        batches: Iterator[Sequence[MicroBatch]],
        *,
        rank: int,
        checkpointing: bool,
        learning_rate: float = LEARNING_RATE,
        weight_decay: float = WEIGHT_DECAY,
        device: torch.device = _CPU,
        dtype: torch.dtype = torch.float32,
        autocast: bool = False,
    ) -> None:
        self._batches = batches
        model = QwenImageTransformer2DModel.from_pretrained(base, subfolder="transformer", dtype=dtype)
        model.requires_grad_(False)
        model.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=list(layers)))
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in self._trained:
            parameter.data = parameter.data.float()
        self.model: nn.Module = model.to(device).train()
        if checkpointing:
            model.enable_gradient_checkpointing()
        self._optimizer = torch.optim.AdamW(
            self._trained, lr=learning_rate, weight_decay=weight_decay, fused=True
        )
        self._device, self._dtype = device, dtype
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=autocast)

    def steps(self) -> Generator[None, None, None]:
        for micro_batches in self._batches:
            for batch in micro_batches:
                loss = self.loss(batch, noise_levels(batch))
                (loss / len(micro_batches)).backward()
            torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            loss.item()
            yield

    def loss(self, batch: MicroBatch, sigma: Tensor) -> Tensor:
        device, dtype = self._device, self._dtype
        latents, noise, sigma = batch.latents.to(device), batch.noise.to(device), sigma.to(device)
        level = sigma.view(-1, 1, 1, 1, 1)
        noisy = ((1 - level) * latents + level * noise).to(dtype)
        count, channels, _, height, width = noisy.shape
        embeds, mask = padded(batch)
        with self._autocast:
            tokens = self.model(
                hidden_states=QwenImagePipeline._pack_latents(noisy[:, :, 0], count, channels, height, width),
                timestep=sigma,
                encoder_hidden_states=embeds.to(device, dtype),
                encoder_hidden_states_mask=None if mask is None else mask.to(device),
                img_shapes=[[(1, height // 2, width // 2)]] * count,
                return_dict=False,
            )[0]
        velocity = QwenImagePipeline._unpack_latents(tokens, height, width, vae_scale_factor=1)
        return (velocity.float() - (noise - latents)).square().mean()


def bare_loop_in_memory(work: Work) -> BareLoop:
    """The bare loop, on batches that were drawn before."""
    batches = ([batch] for batch in cycle(work.batches))
    return BareLoop(
        work.base,
        work.layers,
        batches,
        rank=work.rank,
        checkpointing=work.checkpointing,
        device=torch.device(work.device),
    )
