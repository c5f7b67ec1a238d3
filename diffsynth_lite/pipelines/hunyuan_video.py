"""This file trains HunyuanVideo (text to video), the first version, of 13 billion parameters.

Layouts: b batch, c latent channels, f latent frames, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_hunyuan_video.py`` and ``pipeline_hunyuan_video.py``; for what other programs
call its layers, ``comfy/ldm/hunyuan_video/model.py`` of ComfyUI and ``single_file_utils.py`` of diffusers,
which has the names of Tencent's repository.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from transformers import CLIPTextModel, LlamaModel

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, fused, renamed, renamed_in, under
from diffsynth_lite.lora.shared_names import DOUBLE, EMBEDDER, JOINT_ATTENTION, ORIGINAL_EMBEDDER, QKV, SINGLE
from diffsynth_lite.lora.spelling import JOINED_IN_COMFYUI
from diffsynth_lite.media import RecordKind
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import Conditioning, TargetSets
from diffsynth_lite.pipelines.base.model_function import Checkpointing, checkpointed, mask_of, model_function
from diffsynth_lite.pipelines.flux import Flux
from diffsynth_lite.releases.components import CLIP_L, DIFFUSERS, MUSUBI, encoder_sizes, flow_euler
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

TEMPLATE: str = DEFAULT_PROMPT_TEMPLATE["template"]
"""The text around a prompt."""
_GUIDANCE_SCALE = 1000.0
"""What the model has a guidance scale multiplied by."""
# In full: the blocks of the token refiner have layers of the same names.
_ATTENTION = (
    *under(DOUBLE, JOINT_ATTENTION),
    *(f"{SINGLE}.attn.{layer}" for layer in QKV),
)
_FEED_FORWARD = (
    *(f"{DOUBLE}.{ff}.net.{end}" for ff in ("ff", "ff_context") for end in ("0.proj", "2")),
    *(f"{SINGLE}.{layer}" for layer in ("proj_mlp", "proj_out")),
)
_MODULATION = (f"{DOUBLE}.norm1.linear", f"{DOUBLE}.norm1_context.linear", f"{SINGLE}.norm.linear")


@model_function
def model_fn_hunyuan_video(
    transformer: torch.nn.Module,
    latents_bcfhw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    prompt_embeds_mask: torch.Tensor | None,
    pooled_prompt_embeds_bd: torch.Tensor,
    guidance: torch.Tensor | None = None,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of HunyuanVideo, each transformer block run by the gradient engine.

    The blocks that refine the prompt before them, two in the released model, are not: they are small.

    Args:
        transformer: a ``HunyuanVideoTransformer3DModel``, plain or wrapped by DDP.
        latents_bcfhw: (B, 16, F, H, W), noisy normalised latents, H and W even.
        timestep: (B,), in [0, 1000].
        prompt_embeds_bld: (B, L, 4096) prompt embeddings of Llama, padded on the right.
        prompt_embeds_mask: (B, L), 1 for a token and 0 for padding; None when no prompt is padded.
        pooled_prompt_embeds_bd: (B, 768) prompt embeddings of CLIP.
        guidance: (B,), guidance scale times 1000; None for models without ``guidance_embeds``.

    Returns:
        (B, 16, F, H, W), the predicted velocity ``noise - latents``.
    """
    with checkpointed(HunyuanVideo, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bcfhw: torch.Tensor = transformer(
            hidden_states=latents_bcfhw,
            timestep=timestep,
            encoder_hidden_states=prompt_embeds_bld,
            encoder_attention_mask=mask_of(prompt_embeds_bld, prompt_embeds_mask),
            pooled_projections=pooled_prompt_embeds_bd,
            guidance=guidance,
            return_dict=False,
        )[0]
    return velocity_bcfhw


_SCRIPT = f"{DIFFUSERS}scripts/convert_hunyuan_video_to_diffusers.py"

T2V = Release(
    name="HunyuanVideo",
    hub_id="hunyuanvideo-community/HunyuanVideo",
    pipeline_class="HunyuanVideoPipeline",
    components={
        "transformer": ReleaseComponent(
            "HunyuanVideoTransformer3DModel", dtype="bfloat16", source=f"{_SCRIPT}: the defaults of the class"
        ),
        "text_encoder": ReleaseComponent(
            "LlamaModel",
            encoder_sizes(4096, 14336, 32, 32, 8, 128320),
            dtype="float16",
            source="the language model of xtuner/llava-llama-3-8b-v1_1-transformers, as "
            f"{MUSUBI}hunyuan_model/text_encoder.py has its numbers and {_SCRIPT} its dtype",
        ),
        "text_encoder_2": replace(CLIP_L, dtype="float16", source=f"{CLIP_L.source}; dtype as in {_SCRIPT}"),
        "vae": ReleaseComponent("AutoencoderKLHunyuanVideo", source=f"{_SCRIPT}: the defaults of the class"),
    },
    scheduler=flow_euler(7.0, _SCRIPT),
    tokenizers={
        "tokenizer": ReleaseTokenizer("LlamaTokenizerFast"),
        "tokenizer_2": ReleaseTokenizer("CLIPTokenizer"),
    },
    size=(1280, 720, 129),
    parameters=13e9,
    licence="Tencent Hunyuan Community, not for the EU, the UK and South Korea",
    gated=None,
    architecture="hunyuan-video",
    sources={
        "pipeline": f"{_SCRIPT}; hub id and tokenizers as {DIFFUSERS}src/diffusers/pipelines/hunyuan_video/"
        "pipeline_hunyuan_video.py has them",
        "size": "defaults of the pipeline's call",
        "parameters": "the abstract of the paper, arXiv 2412.03603",
        "licence": "Tencent/HunyuanVideo, LICENSE.txt",
        "architecture": f"{MUSUBI}utils/sai_model_spec.py",
    },
    unconfirmed=("dtype of the autoencoder",),
)


OTHER_DOUBLE = "double_blocks.*"
"""What Tencent's repository and ComfyUI call the blocks, which are those of FLUX.1."""
_REFINER, _OTHER_REFINER = (
    "context_embedder.token_refiner.refiner_blocks.*",
    "txt_in.individual_token_refiner.blocks.*",
)
_TEXT, _OTHER_TEXT = "context_embedder.time_text_embed", "txt_in"
_OF_FLUX = Flux.lora_layers["transformer"]
DOUBLE_LAYERS = tuple(layer for layer in _OF_FLUX.layers if layer.startswith(DOUBLE))
MLP = {"mlp.0": "linear_1", "mlp.2": "linear_2"}
BLOCKS_IN_COMFYUI = {
    **{
        name: place
        for name, place in _OF_FLUX.kohya.items()
        if name.startswith((OTHER_DOUBLE, "final_layer."))
    },
    f"{_OTHER_REFINER}.self_attn.qkv": fused(*under(f"{_REFINER}.attn", QKV)),
    f"{_OTHER_REFINER}.self_attn.proj": renamed(f"{_REFINER}.attn.to_out.0"),
    f"{_OTHER_REFINER}.adaLN_modulation.1": renamed(f"{_REFINER}.norm_out.linear"),
    **renamed_in({_OTHER_REFINER: _REFINER}, {"mlp.0": "ff.net.0.proj", "mlp.2": "ff.net.2"}),
    **renamed_in(
        {
            f"{_OTHER_TEXT}.t_embedder": f"{_TEXT}.timestep_embedder",
            f"{_OTHER_TEXT}.c_embedder": f"{_TEXT}.text_embedder",
        },
        ORIGINAL_EMBEDDER,
    ),
    f"{_OTHER_TEXT}.input_embedder": renamed("context_embedder.proj_in"),
    "img_in.proj": renamed("x_embedder.proj"),
}
TENCENT = {
    **renamed_in(
        {OTHER_DOUBLE: DOUBLE},
        {
            "img_mlp.fc1": "ff.net.0.proj",
            "img_mlp.fc2": "ff.net.2",
            "txt_mlp.fc1": "ff_context.net.0.proj",
            "txt_mlp.fc2": "ff_context.net.2",
            "img_mod.linear": "norm1.linear",
            "txt_mod.linear": "norm1_context.linear",
        },
    ),
    **renamed_in({_OTHER_REFINER: _REFINER}, {"mlp.fc1": "ff.net.0.proj", "mlp.fc2": "ff.net.2"}),
    **renamed_in({f"{_OTHER_TEXT}.t_embedder": f"{_TEXT}.timestep_embedder"}, MLP),
    **renamed_in(
        {f"{_OTHER_TEXT}.c_embedder": f"{_TEXT}.text_embedder"}, {layer: layer for layer in EMBEDDER}
    ),
}
TEXT_LAYERS = (
    *under(_REFINER, (*under("attn", (*QKV, "to_out.0")), "ff.net.0.proj", "ff.net.2", "norm_out.linear")),
    *under(f"{_TEXT}.timestep_embedder", EMBEDDER),
    *under(f"{_TEXT}.text_embedder", EMBEDDER),
    "context_embedder.proj_in",
)

_PARTS_OF_FLUX = ("single_blocks.", "time_in.", "guidance_in.", "vector_in.")
_LORA_LAYERS = LayerNames(
    layers=(
        *(layer for layer in _OF_FLUX.layers if layer not in ("x_embedder", "context_embedder")),
        *TEXT_LAYERS,
        "x_embedder.proj",
    ),
    kohya={
        **BLOCKS_IN_COMFYUI,
        **{name: place for name, place in _OF_FLUX.kohya.items() if name.startswith(_PARTS_OF_FLUX)},
    },
    others={
        **TENCENT,
        "single_blocks.*.modulation.linear": renamed("single_transformer_blocks.*.norm.linear"),
        **renamed_in(
            {
                "time_in": "time_text_embed.timestep_embedder",
                "guidance_in": "time_text_embed.guidance_embedder",
            },
            MLP,
        ),
    },
    # FLUX.1 has 19 and 38 of these, of the same width.
    num_blocks={"transformer_blocks": 20, "single_transformer_blocks": 40},
)


class HunyuanVideo(DiffusersFamily):
    """HunyuanVideo, the first version, text to video.

    20 dual-stream and 40 single-stream blocks, prompts by Llama 3 (of LLaVA) and CLIP, a causal video VAE:
    1/4 of the frames, 1/8 of the size.

    It takes a guidance scale as an input, with the noise level. Training gives it 1, as musubi-tuner does,
    which asks for no guidance, because the target is that of the data only, unless
    ``objective.guidance_target`` guides the target; previews give it ``validation.guidance_scale``. Previews
    of a model that takes none are guided by the negative prompt.

    Training has the sampler's shift of 7, too. musubi-tuner has it with a density around the middle, and
    proposes 3 where fine details are not learned with it.

    ComfyUI has queries, keys and values as one layer, and takes the file that
    ``diffsynth-lite convert --to comfyui`` makes of it.

    The folder names a class of tokenizers that transformers 5 builds again with another way to split words:
    all prompts would get other tokens. The tokenizer in ``tokenizer.json`` is used instead. A pipeline of
    diffusers reads it wrongly, until its ``tokenizer`` is ``PreTrainedTokenizerFast.from_pretrained(folder,
    subfolder="tokenizer")``, as in the code of model cards.

    SkyReels V1 from images and FramePack, which share its classes, are not trained here.
    """

    pipelines: ClassVar[tuple[Any, ...]] = (HunyuanVideoPipeline,)
    releases: ClassVar[tuple[Release, ...]] = (T2V,)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"video": "hunyuan_video_lora.yaml"}
    transformer_class = HunyuanVideoTransformer3DModel
    lora_spelling = JOINED_IN_COMFYUI
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    encoder_classes: ClassVar[Mapping[str, Any]] = {
        "text_encoder": LlamaModel,
        "text_encoder_2": CLIPTextModel,
        "vae": AutoencoderKLHunyuanVideo,
    }
    tokenizers = ("tokenizer", "tokenizer_2")
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    masks_attention = "always"
    unused_matmuls = ("ff.net.2", "ff_context.net.2", "proj_out")
    record_kinds: ClassVar[tuple[RecordKind, ...]] = ("video", "image")
    size_divisor = 16
    frame_step = 4
    default_num_frames = 129
    default_fps = 24.0
    # The pipeline's own limit. CLIP, which gives one vector for the whole text, reads 77 tokens of its own.
    max_prompt_tokens = 256
    model_fn = model_fn_hunyuan_video
    num_timesteps = 1000
    prompt_id = "hunyuan_video/prompt/1"
    prompt_template = TEMPLATE
    # Tokens of it before a prompt, which are cut off.
    num_cut: ClassVar[int] = DEFAULT_PROMPT_TEMPLATE["crop_start"]
    latents_id = "hunyuan_video/latents/1"
    prompt_outputs = ("prompt_embeds", "pooled_prompt_embeds", "mask")
    prompt_width, pooled_width = "text_embed_dim", "pooled_projection_dim"
    scale_argument = Flux.scale_argument
    default_target_modules = _ATTENTION
    target_sets: ClassVar[TargetSets] = {
        "attention": _ATTENTION,
        "all": (*_ATTENTION, *_FEED_FORWARD, *_MODULATION),
    }

    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        """With the token that the template puts after a text."""
        tokenizer = self.load_tokenizer()
        rows = tokenizer([self.prompt_template.format(text) for text in texts])["input_ids"]
        return [len(row) - self.num_cut for row in rows]

    def num_tokens(self, latents_shape: Sequence[int]) -> int:
        config = self.folder.component_config("transformer")
        latents_of_a_token: int = config["patch_size"] ** 2 * config["patch_size_t"]
        return math.prod(latents_shape[1:]) // latents_of_a_token

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        guidance = self.guidance(conditioning, like)
        if guidance is not None:
            # In this order, as the pipeline has it: in bfloat16 a scale is rounded before and after.
            guidance = guidance.to(**like) * _GUIDANCE_SCALE
        return super().model_inputs(conditioning, like) | {"guidance": guidance}

    def prompt_argument(self, prompt: Conditioning, like: Mapping[str, Any]) -> dict[str, Any]:
        prompt = {name: prompt[name] for name in self.prompt_outputs if name in prompt}
        given = super().prompt_argument(prompt, like)
        embeds_bld = given["prompt_embeds"]
        return {**given, "prompt_attention_mask": embeds_bld.new_ones(embeds_bld.shape[:2])}


def tiny(**layout: Any) -> HunyuanVideoPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of each kind, of 32 channels; the real compression and scale of the latents, of 4 channels.

    Args:
        layout: further settings of the transformer.
    """
    tokenizer, tokenizer_2 = tokenizers.llama3_tokenizer([TEMPLATE]), tokenizers.clip_tokenizer()
    text_encoder, text_encoder_2 = (
        text_encoders.tiny_llama(tokenizer),
        text_encoders.tiny_clip_text(tokenizer_2),
    )
    vae = autoencoders.tiny_hunyuan_video_vae()
    return HunyuanVideoPipeline(
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=tiny_hunyuan_video_transformer(
            in_channels=vae.config.latent_channels,
            out_channels=vae.config.latent_channels,
            text_embed_dim=text_encoder.config.hidden_size,
            pooled_projection_dim=text_encoder_2.config.hidden_size,
            **layout,
        ),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
    )


def tiny_hunyuan_video_transformer(*, seed: int = 0, **layout: Any) -> HunyuanVideoTransformer3DModel:
    """A random transformer in eval mode: two blocks of each kind, of 32 channels."""
    with seeded(seed):
        return HunyuanVideoTransformer3DModel(
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=1,
            num_attention_heads=2,
            attention_head_dim=16,
            rope_axes_dim=(4, 6, 6),
            **layout,
        ).eval()
