"""This file trains Sana (text to image): Sana 1.0 and Sana 1.5.

Layouts: b batch, c latent channels, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``sana_transformer.py`` and ``pipeline_sana.py``; Sana 1.0 is arXiv 2410.10629.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Unpack

import torch
from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel
from transformers import Gemma2Model

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, under
from diffsynth_lite.lora.shared_names import ATTENTIONS, DOUBLE, EMBEDDER
from diffsynth_lite.lora.spelling import taken_by_comfyui
from diffsynth_lite.media import Prompt, RecordKind
from diffsynth_lite.pipelines.base.diffusers_components import assemble
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import Conditioning, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.model_function import (
    Checkpointing,
    checkpointed,
    model_function,
    padded_together,
    without_padding,
)
from diffsynth_lite.releases.components import DIFFUSERS, LICENCES, ONE_TRAINER
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers


@model_function
def model_fn_sana(
    transformer: torch.nn.Module,
    latents_bchw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    prompt_embeds_mask: torch.Tensor | None = None,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of Sana, each transformer block run by the gradient engine.

    Args:
        transformer: a ``SanaTransformer2DModel``, plain or wrapped by DDP.
        latents_bchw: (B, 32, H, W), noisy normalised latents; each is a token.
        timestep: (B,), in [0, 1000 * ``timestep_scale``] of the transformer's settings.
        prompt_embeds_bld: (B, L, D) prompt embeddings, padded on the right.
        prompt_embeds_mask: (B, L), 1 for a token and 0 for padding; None when no prompt is padded.

    Returns:
        (B, 32, H, W), the predicted velocity ``noise - latents``.
    """
    with checkpointed(Sana, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bchw: torch.Tensor = transformer(
            hidden_states=latents_bchw,
            timestep=timestep,
            encoder_hidden_states=prompt_embeds_bld,
            encoder_attention_mask=prompt_embeds_mask,
            return_dict=False,
        )[0]
    return velocity_bchw


_SCRIPT = f"{DIFFUSERS}scripts/convert_sana_to_diffusers.py"
_DOCS = f"{DIFFUSERS}docs/source/en/api/pipelines/sana.md"
_HUB = "Efficient-Large-Model"


def _transformer(name: str, config: Mapping[str, Any]) -> ReleaseComponent:
    return ReleaseComponent("SanaTransformer2DModel", config, source=f"`{name}` in {_SCRIPT}")


def _in_float32(component: ReleaseComponent) -> ReleaseComponent:
    """Of Sana 1.0, whose plain files are next to those of a variant."""
    return replace(
        component, dtype="float32", source=f"{component.source}; dtype of the plain files as in {_DOCS}"
    )


_SMALL = {
    "cross_attention_dim": 1152,
    "cross_attention_head_dim": 72,
    "num_attention_heads": 36,
    "num_cross_attention_heads": 16,
    "num_layers": 28,
}
_1600M = Release(
    name="Sana 1.0 1.6B",
    hub_id=f"{_HUB}/Sana_1600M_1024px_BF16_diffusers",
    pipeline_class="SanaPipeline",
    components={
        "transformer": _in_float32(_transformer("SanaMS_1600M_P1_D20", {})),
        "text_encoder": ReleaseComponent(
            "Gemma2Model",
            dtype="bfloat16",
            source=f"gemma-2-2b-it, which {_SCRIPT} loads in bfloat16: the defaults of the class",
        ),
        "vae": ReleaseComponent(
            "AutoencoderDC",
            {
                "downsample_block_type": "conv",
                "encoder_block_types": (*("ResBlock",) * 3, *("EfficientViTBlock",) * 3),
                "decoder_block_types": (*("ResBlock",) * 3, *("EfficientViTBlock",) * 3),
                "encoder_layers_per_block": (2, 2, 2, 3, 3, 3),
                "encoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
                "decoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
                "scaling_factor": 0.41407,
                "upsample_block_type": "interpolate",
            },
            dtype="float32",
            source=f"`dc-ae-f32c32-sana-1.0` in {DIFFUSERS}scripts/convert_dcae_to_diffusers.py; "
            f"{_SCRIPT} loads 1.1, whose settings were not found, in float32",
        ),
    },
    scheduler=ReleaseComponent(
        "DPMSolverMultistepScheduler",
        {"flow_shift": 3.0, "prediction_type": "flow_prediction", "use_flow_sigmas": True},
        source=_SCRIPT,
    ),
    tokenizers={"tokenizer": ReleaseTokenizer("GemmaTokenizerFast", ("tokenizer.json",))},
    size=(1024, 1024, 1),
    parameters=1.6e9,
    variants=("bf16",),
    licence="Apache-2.0",
    gated=None,
    architecture="sana",
    sources={
        "pipeline": f"{_SCRIPT}; variants: {_DOCS}",
        "size": "its name",
        "parameters": "its name",
        "licence": LICENCES,
        "architecture": f"{ONE_TRAINER}sana-lora.json",
    },
    unconfirmed=(
        "settings of the autoencoder",
        "class and files of the tokenizer",
    ),
)
_600M = _1600M.but(
    "Sana 1.0 0.6B",
    f"{_HUB}/Sana_600M_1024px_diffusers",
    transformer=_in_float32(_transformer("SanaMS_600M_P1_D28", _SMALL)),
    parameters=0.6e9,
    variants=("fp16",),
)
_15_1600M = _1600M.but(
    "Sana 1.5 1.6B",
    f"{_HUB}/SANA1.5_1.6B_1024px_diffusers",
    transformer=_transformer("SanaMS1.5_1600M_P1_D20", {"qk_norm": "rms_norm_across_heads"}),
    variants=(),
    unconfirmed=(*_1600M.unconfirmed, "dtype of the transformer"),
)
_15_4800M = _15_1600M.but(
    "Sana 1.5 4.8B",
    f"{_HUB}/SANA1.5_4.8B_1024px_diffusers",
    transformer=_transformer(
        "SanaMS1.5_4800M_P1_D60", {"num_layers": 60, "qk_norm": "rms_norm_across_heads"}
    ),
    parameters=4.8e9,
)


_TIME = ("time_embed.emb.timestep_embedder.linear_1", "time_embed.emb.timestep_embedder.linear_2")
_CAPTIONS = under("caption_projection", EMBEDDER)
_LORA_LAYERS = LayerNames(
    layers=(
        *under(DOUBLE, (*ATTENTIONS, "ff.conv_inverted", "ff.conv_depth", "ff.conv_point")),
        *(*_TIME, "time_embed.linear", *_CAPTIONS, "patch_embed.proj", "proj_out"),
    )
)


class Sana(DiffusersFamily):
    """Sana 1.0 and 1.5, from text.

    20 to 60 blocks of linear attention, Gemma 2 prompts, a VAE with 32 channels at 1/32 size.

    Sana 1.0 (0.6B, 1.6B; 512 to 4096 pixels) and 1.5 (1.6B, 4.8B). Sana Sprint, of another pipeline, is
    refused: it is distilled, and takes a guidance scale.

    A prompt is put in lower case, after the instruction of the pipeline's call; a negative prompt and a
    dropped caption get none. The feed-forward layers are convolutions, which get no LoRA.

    The sampler's shift is 3 in diffusers' conversions, and 6 in that of 4096 pixels. Sana's own training at
    1024 pixels has 3, too, with a density around the middle (``configs/sana_config`` in its repository).
    """

    pipelines = (SanaPipeline,)
    releases = (_600M, _1600M, _15_1600M, _15_4800M)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image": "sana_lora.yaml"}
    transformer_class = SanaTransformer2DModel
    lora_spelling = taken_by_comfyui(but=("",))
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    encoder_classes: ClassVar[Mapping[str, Any]] = {"text_encoder": Gemma2Model, "vae": AutoencoderDC}
    block_lists = ("transformer_blocks",)
    unused_matmuls = ("ff.conv_point",)
    size_divisor = 32
    max_prompt_tokens = 300
    model_fn = model_fn_sana
    num_timesteps = 1000
    prompt_id = "sana/prompt/2"
    latents_id = "sana/latents/1"
    prompt_width = "caption_channels"
    default_target_modules = ("to_q", "to_k", "to_v", "to_out.0")
    # What follows attention in its blocks are convolutions.
    target_sets: ClassVar[TargetSets] = dict.fromkeys(("attention", "all"), default_target_modules)

    @property
    def prompt_template(self) -> Any:
        return _instruction()

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        rows: dict[int, torch.Tensor] = {}
        for is_negative, instruction in ((False, _instruction()), (True, None)):
            places = [at for at, prompt in enumerate(prompts) if prompt.is_negative == is_negative]
            if not places:
                continue
            embeds_bld, mask, _, _ = pipeline.encode_prompt(
                [prompts[at].text for at in places],
                do_classifier_free_guidance=False,
                device=device,
                max_sequence_length=self.max_prompt_tokens,
                complex_human_instruction=instruction,
            )
            rows.update(zip(places, without_padding(embeds_bld, mask), strict=True))
        return [{"prompt_embeds": rows[at]} for at in range(len(prompts))]

    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        return super().prompt_lengths(assemble(self.pipeline)._text_preprocessing(list(texts)))

    @cached_property
    def _timestep_scale(self) -> float:
        # A folder saved by an older diffusers lacks it.
        return float(self.folder.component_config("transformer").get("timestep_scale", 1.0))

    def timestep(self, sigma: torch.Tensor, like: Mapping[str, Any]) -> torch.Tensor:
        return super().timestep(sigma, like) * self._timestep_scale

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        return {"use_resolution_binning": False}

    def prompt_arguments(
        self, prompts: Mapping[str, Conditioning], like: Mapping[str, Any]
    ) -> dict[str, Any]:
        # The pipeline wants both of one length.
        return padded_together(prompts, "prompt_attention_mask", {"device": like["device"]})

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        # Else it generates the nearest of a list of sizes, and scales and crops that.
        own = {"negative_prompt": None, **self.usage_arguments(request)}
        return super().call_arguments(pipeline, request) | own


def _instruction() -> list[str]:
    """The instruction that the pipeline's call puts before a prompt by default."""
    lines: list[str] = (
        inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
    )
    return lines


def tiny() -> SanaPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of 16 channels; 32 latent channels at 1/32 size with the real model's scale. The sampler is set
    as that of the released models.
    """
    tokenizer = tokenizers.gemma_tokenizer(words=[word for line in _instruction() for word in line.split()])
    text_encoder = text_encoders.tiny_gemma2(tokenizer)
    with seeded(0):
        transformer = SanaTransformer2DModel(
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=8,
            num_cross_attention_heads=2,
            cross_attention_head_dim=8,
            cross_attention_dim=16,
            caption_channels=text_encoder.config.hidden_size,
        )
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=autoencoders.tiny_dc_vae(),
        transformer=transformer,
        scheduler=DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )
