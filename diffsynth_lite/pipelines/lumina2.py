"""This file trains Lumina-Image 2.0 (text to image), and models made from it such as NetaYume Lumina.

Layouts: b batch, c latent channels, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_lumina2.py`` and ``pipeline_lumina2.py``; the model is arXiv 2503.21758.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
)
from transformers import Gemma2Model

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, Original, renamed, renamed_in, under
from diffsynth_lite.lora.shared_names import QKV
from diffsynth_lite.lora.spelling import JOINED_IN_COMFYUI
from diffsynth_lite.media import Prompt, RecordKind
from diffsynth_lite.pipelines.base.diffusers_components import assemble
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import Conditioning, TargetSets
from diffsynth_lite.pipelines.base.model_function import (
    Checkpointing,
    checkpointed,
    model_function,
    padded_together,
    without_padding,
)
from diffsynth_lite.releases.components import FLUX_VAE, SD_SCRIPTS, flow_euler
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_GATED = under("feed_forward", ("linear_1", "linear_2", "linear_3"))


@model_function
def model_fn_lumina2(
    transformer: torch.nn.Module,
    latents_bchw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    prompt_embeds_mask: torch.Tensor | None = None,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of Lumina 2, each transformer block run by the gradient engine.

    Args:
        transformer: a ``Lumina2Transformer2DModel``, plain or wrapped by DDP.
        latents_bchw: (B, 16, H, W), noisy normalised latents, H and W even.
        timestep: (B,), in [0, 1] and reversed: 0 is pure noise, 1 is none.
        prompt_embeds_bld: (B, L, D) prompt embeddings, padded on the right, L at most 300.
        prompt_embeds_mask: (B, L), 1 for a token and 0 for padding; None when no prompt is padded.

    Returns:
        (B, 16, H, W), what the model predicts, which is ``latents - noise``.
    """
    if prompt_embeds_mask is None:
        # The model counts its tokens, and a mask on meta has none.
        device = torch.device("cpu") if latents_bchw.is_meta else latents_bchw.device
        prompt_embeds_mask = torch.ones(prompt_embeds_bld.shape[:2], dtype=torch.bool, device=device)
    with checkpointed(Lumina2, transformer, gradient_checkpoint_forward, **checkpointing):
        predicted_bchw: torch.Tensor = transformer(
            hidden_states=latents_bchw,
            timestep=timestep,
            encoder_hidden_states=prompt_embeds_bld,
            encoder_attention_mask=prompt_embeds_mask,
            return_dict=False,
        )[0]
    return predicted_bchw


_HUB = "Alpha-VLLM/Lumina-Image-2.0 on the hub, "
_TRANSFORMER = ReleaseComponent(
    "Lumina2Transformer2DModel",
    {"cap_feat_dim": 2304},
    dtype="float32",
    source=f"{_HUB}transformer/config.json; dtype from the bytes of its two shards",
)
_GEMMA2_2B = ReleaseComponent(
    "Gemma2Model",
    dtype="float32",
    source=f"{_HUB}Gemma 2 2B, the defaults of the class; dtype from the bytes of its three shards",
)
_BASE = Release(
    name="Lumina-Image 2.0",
    hub_id="Alpha-VLLM/Lumina-Image-2.0",
    pipeline_class="Lumina2Pipeline",
    components={
        "transformer": _TRANSFORMER,
        "text_encoder": _GEMMA2_2B,
        "vae": replace(
            FLUX_VAE, dtype="float32", source=f"{FLUX_VAE.source}; here from the bytes: {_HUB}vae"
        ),
    },
    scheduler=flow_euler(6.0, f"{_HUB}scheduler/scheduler_config.json"),
    tokenizers={"tokenizer": ReleaseTokenizer("GemmaTokenizerFast", ("tokenizer.json", "tokenizer.model"))},
    size=(1024, 1024, 1),
    parameters=2.6e9,
    licence="Apache-2.0",
    gated=False,
    architecture="lumina-2",
    version="lumina2",
    sources={
        "pipeline": f"{_HUB}its lists of files; class of the tokenizer as in neta-art/Neta-Lumina-diffusers",
        "size": "defaults of the pipeline",
        "parameters": "Alpha-VLLM/Lumina-Image-2.0 on GitHub, README.md",
        "licence": f"{_HUB}its card",
        "architecture": f"{SD_SCRIPTS}sai_model_spec.py, lumina_util.py",
    },
)
_NETAYUME = _BASE.but(
    "NetaYume Lumina 4.0",
    "duongve/NetaYume-Lumina-Image-2.0-Diffusers-v40",
    transformer=replace(_TRANSFORMER, dtype=None),
    text_encoder=replace(_GEMMA2_2B, dtype=None),
    licence="Apache-2.0; made from Neta Lumina, of the Fair AI Public License 1.0-SD",
    gated=None,
    sources={
        "pipeline": "as of Lumina-Image 2.0, which its card says it is made from",
        "licence": "a public list of models by the licences of their cards, of "
        "duongve/NetaYume-Lumina-Image-2.0; the card of a fork of neta-art/Neta-Lumina",
    },
    unconfirmed=(
        "its licence",
        "dtypes of the weights",
        "settings of the scheduler",
        "files of the tokenizer",
    ),
)


_BLOCKS = ("noise_refiner.*", "layers.*", "context_refiner.*")
_OF_BLOCKS = {
    "attention.out": "attn.to_out.0",
    **{f"feed_forward.w{number}": f"feed_forward.linear_{number}" for number in (1, 2, 3)},
}
_KOHYA = {
    # 24 heads of queries, 8 of keys and 8 of values.
    **{f"{block}.attention.qkv": Original(under(f"{block}.attn", QKV), rows=(3, 1, 1)) for block in _BLOCKS},
    **renamed_in({block: block for block in _BLOCKS}, _OF_BLOCKS),
    **{f"{block}.adaLN_modulation.1": renamed(f"{block}.norm1.linear") for block in _BLOCKS[:2]},
    "final_layer.adaLN_modulation.1": renamed("norm_out.linear_1"),
    "final_layer.linear": renamed("norm_out.linear_2"),
    "t_embedder.mlp.0": renamed("time_caption_embed.timestep_embedder.linear_1"),
    "t_embedder.mlp.2": renamed("time_caption_embed.timestep_embedder.linear_2"),
    "cap_embedder.1": renamed("time_caption_embed.caption_embedder.1"),
}
_LORA_LAYERS = LayerNames(
    layers=(*(layer for place in _KOHYA.values() for layer in place.layers), "x_embedder"), kohya=_KOHYA
)


class Lumina2(DiffusersFamily):
    """Lumina-Image 2.0 and NetaYume Lumina, from text.

    30 single-stream blocks, Gemma 2 prompts, the autoencoder of FLUX.1: 16 channels at 1/8 size.

    Two blocks refine the prompt only, two the image only, and 26 see both. No layer of the last block is
    unused: text and image share its weights.

    The system prompt of diffusers' pipeline is put before a prompt, and counts among its 256 tokens; a
    negative prompt and a dropped caption get none, as in the training of its authors. Write none into
    captions: it would come second. Where the LoRA is used by another program, such as ComfyUI, put the same
    before the prompt. Guides to Neta Lumina and NetaYume have another one, of "anime images"; there is no
    setting for it here.

    The sampler's shift is 6. The authors train a logit-normal density with a shift that grows with the image,
    3.16 at 1024 x 1024 pixels (``transport/transport.py`` in their repository), and so does diffusion-pipe
    with ``lumina_shift``. diffusers' training script takes the shift of 6 for levels counted from the other
    end: it trains mostly on little noise.

    ComfyUI has one layer for queries, keys and values, and no names for a LoRA on each of them: it takes what
    ``diffsynth-lite convert --to comfyui`` makes of the file.

    Images are at most 8192 pixels on a side: the model has positions for no more.
    """

    pipelines = (Lumina2Pipeline,)
    releases = (_BASE, _NETAYUME)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image": "lumina2_lora.yaml"}
    transformer_class = Lumina2Transformer2DModel
    lora_spelling = JOINED_IN_COMFYUI
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    encoder_classes: ClassVar[Mapping[str, Any]] = {"text_encoder": Gemma2Model, "vae": AutoencoderKL}
    block_lists = ("context_refiner", "noise_refiner", "layers")
    # diffusers 0.42.1 runs the refiners without it.
    blocks_by_hook = False
    size_divisor = 16
    max_prompt_tokens = 256
    patch = 2
    model_fn = model_fn_lumina2
    is_reversed = True
    prompt_id = "lumina2/prompt/1"
    latents_id = "lumina2/latents/1"
    prompt_width = "cap_feat_dim"
    default_target_modules = (*_ATTENTION, *_GATED)
    target_sets: ClassVar[TargetSets] = {
        "attention": _ATTENTION,
        "all": (*default_target_modules, "norm1.linear"),
    }

    @property
    def prompt_template(self) -> Any:
        return _before_prompts()

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        rows: dict[int, torch.Tensor] = {}
        for is_negative in (False, True):
            places = [at for at, prompt in enumerate(prompts) if prompt.is_negative == is_negative]
            if not places:
                continue
            texts = [prompts[at].text for at in places]
            encoded = pipeline.encode_prompt(
                texts,
                do_classifier_free_guidance=is_negative,
                negative_prompt=texts,
                device=device,
                max_sequence_length=self.max_prompt_tokens,
            )
            embeds_bld, mask = encoded[2:] if is_negative else encoded[:2]
            rows.update(zip(places, without_padding(embeds_bld, mask), strict=True))
        return [{"prompt_embeds": rows[at]} for at in range(len(prompts))]

    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        return super().prompt_lengths([f"{_before_prompts()}{text}" for text in texts])

    def prompt_arguments(
        self, prompts: Mapping[str, Conditioning], like: Mapping[str, Any]
    ) -> dict[str, Any]:
        # The pipeline wants both of one length.
        return padded_together(prompts, "prompt_attention_mask", like)


def _before_prompts() -> str:
    """What the pipeline puts before a prompt by default."""
    return f"{assemble(Lumina2Pipeline).system_prompt} <Prompt Start> "


def tiny() -> Lumina2Pipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of each kind, of 96 channels in three heads of queries and one of keys; 16 latent channels at
    1/8 size with the real model's statistics.
    """
    tokenizer = tokenizers.gemma_tokenizer(words=_before_prompts().split())
    text_encoder = text_encoders.tiny_gemma2(tokenizer)
    with seeded(0):
        transformer = Lumina2Transformer2DModel(
            hidden_size=96,
            num_layers=2,
            num_refiner_layers=2,
            num_attention_heads=3,
            num_kv_heads=1,
            multiple_of=32,
            axes_dim_rope=(8, 12, 12),
            cap_feat_dim=text_encoder.config.hidden_size,
        )
    return Lumina2Pipeline(
        # As in the released folder: a fixed shift.
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=autoencoders.tiny_flux_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
