"""This file trains Chroma (text to image), made from FLUX.1 schnell: T5 prompts only, and a mask for them.

Layouts: b batch, c latent channels, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_chroma.py`` and ``pipeline_chroma.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch
from diffusers import AutoencoderKL, ChromaPipeline, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler
from transformers import T5EncoderModel

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.lora import shared_names as shared
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, renamed_in, under
from diffsynth_lite.lora.spelling import taken_by_comfyui
from diffsynth_lite.media import RecordKind
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import Conditioning, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.model_function import Checkpointing, checkpointed, model_function
from diffsynth_lite.pipelines.flux import SINGLE_STREAM, Flux, pack_images, unpack_image
from diffsynth_lite.releases import components as known
from diffsynth_lite.releases.release import Release, ReleaseComponent
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers


@model_function
def model_fn_chroma(
    transformer: torch.nn.Module,
    latents_bchw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    prompt_embeds_mask: torch.Tensor | None = None,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of Chroma, each transformer block run by the gradient engine.

    Args:
        transformer: a ``ChromaTransformer2DModel``, plain or wrapped by DDP.
        latents_bchw: (B, 16, H, W), noisy normalised latents, H and W even.
        timestep: (B,), noise level in [0, 1].
        prompt_embeds_bld: (B, L, D) prompt embeddings of T5.
        prompt_embeds_mask: (B, L), 1 for a token that the model sees and 0 for others; None when it sees all.

    Returns:
        (B, 16, H, W), the predicted velocity ``noise - latents``.
    """
    height, width = latents_bchw.shape[-2:]
    tokens_bld, positions = pack_images([latents_bchw])
    mask = None
    if prompt_embeds_mask is not None:
        # Truth values: torch adds numbers to the attention's scores, which hides nothing.
        of_image = torch.ones(tokens_bld.shape[:2], dtype=torch.bool, device=tokens_bld.device)
        mask = torch.cat([prompt_embeds_mask.bool(), of_image], dim=1)
    with checkpointed(Chroma, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bld = transformer(
            hidden_states=tokens_bld,
            timestep=timestep,
            encoder_hidden_states=prompt_embeds_bld,
            txt_ids=torch.zeros(prompt_embeds_bld.shape[1], 3, device=latents_bchw.device),
            img_ids=positions,
            attention_mask=mask,
            return_dict=False,
        )[0]
    return unpack_image(velocity_bld, height, width)


_REVIEW = "MoDiff, data/chroma1-hd-artifact-review.json"

_HD = Release(
    name="Chroma1 HD",
    hub_id="lodestones/Chroma1-HD",
    pipeline_class="ChromaPipeline",
    components={
        "transformer": ReleaseComponent(
            "ChromaTransformer2DModel",
            dtype="bfloat16",
            source=f"{known.SDNEXT}chroma/transformer: the class's defaults; dtype from the bytes in "
            f"{_REVIEW}",
        ),
        "text_encoder": known.T5_XXL,
        "vae": known.FLUX_VAE,
    },
    scheduler=ReleaseComponent(
        "FlowMatchEulerDiscreteScheduler",
        {"shift": 3.0, "use_dynamic_shifting": True},
        source=f"{known.SDNEXT}chroma/scheduler",
    ),
    tokenizers={"tokenizer": known.T5_TOKENIZER_SLOW},
    size=(1024, 1024, 1),
    parameters=8.9e9,
    licence="Apache-2.0",
    gated=False,
    architecture="chroma",
    version="chroma",
    sources={
        "pipeline": f"{known.SDNEXT}chroma/model_index.json",
        "size": "`default_sample_size` of the pipeline",
        "parameters": "diffusers, docs/source/en/api/pipelines/chroma.md",
        "licence": _REVIEW,
        "architecture": f"{known.SD_SCRIPTS}sai_model_spec.py, flux_utils.py",
    },
    unconfirmed=(
        "shift of the scheduler: in another copy, in stable-diffusion-webui-forge, it is fixed, and 1",
    ),
)
_BASE = _HD.but(
    "Chroma1 Base",
    "lodestones/Chroma1-Base",
    sources={"licence": known.LICENCES},
    unconfirmed=(*_HD.unconfirmed, "that its settings and dtypes are those of HD"),
)


_LORA_LAYERS = LayerNames(
    layers=(
        *under(shared.DOUBLE, (*shared.JOINT_ATTENTION, *shared.FLUX_FEED_FORWARD)),
        *under(shared.SINGLE, shared.FLUX_SINGLE),
        *under("distilled_guidance_layer", ("in_proj", "out_proj", *under("layers.*", shared.EMBEDDER))),
        *("x_embedder", "context_embedder", "proj_out"),
    ),
    kohya={
        **shared.FLUX_BLOCKS,
        **renamed_in(
            {"distilled_guidance_layer.layers.*": "distilled_guidance_layer.layers.*"},
            shared.ORIGINAL_EMBEDDER,
        ),
    },
)


class Chroma(DiffusersFamily):
    """Chroma1 Base and HD, from text.

    19 dual-stream and 38 single-stream blocks as in FLUX.1, T5 prompts, 16 channels at 1/8 size. It knows no
    guidance scale: previews are guided by the negative prompt. No layer of the last block is unused.

    diffusers 0.42.1 has one transformer of Chroma. Its pipelines that start from an image
    (``ChromaImg2ImgPipeline``, ``ChromaInpaintPipeline``) use the same weights and give the model the same
    inputs, so a LoRA trained here works in them, too. Chroma1-Radiance, which works on pixels without an
    autoencoder, has no class there, and is not covered.

    The model sees the tokens of its prompt and one of the padding after them, as in its own training. The
    rest of the padding is cut away, so that prompts of one length need no mask. ``ChromaPipeline`` of
    diffusers 0.42 hides none of it: its mask is of numbers, which torch adds to the attention's scores
    (diffusers issue 12116). Previews see what training sees; to generate the same elsewhere, give the
    pipeline what its ``encode_prompt`` returns, with ``prompt_attention_mask.bool()``, and so for the
    negative prompt.

    Copies of its scheduler's file differ: in SD.Next's the shift grows with the image, as in FLUX.1 dev, and
    in that of stable-diffusion-webui-forge there is none. ``diffsynth-lite doctor`` shows the noise levels
    that a folder's file gives.
    """

    pipelines = (ChromaPipeline,)
    releases = (_HD, _BASE)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image": "chroma_lora.yaml"}
    transformer_class = ChromaTransformer2DModel
    lora_spelling = taken_by_comfyui(but=("distilled_guidance_layer",))
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    encoder_classes: ClassVar[Mapping[str, Any]] = {"text_encoder": T5EncoderModel, "vae": AutoencoderKL}
    block_lists = Flux.block_lists
    unused_matmuls = Flux.unused_matmuls
    sequence_split = Flux.sequence_split
    size_divisor = 16
    patch = Flux.patch
    max_prompt_tokens = 512
    model_fn = model_fn_chroma
    prompt_id = "chroma/prompt/1"
    latents_id = "flux/latents/1 ChromaPipeline"
    # Text positions are all zero, so that what is hidden adds nothing to any output.
    prompt_outputs = ("prompt_embeds", "", "mask")
    prompt_width = "joint_attention_dim"
    blocks_by_hook = False  # with it, diffusers 0.42 calls the single-stream blocks without the mask
    default_target_modules = Flux.default_target_modules
    # Its blocks have no modulation of their own: one network makes that of all.
    target_sets: ClassVar[TargetSets] = {
        "attention": Flux.target_sets["attention"],
        "all": (*Flux.default_target_modules, *SINGLE_STREAM),
    }

    def usage_setup(self, request: PreviewRequest) -> Sequence[str]:
        return (
            "# A mask of numbers hides no padding (diffusers issue 12116).",
            "def hide_padding(_model, inputs, named):",
            '    return inputs, named | {"attention_mask": named["attention_mask"].bool()}',
            "pipeline.transformer.register_forward_pre_hook(hide_padding, with_kwargs=True)",
        )

    def prompt_argument(self, prompt: Conditioning, like: Mapping[str, Any]) -> dict[str, Any]:
        """All of its embeddings are seen."""
        embeds_bld = prompt["prompt_embeds"][None].to(**like)
        mask = torch.ones(embeds_bld.shape[:2], dtype=torch.bool, device=like["device"])
        return {"prompt_embeds": embeds_bld, "prompt_attention_mask": mask}

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        return super().call_arguments(pipeline, request) | {"max_sequence_length": self.max_prompt_tokens}


def tiny() -> ChromaPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of each kind, of 32 channels; 16 latent channels at 1/8 size with the real model's statistics.
    """
    tokenizer = tokenizers.t5_tokenizer()
    text_encoder = text_encoders.tiny_t5(tokenizer)
    with seeded(0):
        transformer = ChromaTransformer2DModel(
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=text_encoder.config.d_model,
            axes_dims_rope=(4, 6, 6),
            approximator_hidden_dim=32,
            approximator_layers=2,
        )
    return ChromaPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=autoencoders.tiny_flux_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
