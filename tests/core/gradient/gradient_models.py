"""Tiny diffusers models with every optional input populated, and one training step on them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    ChromaTransformer2DModel,
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from peft import LoraConfig
from torch import Tensor, nn

from diffsynth_lite.core.gradient import gradient_checkpoint_forward, intercept_blocks

ALL_FLAGS = [(False, False), (True, False), (False, True), (True, True)]


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and the names of its blocks in the order in which a forward pass calls them."""

    model: nn.Module
    inputs: dict[str, Any]
    block_names: list[str]


@dataclass(frozen=True)
class Step:
    """What a forward and backward pass computed."""

    output: Tensor
    gradients: dict[str, Tensor]

    def __eq__(self, other: object) -> bool:
        """Equality of every bit."""
        return (
            isinstance(other, Step)
            and torch.equal(self.output, other.output)
            and self.gradients.keys() == other.gradients.keys()
            and all(torch.equal(value, other.gradients[name]) for name, value in self.gradients.items())
        )


def by_turns(
    values: Sequence[Any], firsts: Sequence[Any], seconds: Sequence[Any]
) -> list[tuple[Any, Any, Any]]:
    """Each of ``firsts`` with each of ``seconds``, and with one of ``values`` in turn: any two meet."""
    return [
        (first, second, values[(place + other) % len(values)])
        for place, first in enumerate(firsts)
        for other, second in enumerate(seconds)
    ]


def forward(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The output of a diffusers model after seeding dropout."""
    torch.manual_seed(7)
    return model(**inputs, return_dict=False)[0]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every gradient of ``model``."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert any(gradient.any() for gradient in found.values())
    return found


def training_step(
    case: Case, run_blocks: AbstractContextManager[None] | None = None, *, keep_gradients: bool = False
) -> Step:
    """A forward and backward pass, the forward inside ``run_blocks``."""
    if not keep_gradients:
        case.model.zero_grad(set_to_none=True)
    with run_blocks or nullcontext():
        output = forward(case.model, case.inputs)
    output.float().square().mean().backward()
    return Step(output.detach(), gradients(case.model))


def with_flags(flags: tuple[bool, bool]) -> Callable[..., Any]:
    """A ``run`` for ``intercept_blocks`` that gives each block these two switches."""
    return lambda index, block, *args, **kwargs: gradient_checkpoint_forward(block, *flags, *args, **kwargs)


def checkpointed_step(case: Case, flags: tuple[bool, bool], **kwargs: Any) -> Step:
    """``training_step`` with each block called with the two switches."""
    return training_step(case, intercept_blocks(case.model, with_flags(flags)), **kwargs)


def qwen_image(batch_size: int = 2, *, num_layers: int = 3) -> Case:
    """Qwen-Image with a padded prompt mask and a reference image that is modulated as clean."""
    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=num_layers,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
        zero_cond_t=True,
    )
    generator = _randomised(model)
    mask = torch.ones(batch_size, 7, dtype=torch.bool)
    mask[0, 4:] = False
    inputs = {
        "hidden_states": torch.randn(batch_size, 20, 16, generator=generator),
        "encoder_hidden_states": torch.randn(batch_size, 7, 16, generator=generator),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.linspace(0.2, 0.9, batch_size),
        "img_shapes": [[(1, 4, 4), (1, 2, 2)]] * batch_size,
        "attention_kwargs": {},
        "controlnet_block_samples": [torch.randn(batch_size, 20, 32, generator=generator)],
    }
    return Case(model, inputs, [f"transformer_blocks.{i}" for i in range(num_layers)])


def qwen_image_with_lora(batch_size: int = 2) -> Case:
    """``qwen_image`` with a frozen base and a trainable adapter that drops 30 % of its inputs."""
    case = qwen_image(batch_size)
    torch.manual_seed(1)
    case.model.requires_grad_(False)
    targets = ["to_q", "to_k", "to_v", "to_out.0", "img_mlp.net.2"]
    config = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.3, target_modules=targets, init_lora_weights=False)
    case.model.add_adapter(config)
    case.model.train()
    return case


def flux() -> Case:
    """FLUX.1 with guidance: double-stream, then single-stream blocks."""
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=8,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    generator = _randomised(model)
    inputs = {
        "hidden_states": torch.randn(2, 16, 8, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, 16, generator=generator),
        "pooled_projections": torch.randn(2, 16, generator=generator),
        "timestep": torch.tensor([0.3, 0.8]),
        "guidance": torch.tensor([3.5, 1.0]),
        "img_ids": torch.randint(0, 4, (16, 3), generator=generator).float(),
        "txt_ids": torch.zeros(5, 3),
        "joint_attention_kwargs": {},
    }
    names = [f"transformer_blocks.{i}" for i in range(2)] + [
        f"single_transformer_blocks.{i}" for i in range(2)
    ]
    return Case(model, inputs, names)


def chroma() -> Case:
    """Chroma with a padded prompt, whose mask its gradient checkpointing hook drops."""
    model = ChromaTransformer2DModel(
        patch_size=1,
        in_channels=8,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=16,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )
    generator = _randomised(model)
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[0, 2:5] = False
    inputs = {
        "hidden_states": torch.randn(2, 16, 8, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, 16, generator=generator),
        "timestep": torch.tensor([0.3, 0.8]),
        "img_ids": torch.randint(0, 4, (16, 3), generator=generator).float(),
        "txt_ids": torch.zeros(5, 3),
        "attention_mask": mask,
    }
    return Case(
        model, inputs, ["transformer_blocks.0"] + [f"single_transformer_blocks.{i}" for i in range(2)]
    )


def wan() -> Case:
    """Wan image-to-video with image embeddings and a timestep for each token."""
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=8,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        image_dim=8,
        added_kv_proj_dim=24,
        rope_max_seq_len=32,
    )
    generator = _randomised(model)
    inputs = {
        "hidden_states": torch.randn(1, 8, 3, 4, 4, generator=generator),
        "timestep": torch.tensor([[0.0] * 4 + [700.0] * 8]),
        "encoder_hidden_states": torch.randn(1, 5, 16, generator=generator),
        "encoder_hidden_states_image": torch.randn(1, 3, 8, generator=generator),
        "attention_kwargs": {},
    }
    return Case(model, inputs, ["blocks.0", "blocks.1"])


def sdxl_unet() -> Case:
    """SDXL's UNet with a padded prompt; its hook runs residual blocks and transformer blocks one by one."""
    model = UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=6 * 8 + 8,
        cross_attention_dim=16,
        norm_num_groups=4,
    )
    generator = _randomised(model)
    inputs = {
        "sample": torch.randn(2, 4, 8, 8, generator=generator),
        "timestep": torch.tensor([100, 900]),
        "encoder_hidden_states": torch.randn(2, 5, 16, generator=generator),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool),
        "added_cond_kwargs": {
            "text_embeds": torch.randn(2, 8, generator=generator),
            "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]] * 2),
        },
    }
    down, up = "down_blocks.1.attentions.0", "up_blocks.0.attentions"
    names = ["down_blocks.0.resnets.0", "down_blocks.1.resnets.0"]
    names += [f"{down}.transformer_blocks.{i}" for i in range(2)]
    names += [f"mid_block.attentions.0.transformer_blocks.{i}" for i in range(2)] + ["mid_block.resnets.1"]
    for layer in range(2):
        names.append(f"up_blocks.0.resnets.{layer}")
        names += [f"{up}.{layer}.transformer_blocks.{i}" for i in range(2)]
    names += [f"up_blocks.1.resnets.{i}" for i in range(2)]
    return Case(model, inputs, names)


def _randomised(model: nn.Module) -> torch.Generator:
    """Fill the weights, so that no gate that starts at zero hides an error; a generator for the inputs."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return generator
