"""This file trains ERNIE-Image (text to image): the base model and Turbo.

Layouts: b batch, c channels of a token (32 latent channels of 2 x 2 places), h and w height and width in
tokens; l tokens, d channels.
Sources: diffusers ``transformer_ernie_image.py`` and ``pipeline_ernie_image.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from diffusers import (
    AutoencoderKLFlux2,
    ErnieImagePipeline,
    ErnieImageTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
)
from transformers import Mistral3Model

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, under
from diffsynth_lite.lora.shared_names import EMBEDDER, QKV
from diffsynth_lite.lora.spelling import Spelling
from diffsynth_lite.media import Prompt, RecordKind
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import Conditioning, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.latents import encode_patched_latents
from diffsynth_lite.pipelines.base.model_function import Checkpointing, checkpointed, mask_of, model_function
from diffsynth_lite.releases.components import DIFFUSERS, FLUX2_VAE, PIXTRAL, SWARM, encoder_sizes, flow_euler
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

# A literal in the pipeline, which the model was trained with; the autoencoder's file has 1e-4, of FLUX.2.
_NORM_EPS = 1e-5
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


ERNIE_IMAGE_NAMES = Spelling(prefixes={"transformer": "diffusion_model"}, unknown_to_comfyui=())
"""Diffusers' names but for the prefix: its pipeline takes that, too, and ComfyUI has the same modules."""


@model_function
def model_fn_ernie_image(
    transformer: torch.nn.Module,
    latents_bchw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    prompt_embeds_mask: torch.Tensor | None = None,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of ERNIE-Image, each transformer block run by the gradient engine.

    Args:
        transformer: an ``ErnieImageTransformer2DModel``, plain or wrapped by DDP.
        latents_bchw: (B, 128, H, W), noisy normalised latents, one place a token.
        timestep: (B,), in [0, 1000].
        prompt_embeds_bld: (B, L, D) prompt embeddings, padded on the right.
        prompt_embeds_mask: (B, L), 1 for a token and 0 for padding, which the transformer masks; None when no
            prompt is padded.

    Returns:
        (B, 128, H, W), the predicted velocity ``noise - latents``.
    """
    with checkpointed(ErnieImage, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bchw: torch.Tensor = transformer(
            hidden_states=latents_bchw,
            timestep=timestep,
            text_bth=prompt_embeds_bld,
            text_lens=mask_of(prompt_embeds_bld, prompt_embeds_mask).sum(dim=1),
            return_dict=False,
        )[0]
    return velocity_bchw


_PORT = "dgrauet/ernie-image-mlx, a public port, CLAUDE.md and its files under model"
_BYTES = "MLX-Gen, its plan of a port of ERNIE-Image-Turbo"
_STUDIO = "DiffSynth-Studio, diffsynth/models/"
_MINISTRAL3_3B = ReleaseComponent(
    "Mistral3Model",
    {
        "spatial_merge_size": 2,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "ministral3",
            "tie_word_embeddings": True,
            **encoder_sizes(3072, 9216, 32, 26, 8, 131072, 128),
        },
        "vision_config": {**PIXTRAL},
    },
    dtype="bfloat16",
    source=f"{_PORT}; {_STUDIO}ernie_image_text_encoder.py. The part that sees images, which is not used, "
    f"is that of Mistral 3 in FLUX.2: with it the numbers are those of the 7.17 GiB in {_BYTES}",
)
_BASE = Release(
    name="ERNIE-Image",
    hub_id="baidu/ERNIE-Image",
    pipeline_class="ErnieImagePipeline",
    components={
        "transformer": ReleaseComponent(
            "ErnieImageTransformer2DModel",
            {
                "ffn_hidden_size": 12288,
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_layers": 36,
                "text_in_dim": 3072,
            },
            dtype="bfloat16",
            source=f"{_PORT}; {_STUDIO}ernie_image_dit.py; dtype from the bytes in {_BYTES}",
        ),
        "text_encoder": _MINISTRAL3_3B,
        "vae": replace(FLUX2_VAE, source=f"{_PORT}; dtype from the bytes in {_BYTES}"),
    },
    scheduler=flow_euler(
        4.0, "a fork of musubi-tuner, ernie_image_generate_image.py, of the file in the repository"
    ),
    tokenizers={"tokenizer": ReleaseTokenizer("TokenizersBackend", ("tokenizer.json",))},
    size=(1024, 1024, 1),
    parameters=8e9,
    licence="Apache-2.0",
    gated=None,
    architecture="ernie-image",
    version=None,
    sources={
        "pipeline": f"{_PORT}; files as a copy of the repository on the hub lists them "
        "(models123/ERNIE-Image); class of the tokenizer: MLX-Gen",
        "size": "defaults of the pipeline",
        "parameters": f"{DIFFUSERS}docs/source/en/api/pipelines/ernie_image.md",
        "licence": "the card of the model on the hub",
        "architecture": SWARM,
    },
    unconfirmed=("whether it is gated", "where the tokenizer cuts prompts"),
)
_TURBO = _BASE.but(
    "ERNIE-Image-Turbo",
    "baidu/ERNIE-Image-Turbo",
    distilled="8 steps without guidance",
    unconfirmed=(*_BASE.unconfirmed, "shift of the scheduler: 4 in MLX-Gen, 1 in modl's copy"),
)


_LORA_LAYERS = LayerNames(
    layers=(
        *under("layers.*.self_attention", (*QKV, "to_out.0")),
        *under("layers.*.mlp", ("gate_proj", "up_proj", "linear_fc2")),
        *under("time_embedding", EMBEDDER),
        *("x_embedder.proj", "text_proj", "adaLN_modulation.1", "final_norm.linear", "final_linear"),
    )
)


class ErnieImage(DiffusersFamily):
    """ERNIE-Image and ERNIE-Image-Turbo, from text.

    36 single-stream blocks, prompts of Ministral 3, the autoencoder of FLUX.2: 32 channels at 1/8 size, four
    places of which are a token. One batch may hold captions of any lengths. No layer of the last block is
    unused: text and image share its weights.

    The pipeline has a second language model, which makes short prompts longer (``pe``). Its weights are
    neither downloaded nor used here: captions and the prompts of previews are used as they are written. To
    generate with a LoRA as in the previews, give the pipeline ``use_pe=False``.

    The pipeline cuts prompts at the maximum length of its tokenizer, if it has one; here they are cut at 512
    tokens, as by OneTrainer.

    Turbo is distilled to 8 steps without guidance. No setting is known to show it; it is recognised by its
    name.

    The sampler's shift is 4 at any size; DiffSynth-Studio trains with 3 (``set_timesteps_ernie_image``), as
    do the recipe here and ai-toolkit.
    """

    pipelines = (ErnieImagePipeline,)
    releases = (_BASE, _TURBO)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image": "ernie_image_lora.yaml"}
    transformer_class = ErnieImageTransformer2DModel
    lora_spelling = ERNIE_IMAGE_NAMES
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    encoder_classes: ClassVar[Mapping[str, Any]] = {"text_encoder": Mistral3Model, "vae": AutoencoderKLFlux2}
    block_lists = ("layers",)
    masks_attention = "always"
    unused_matmuls = ("mlp.linear_fc2",)
    size_divisor = 16
    max_prompt_tokens = 512
    model_fn = model_fn_ernie_image
    num_timesteps = 1000
    prompt_id = "ernie_image/prompt/1"
    latents_id = "ernie_image/latents/1"
    prompt_width = "text_in_dim"
    default_target_modules = (*_ATTENTION, "gate_proj", "up_proj", "linear_fc2")
    target_sets: ClassVar[TargetSets] = {"attention": _ATTENTION, "all": default_target_modules}

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        # The pipeline has no argument for it.
        pipeline.tokenizer.model_max_length = self.max_prompt_tokens
        rows_ld = pipeline.encode_prompt([prompt.text for prompt in prompts], device)
        return [{"prompt_embeds": row_ld.cpu()} for row_ld in rows_ld]

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        return encode_patched_latents(vae, pixels, eps=_NORM_EPS)

    def prompt_argument(self, prompt: Conditioning, like: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds": [prompt["prompt_embeds"].to(**like)]}

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        return {"use_pe": False}


def tiny() -> ErnieImagePipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of 32 channels; 32 latent channels at 1/8 size.
    """
    tokenizer = tokenizers.mistral_tokenizer()
    text_encoder = text_encoders.tiny_ministral3(tokenizer)
    with seeded(0):
        transformer = ErnieImageTransformer2DModel(
            hidden_size=32,
            num_attention_heads=2,
            num_layers=2,
            ffn_hidden_size=64,
            text_in_dim=text_encoder.config.text_config.hidden_size,
            rope_axes_dim=(4, 6, 6),
        )
        # The class starts them at zero, where a wrong use of them would not show.
        for layer in (transformer.adaLN_modulation[-1], transformer.final_linear):
            layer.reset_parameters()
    return ErnieImagePipeline(
        # As in the base model's repository: a fixed shift.
        scheduler=FlowMatchEulerDiscreteScheduler(shift=4.0),
        vae=autoencoders.tiny_flux2_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
