"""This file trains FLUX.2, dev and klein: images from text only, and with images to start from.

Layouts: b batch, c channels of a token (32 latent channels of 2 x 2 places), h and w height and width in
tokens; l tokens, d channels.
Sources: diffusers ``transformer_flux2.py``, ``pipeline_flux2.py`` and ``pipeline_flux2_klein.py``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Unpack

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from diffusers.pipelines.flux2.pipeline_flux2 import SYSTEM_MESSAGE, compute_empirical_mu, format_input
from transformers import Mistral3ForConditionalGeneration, Qwen3ForCausalLM

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.core.parallel import SequenceSplit
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import shared_names as shared
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, renamed, renamed_in, under
from diffsynth_lite.lora.spelling import taken_by_comfyui
from diffsynth_lite.media import Media, RecordKind
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily, exponential_shift
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.latents import encode_latents
from diffsynth_lite.pipelines.base.mixins import EditInputs
from diffsynth_lite.pipelines.base.model_function import (
    INPUT,
    Checkpointing,
    checkpointed,
    model_function,
    stack_inputs,
)
from diffsynth_lite.pipelines.base.preview_request import INPUT_IMAGE
from diffsynth_lite.releases import components as known
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

_PATCH = 2
_ATTENTION = (
    *shared.JOINT_PROJECTIONS,
    # Of the single-stream blocks; each is also one half of their feed-forward part.
    *("to_qkv_mlp_proj", "to_out"),
)
# The shift of images up to 4,300 tokens depends on the number of steps, too: the pipelines' own.
_SAMPLING_STEPS = 50
_TRAINING_MU = 0.8
# Literals in the pipelines.
_LARGEST_INPUT = 1024 * 1024
_SHORTEST_SIDE, _LONGEST_RATIO = 64, 8


@model_function
def model_fn_flux2(
    transformer: torch.nn.Module,
    latents_bchw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    guidance: torch.Tensor | None = None,
    *,
    input_latents_bchw: Sequence[torch.Tensor] = (),
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of FLUX.2, each transformer block run by the gradient engine.

    Args:
        transformer: a ``Flux2Transformer2DModel``, plain or wrapped by DDP.
        latents_bchw: (B, 128, H, W), noisy normalised latents, one place a token.
        timestep: (B,), noise level in [0, 1].
        prompt_embeds_bld: (B, L, D) prompt embeddings, padded; there is no mask.
        guidance: (B,), guidance scale; None for models without ``guidance_embeds``.
        input_latents_bchw: each (B, 128, H_i, W_i), clean normalised latents of the images to start from.

    Returns:
        (B, 128, H, W), the predicted velocity ``noise - latents``.
    """
    images = (latents_bchw, *input_latents_bchw)
    # Of one sample: the model lays all samples of a batch out alike.
    positions = Flux2Pipeline._prepare_latent_ids(latents_bchw[:1])
    if input_latents_bchw:
        of_inputs = Flux2Pipeline._prepare_image_ids([latents[:1] for latents in input_latents_bchw])
        positions = torch.cat([positions, of_inputs], dim=1)
    with checkpointed(Flux2, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bld = transformer(
            hidden_states=torch.cat([Flux2Pipeline._pack_latents(image) for image in images], dim=1),
            timestep=timestep,
            guidance=guidance,
            encoder_hidden_states=prompt_embeds_bld,
            txt_ids=Flux2Pipeline._prepare_text_ids(prompt_embeds_bld[:1]).to(latents_bchw.device),
            img_ids=positions.to(latents_bchw.device),
            return_dict=False,
        )[0]
    noisy_bld: torch.Tensor = velocity_bld[:, : latents_bchw[0, 0].numel()]
    return noisy_bld.transpose(1, 2).reshape(latents_bchw.shape)


_SCRIPT = f"{known.DIFFUSERS}scripts/convert_flux2_to_diffusers.py"
_REVIEW = "MoDiff, data/flux2-klein-base-4b-artifact-review.json"
_ARCHITECTURES = f"{known.MUSUBI}utils/sai_model_spec.py, dataset/architectures.py"
_SCHEDULER = replace(known.FLUX_SCHEDULER, source=f"that of FLUX.1 dev, as in {_SCRIPT}")


def _transformer(config: Mapping[str, Any], source: str) -> ReleaseComponent:
    return ReleaseComponent("Flux2Transformer2DModel", config, dtype="bfloat16", source=source)


_DEV = Release(
    name="FLUX.2 dev",
    hub_id="black-forest-labs/FLUX.2-dev",
    pipeline_class="Flux2Pipeline",
    components={
        "transformer": _transformer({}, f"`flux2-dev` in {_SCRIPT}: the defaults of the class"),
        "text_encoder": known.MISTRAL3_24B,
        "vae": known.FLUX2_VAE,
    },
    scheduler=_SCHEDULER,
    tokenizers={"tokenizer": ReleaseTokenizer("PixtralProcessor", ("tokenizer.json",))},
    size=(1024, 1024, 1),
    parameters=32e9,
    licence="FLUX Non-Commercial License",
    gated=True,
    architecture="Flux.2-dev",
    version="flux_2_dev",
    sources={
        "pipeline": known.PINNED_INDEXES,
        "size": "`default_sample_size` of the pipeline",
        "parameters": "black-forest-labs/flux2, README.md",
        "licence": known.LICENCES,
        "architecture": _ARCHITECTURES,
    },
    unconfirmed=("dtype of the transformer", "files of the tokenizer"),
)

_HEADS = {"guidance_embeds": False}
_KLEIN_4B_BASE = Release(
    name="FLUX.2 klein base 4B",
    hub_id="black-forest-labs/FLUX.2-klein-base-4B",
    pipeline_class="Flux2KleinPipeline",
    components={
        "transformer": _transformer(
            {
                **_HEADS,
                "joint_attention_dim": 7680,
                "num_attention_heads": 24,
                "num_layers": 5,
                "num_single_layers": 20,
            },
            f"`klein-4b` in {_SCRIPT}; dtype from the bytes in {_REVIEW}",
        ),
        "text_encoder": known.QWEN3_4B,
        "vae": known.FLUX2_VAE,
    },
    scheduler=_SCHEDULER,
    tokenizers={"tokenizer": known.QWEN2_TOKENIZER},
    size=(1024, 1024, 1),
    parameters=4e9,
    licence="Apache-2.0",
    gated=False,
    architecture="Flux.2-klein-4b",
    version="flux_2_klein_4b",
    sources={
        "pipeline": f"{known.PINNED_INDEXES}, for klein 4B; files: {_REVIEW}",
        "size": "`default_sample_size` of the pipeline",
        "parameters": "its name",
        "licence": _REVIEW,
        "architecture": _ARCHITECTURES,
    },
    unconfirmed=("settings of the scheduler",),
)
_KLEIN_9B_BASE = _KLEIN_4B_BASE.but(
    "FLUX.2 klein base 9B",
    "black-forest-labs/FLUX.2-klein-base-9B",
    transformer=_transformer(
        {
            **_HEADS,
            "joint_attention_dim": 12288,
            "num_attention_heads": 32,
            "num_layers": 8,
            "num_single_layers": 24,
        },
        f"`klein-9b` in {_SCRIPT}",
    ),
    text_encoder=known.QWEN3_8B,
    vae=known.FLUX2_VAE,
    parameters=9e9,
    licence="FLUX Non-Commercial License",
    gated=True,
    architecture="Flux.2-klein-9b",
    version="flux_2_klein_9b",
    sources={"licence": f"that of klein 9B: {known.LICENCES}"},
    unconfirmed=(*_KLEIN_4B_BASE.unconfirmed, "dtype of the transformer", "licence", "whether it is gated"),
)


def _distilled(base: Release, name: str) -> Release:
    return base.but(
        f"FLUX.2 {name}",
        f"black-forest-labs/FLUX.2-{name.replace(' ', '-')}",
        settings={"is_distilled": True},
        distilled="4 steps without guidance",
    )


_KLEIN_4B = _distilled(_KLEIN_4B_BASE, "klein 4B")
_KLEIN_9B = _distilled(_KLEIN_9B_BASE, "klein 9B")


_LORA_LAYERS = LayerNames(
    layers=(
        *under(shared.DOUBLE, shared.JOINT_ATTENTION),
        *under(
            shared.DOUBLE, ("ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out")
        ),
        *under(shared.SINGLE, ("attn.to_qkv_mlp_proj", "attn.to_out")),
        *under("time_guidance_embed.timestep_embedder", shared.EMBEDDER),
        *under("time_guidance_embed.guidance_embedder", shared.EMBEDDER),
        *("double_stream_modulation_img.linear", "double_stream_modulation_txt.linear"),
        *("single_stream_modulation.linear", "x_embedder", "context_embedder", "norm_out.linear", "proj_out"),
    ),
    kohya={
        **{
            name: place
            for name, place in shared.FLUX_BLOCKS.items()
            if "_mlp." not in name and "linear" not in name
        },
        "double_blocks.*.img_mlp.0": renamed(f"{shared.DOUBLE}.ff.linear_in", 6),
        "double_blocks.*.img_mlp.2": renamed(f"{shared.DOUBLE}.ff.linear_out"),
        "double_blocks.*.txt_mlp.0": renamed(f"{shared.DOUBLE}.ff_context.linear_in", 6),
        "double_blocks.*.txt_mlp.2": renamed(f"{shared.DOUBLE}.ff_context.linear_out"),
        "single_blocks.*.linear1": renamed(f"{shared.SINGLE}.attn.to_qkv_mlp_proj", 9),
        "single_blocks.*.linear2": renamed(f"{shared.SINGLE}.attn.to_out"),
        **renamed_in(
            {
                "time_in": "time_guidance_embed.timestep_embedder",
                "guidance_in": "time_guidance_embed.guidance_embedder",
            },
            shared.ORIGINAL_EMBEDDER,
        ),
        "double_stream_modulation_img.lin": renamed("double_stream_modulation_img.linear"),
        "double_stream_modulation_txt.lin": renamed("double_stream_modulation_txt.linear"),
        "single_stream_modulation.lin": renamed("single_stream_modulation.linear"),
        "final_layer.linear": renamed("proj_out"),
        "final_layer.adaLN_modulation.1": shared.LAST_NORM,
    },
)


class Flux2(EditInputs, DiffusersFamily):
    """FLUX.2 dev and klein (4B and 9B, base and distilled), from text and from reference images.

    Both generate images from text only or with any number of images to start from; a data set may hold both
    kinds of items. Inputs keep their shape; those above a megapixel are brought to one, and none is enlarged.

    Prompts are read by Mistral 3 in dev and by Qwen3 in klein, together with the chat around them: all 512
    tokens, padding too, which the model sees without a mask.

    dev takes a guidance scale: 1 in training, which asks for none, and that of the preview in previews. klein
    takes none: the base models run twice a step above a scale of 1, which is refused of the distilled ones.

    A distilled klein (4 steps) is best trained through its base model, whose LoRA it takes. The klein models
    with a cache of their inputs (KV) see these in another way and are refused.

    No layer of the last block is unused: the single-stream blocks use the same weights for text and image.
    """

    pipelines: ClassVar[tuple[Any, ...]] = (Flux2Pipeline, Flux2KleinPipeline)
    releases = (_DEV, _KLEIN_4B_BASE, _KLEIN_4B, _KLEIN_9B_BASE, _KLEIN_9B)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {
        "image": "flux2_lora.yaml",
        "edit": "flux2_klein_edit_lora.yaml",
    }
    transformer_class = Flux2Transformer2DModel
    lora_spelling = taken_by_comfyui(but=("time_guidance_embed", "double_stream_", "single_stream_"))
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    record_kinds = ("image", "edit")
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    unused_matmuls = ("ff.linear_out", "ff_context.linear_out", "attn.to_out")
    sequence_split = SequenceSplit(prompts="split")
    size_divisor = 16
    max_prompt_tokens = 512
    keeps_padding = True
    model_fn = model_fn_flux2
    latents_id = "flux2/latents/1"
    # dev's own tokenizer is a processor for images too, which needs torchvision; texts do without.
    prompt_outputs = ("prompt_embeds",)
    prompt_width = "joint_attention_dim"
    target_sets: ClassVar[TargetSets] = {
        "attention": _ATTENTION,
        "all": (*_ATTENTION, "linear_in", "linear_out"),
    }
    default_target_modules = target_sets["all"]

    def input_size(self, width: int, height: int, num_inputs: int = 1) -> tuple[int, int]:
        short, long = sorted((width, height))
        if short < _SHORTEST_SIDE or long > _LONGEST_RATIO * short:
            raise UserError(
                f"{width}x{height} pixels: an input image of this family has at least {_SHORTEST_SIDE} on "
                f"each side, and at most {_LONGEST_RATIO} times as many on one as on the other"
            )
        scale = min(1.0, math.sqrt(_LARGEST_INPUT / (width * height)))
        fitted_width, fitted_height = (
            int(side * scale) // self.size_divisor * self.size_divisor for side in (width, height)
        )
        return fitted_width, fitted_height

    @property
    def encoder_classes(self) -> Mapping[str, Any]:
        reader = Mistral3ForConditionalGeneration if self.takes_guidance else Qwen3ForCausalLM
        return {"text_encoder": reader, "vae": AutoencoderKLFlux2}

    @cached_property
    def takes_guidance(self) -> bool:
        """dev does, klein does not."""
        return self.pipeline is Flux2Pipeline

    def prompt_encoder_id(self, dtype: torch.dtype) -> str:
        parts = self.folder.fingerprints("text_encoder", "tokenizer")
        # dev's instruction is a part of diffusers, so that another version may bring another one.
        name = (
            f"{self.pipeline.__name__} {SYSTEM_MESSAGE!r}" if self.takes_guidance else self.pipeline.__name__
        )
        return f"flux2/prompt/1 {name} {parts} {dtype} {self.max_prompt_tokens}"

    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        """With the chat around each text, which counts too."""
        tokenizer = self.load_tokenizer()
        if self.takes_guidance:
            encoded = tokenizer.apply_chat_template(format_input(list(texts)))
        else:
            chats = [[{"role": "user", "content": text}] for text in texts]
            encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True, enable_thinking=False)
        return [len(tokens) for tokens in encoded["input_ids"]]

    def encode_given(self, pipeline: Any, item: Media) -> EncodedMedia:
        processor, encoded = pipeline.image_processor, {}
        for place, image in enumerate(item.inputs):
            width, height = self.input_size(*image.size)
            fitted = processor._resize_if_exceeds_area(image, _LARGEST_INPUT)
            pixels_bchw = processor.preprocess(fitted, height, width, resize_mode="crop")
            encoded[f"{INPUT}{place}"] = encode_latents(pipeline.vae, pixels_bchw)[0]
        return encoded

    def resolution_shift(self, latents_shape: Sequence[int]) -> float:
        """``exp(mu)`` of the formula in the pipelines, which reads no settings, for 50 steps.

        It grows up to 4,300 tokens (a little over 1024 x 1024 pixels), where it falls once, from 7.7 to 3.3,
        and grows again.
        """
        return exponential_shift(compute_empirical_mu(self.num_tokens(latents_shape), _SAMPLING_STEPS))

    def family_shift(self, latents_shape: Sequence[int]) -> float:
        """2.2 (mu 0.8) at any size.

        DiffSynth-Studio trains these models so, by its own word because it gives better results
        (``set_timesteps_flux2`` in ``flow_match.py``). The sampler's own shift, 7.6 at 1024 x 1024 pixels
        (``objective.shift: resolution``), leaves 12 % of the steps for noise levels below 0.5, where detail
        is learned. Others stay below it, too: diffusers' training scripts shift nothing, and ``flux2_shift``
        of musubi-tuner is FLUX.1's line, 1.9 at 512 x 512 and 3.2 at 1024 x 1024 pixels.
        """
        return math.exp(_TRAINING_MU)

    def earlier_shift(self, latents_shape: Sequence[int]) -> float:
        return super().family_shift(latents_shape)

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **super().model_inputs(conditioning, like),
            "guidance": self.guidance(conditioning, like),
            "input_latents_bchw": stack_inputs(conditioning, like),
        }

    @property
    def distilled(self) -> str | None:
        """klein with ``is_distilled`` in ``model_index.json``. Better train its base, whose LoRA it takes."""
        if not self.is_distilled:
            return None
        return "is_distilled in its model_index.json; better train its base, whose LoRA it takes"

    @property
    def pipeline_settings(self) -> Mapping[str, Any]:
        return {} if self.takes_guidance else {"is_distilled": self.is_distilled}

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        return {"image": INPUT_IMAGE} if request.inputs else {}

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        return super().call_arguments(pipeline, request) | {"image": list(request.inputs) or None}


def tiny() -> Flux2Pipeline:
    """A random, complete and small pipeline of the real classes (dev), built offline in a second.

    Two blocks of each kind, of 32 channels; 32 latent channels at 1/8 size.
    """
    tokenizer = tokenizers.mistral_tokenizer()
    text_encoder = text_encoders.tiny_mistral3(tokenizer)
    with seeded(0):
        transformer = Flux2Transformer2DModel(
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=3 * text_encoder.config.text_config.hidden_size,
            axes_dims_rope=(4, 4, 4, 4),
        )
    return Flux2Pipeline(
        # As in the released repositories; how large the shift is the pipelines compute themselves.
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=autoencoders.tiny_flux2_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
