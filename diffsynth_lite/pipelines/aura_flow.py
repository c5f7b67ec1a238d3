"""This file trains AuraFlow (text to image), and Pony V7, which is made from it.

Layouts: b batch, c latent channels, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``auraflow_transformer_2d.py`` and ``pipeline_aura_flow.py``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
)
from transformers import UMT5EncoderModel

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, renamed, renamed_in
from diffsynth_lite.lora.shared_names import JOINT_PROJECTIONS, LAST_NORM
from diffsynth_lite.lora.spelling import taken_by_comfyui
from diffsynth_lite.media import Prompt, RecordKind
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import Conditioning, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.model_function import (
    Checkpointing,
    checkpointed,
    model_function,
    pad_tokens,
)
from diffsynth_lite.releases.components import KL_SHAPE, SWARM, T5_SHAPE, flow_euler
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers


@model_function
def model_fn_aura_flow(
    transformer: torch.nn.Module,
    latents_bchw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of AuraFlow, each transformer block run by the gradient engine.

    Args:
        transformer: an ``AuraFlowTransformer2DModel``, plain or wrapped by DDP.
        latents_bchw: (B, 4, H, W), noisy normalised latents, H and W even.
        timestep: (B,), the noise level, in [0, 1].
        prompt_embeds_bld: (B, L, D) prompt embeddings, filled up with zeros, which the model sees.

    Returns:
        (B, 4, H, W), the predicted velocity ``noise - latents``.
    """
    with checkpointed(AuraFlow, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bchw: torch.Tensor = transformer(
            hidden_states=latents_bchw,
            encoder_hidden_states=prompt_embeds_bld,
            timestep=timestep,
            return_dict=False,
        )[0]
    return velocity_bchw


_AURA, _PONY = "fal/AuraFlow-v0.3", "purplesmartai/pony-v7-base"
_PIPE = "diffusion-pipe, configs/auraflow/"
_AUDIT = "Dinoml's report on auraflow_lumina, which read the settings of fal's three repositories"
_PILE_T5_XL = {"d_ff": 5120, "d_model": 2048, "num_heads": 32, "num_layers": 24, "vocab_size": 32128}
_TRANSFORMER = ReleaseComponent(
    "AuraFlowTransformer2DModel",
    {"pos_embed_max_size": 9216},
    dtype="float32",
    source=f"{_PIPE}transformer_config.json; dtype from the number of shards, three; the single file of Pony "
    "V7 has bytes for as many numbers in float16",
)
_V3 = Release(
    name="AuraFlow v0.3",
    hub_id=_AURA,
    pipeline_class="AuraFlowPipeline",
    settings={"_name_or_path": _AURA},
    components={
        "transformer": _TRANSFORMER,
        "text_encoder": ReleaseComponent(
            "UMT5EncoderModel", {**T5_SHAPE, **_PILE_T5_XL}, source=f"{_PIPE}text_encoder/config.json"
        ),
        "vae": ReleaseComponent(
            "AutoencoderKL", {**KL_SHAPE, "scaling_factor": 0.13025}, source=f"{_PIPE}vae_config.json"
        ),
    },
    scheduler=flow_euler(1.73, _AUDIT),
    tokenizers={"tokenizer": ReleaseTokenizer("LlamaTokenizerFast", ("tokenizer.json", "tokenizer.model"))},
    size=(1024, 1024, 1),
    parameters=6.8e9,
    variants=("fp16",),
    licence="Apache-2.0",
    gated=False,
    architecture="auraflow-v1",
    sources={
        "pipeline": f"its model_index.json on the hub; files of the tokenizer as in {_PIPE}tokenizer",
        "size": "defaults of the pipeline",
        "parameters": "the page of fal on the hub",
        "licence": "its page on the hub",
        "architecture": SWARM,
    },
    unconfirmed=("dtypes of the text encoder and the autoencoder",),
)
_PONY_V7 = _V3.but(
    "Pony V7",
    _PONY,
    settings={"_name_or_path": _PONY},
    transformer=replace(_TRANSFORMER, dtype="float16"),
    size=(1280, 1536, 1),
    variants=(),
    licence="Pony License, with terms of its own for companies of more than 1 million US$",
    gated=None,
    sources={
        "size": "a public transcription of its authors' workflow, which its card names",
        "licence": "pages of copies of it on the hub; the terms as public summaries have them",
    },
    unconfirmed=("dtypes of the weights", "settings of the scheduler", "what its licence allows"),
)


_FEED_FORWARD = {"c_fc1": "linear_1", "c_fc2": "linear_2", "c_proj": "out_projection"}
_OF_JOINT = {
    **{f"attn.w2{part}": f"attn.to_{part}" for part in "qkv"},
    **{f"attn.w1{part}": f"attn.add_{part}_proj" for part in "qkv"},
    "attn.w2o": "attn.to_out.0",
    "attn.w1o": "attn.to_add_out",
    **{f"mlpX.{name}": f"ff.{layer}" for name, layer in _FEED_FORWARD.items()},
    **{f"mlpC.{name}": f"ff_context.{layer}" for name, layer in _FEED_FORWARD.items()},
    "modX.1": "norm1.linear",
    "modC.1": "norm1_context.linear",
}
_OF_SINGLE = {
    **{f"attn.w1{part}": f"attn.to_{part}" for part in "qkv"},
    **{f"mlp.{name}": f"ff.{layer}" for name, layer in _FEED_FORWARD.items()},
    "attn.w1o": "attn.to_out.0",
    "modCX.1": "norm1.linear",
}
_KOHYA = {
    **renamed_in({"double_layers.*": "joint_transformer_blocks.*"}, _OF_JOINT),
    **renamed_in({"single_layers.*": "single_transformer_blocks.*"}, _OF_SINGLE),
    **renamed_in({"t_embedder.mlp": "time_step_proj"}, {"0": "linear_1", "2": "linear_2"}),
    "cond_seq_linear": renamed("context_embedder"),
    "init_x_linear": renamed("pos_embed.proj"),
    "final_linear": renamed("proj_out"),
    "modF.1": LAST_NORM,
}
_LORA_LAYERS = LayerNames(
    layers=tuple(layer for place in _KOHYA.values() for layer in place.layers), kohya=_KOHYA
)


class AuraFlow(DiffusersFamily):
    """AuraFlow v0.3 and Pony V7, from text.

    4 dual-stream and 32 single-stream blocks, prompts of Pile-T5-XL, SDXL's VAE: 4 channels at 1/8 size.

    The model sees the first 256 tokens of a prompt, filled up with zeros; Pony V7, as its authors use it,
    768. It is recognised by the name in its ``model_index.json``, which a copy saved by diffusers has lost.

    Its position embeddings are a table, for at most 1536 pixels on each side, and 1024 with AuraFlow 0.1 and
    0.2. Larger images are refused.

    The sampler's shift is 1.73 at any size, as in SimpleTuner's example; diffusion-pipe shifts nothing by
    default. Both have a density around the middle, as the recipe.

    Prompts of Pony V7 begin with tags such as ``score_9``, then describe the image; so should captions.
    """

    pipelines = (AuraFlowPipeline,)
    releases = (_V3, _PONY_V7)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image": "aura_flow_lora.yaml"}
    transformer_class = AuraFlowTransformer2DModel
    lora_spelling = taken_by_comfyui()
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    encoder_classes: ClassVar[Mapping[str, Any]] = {"text_encoder": UMT5EncoderModel, "vae": AutoencoderKL}
    block_lists = ("joint_transformer_blocks", "single_transformer_blocks")
    unused_matmuls = ("ff.out_projection", "ff_context.out_projection")
    float16_vae = False
    size_divisor = 16
    patch = 2
    model_fn = model_fn_aura_flow
    prompt_id = "aura_flow/prompt/1"
    prompt_outputs = ("prompt_embeds",)
    latents_id = "aura_flow/latents/1"
    prompt_width = "joint_attention_dim"
    default_target_modules = JOINT_PROJECTIONS
    target_sets: ClassVar[TargetSets] = {
        "attention": JOINT_PROJECTIONS,
        "all": (*JOINT_PROJECTIONS, *(name for name in _OF_JOINT.values() if not name.startswith("attn."))),
    }

    @property
    def max_prompt_tokens(self) -> int:
        """256, and of Pony V7 768: its authors' workflow, and the example of diffusion-pipe."""
        return 768 if self.folder.pipeline_config().get("_name_or_path") == _PONY else 256

    @property
    def max_side(self) -> int:
        places = self.folder.component_config("transformer")["pos_embed_max_size"]
        return math.isqrt(places) * self.size_divisor

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        rows = [one["prompt_embeds"] for one in super().encode_prompts(pipeline, prompts, device)]
        # The padding is zeros, which need no place in the cache.
        return [{"prompt_embeds": row_ld[row_ld.any(dim=1)]} for row_ld in rows]

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        rows = [sample["prompt_embeds"] for sample in conditioning]
        return {"prompt_embeds_bld": pad_tokens(rows, length=self.max_prompt_tokens, **like)[0]}

    def prompt_argument(self, prompt: Conditioning, like: Mapping[str, Any]) -> dict[str, Any]:
        embeds_bld = self.model_inputs([prompt], like)["prompt_embeds_bld"]
        # The pipeline asks for a mask that it does not use.
        return {"prompt_embeds": embeds_bld, "prompt_attention_mask": torch.ones_like(embeds_bld)}

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        return {} if self.max_prompt_tokens == 256 else {"max_sequence_length": self.max_prompt_tokens}


def tiny() -> AuraFlowPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    A dual-stream block and two single-stream ones, of 64 channels in two heads; 4 latent channels at 1/8 size
    with the real model's scale, and places for 128 pixels on a side.
    """
    tokenizer = tokenizers.t5_tokenizer()
    text_encoder = text_encoders.tiny_umt5(tokenizer)
    with seeded(0):
        transformer = AuraFlowTransformer2DModel(
            num_mmdit_layers=1,
            num_single_dit_layers=2,
            attention_head_dim=32,
            num_attention_heads=2,
            joint_attention_dim=text_encoder.config.d_model,
            caption_projection_dim=64,
            pos_embed_max_size=64,
        )
    return AuraFlowPipeline(
        # As in all released repositories: a fixed shift.
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
        vae=autoencoders.tiny_sdxl_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
