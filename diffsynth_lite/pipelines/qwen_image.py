"""This file trains Qwen-Image (text to image).

Layouts: b batch, c latent channels, f images (1 but for Qwen-Image-Layered), h and w latent height and
width; l tokens, d channels.
Sources: diffusers ``transformer_qwenimage.py`` and ``pipeline_qwenimage.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2_5_VLForConditionalGeneration

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.core.parallel import SequenceSplit
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, under
from diffsynth_lite.lora.shared_names import DOUBLE, EMBEDDER, JOINT_ATTENTION, JOINT_PROJECTIONS
from diffsynth_lite.lora.spelling import taken_by_comfyui
from diffsynth_lite.media import RecordKind
from diffsynth_lite.pipelines.base.diffusers_components import assemble
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import Conditioning, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.model_function import Checkpointing, checkpointed, mask_of, model_function
from diffsynth_lite.releases.components import LICENCES, MUSUBI, PINNED_INDEXES, QWEN_VAE, encoder_sizes
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

_PATCH = 2
LONGEST_PROMPT = 1024
"""Tokens that the pipelines take at most."""
IMAGE_TOKEN = "<|image_pad|>"
PLACEHOLDERS = (IMAGE_TOKEN, "<|video_pad|>")
"""Of images and videos: the processors of transformers count them in each prompt, tokenizers do not."""


@model_function
def model_fn_qwen_image(
    transformer: torch.nn.Module,
    latents_bcfhw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    prompt_embeds_mask: torch.Tensor | None = None,
    *,
    input_latents_bcfhw: Sequence[torch.Tensor] = (),
    additional_t_cond: torch.Tensor | None = None,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of Qwen-Image, each transformer block run by the gradient engine.

    Args:
        transformer: a ``QwenImageTransformer2DModel``, plain or wrapped by DDP.
        latents_bcfhw: (B, 16, F, H, W), noisy normalised latents of F images, H and W even.
        timestep: (B,), noise level in [0, 1].
        prompt_embeds_bld: (B, L, D) prompt embeddings, padded on the right.
        prompt_embeds_mask: (B, L), 1 for a token and 0 for padding; None when no prompt is padded.
        input_latents_bcfhw: each (B, 16, 1, H_i, W_i), clean normalised latents of the images that an edit
            starts from.
        additional_t_cond: (B,), 0 or 1, of a model with an embedding next to that of the noise level.

    Returns:
        (B, 16, F, H, W), the predicted velocity ``noise - latents``.
    """
    batch, _, num_images, height, width = latents_bcfhw.shape
    images = (*latents_bcfhw.chunk(num_images, dim=2), *input_latents_bcfhw)
    tokens_bld = torch.cat([_pack(image_bcfhw) for image_bcfhw in images], dim=1)
    image_shapes = [(1, image.shape[-2] // _PATCH, image.shape[-1] // _PATCH) for image in images]
    with checkpointed(QwenImage, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bld = transformer(
            hidden_states=tokens_bld,
            timestep=timestep,
            encoder_hidden_states=prompt_embeds_bld,
            encoder_hidden_states_mask=prompt_embeds_mask,
            # A list per sample: diffusers reads plain tuples differently when zero_cond_t is set.
            img_shapes=[image_shapes] * batch,
            additional_t_cond=additional_t_cond,
            return_dict=False,
        )[0]
    num_tokens = height * width // _PATCH**2
    of_each = velocity_bld[:, : num_images * num_tokens].chunk(num_images, dim=1)
    return torch.cat([_unpack(tokens_bld, height, width) for tokens_bld in of_each], dim=2)


def _pack(latents_bcfhw: torch.Tensor) -> torch.Tensor:
    batch, channels, _, height, width = latents_bcfhw.shape
    tokens_bld: torch.Tensor = QwenImagePipeline._pack_latents(
        latents_bcfhw.squeeze(2), batch, channels, height, width
    )
    return tokens_bld


def _unpack(tokens_bld: torch.Tensor, height: int, width: int) -> torch.Tensor:
    latents_bcfhw: torch.Tensor = QwenImagePipeline._unpack_latents(
        tokens_bld, height, width, vae_scale_factor=1
    )
    return latents_bcfhw


QWEN_README = "QwenLM/Qwen-Image, README.md"

QWEN_TEXT_ENCODER = ReleaseComponent(
    "Qwen2_5_VLForConditionalGeneration",
    {
        "text_config": {"model_type": "qwen2_5_vl_text", **encoder_sizes(3584, 18944, 28, 28, 4, 152064)},
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
        },
        "tie_word_embeddings": False,
    },
    dtype="bfloat16",
    source=f"{MUSUBI}qwen_image/qwen_image_utils.py",
)

QWEN_TRANSFORMER = ReleaseComponent(
    "QwenImageTransformer2DModel",
    dtype="bfloat16",
    source="defaults of the class; dtype from the 57.7 GB of the repository of Edit-2511, as a public "
    "worker's manifest declares them",
)

QWEN_IMAGE_BASE = Release(
    name="Qwen-Image",
    hub_id="Qwen/Qwen-Image",
    pipeline_class="QwenImagePipeline",
    components={"transformer": QWEN_TRANSFORMER, "text_encoder": QWEN_TEXT_ENCODER, "vae": QWEN_VAE},
    scheduler=ReleaseComponent(
        "FlowMatchEulerDiscreteScheduler",
        {
            "base_image_seq_len": 256,
            "base_shift": 0.5,
            "max_image_seq_len": 8192,
            "max_shift": 0.9,
            "shift_terminal": 0.02,
            "use_dynamic_shifting": True,
        },
        source="ai-toolkit and SimpleTuner, public trainers, which write it out for this model",
    ),
    tokenizers={"tokenizer": ReleaseTokenizer("Qwen2Tokenizer", ("vocab.json", "merges.txt"))},
    size=(1328, 1328, 1),
    parameters=20e9,
    licence="Apache-2.0",
    gated=None,
    architecture="Qwen-Image",
    version="qwen_image",
    sources={
        "pipeline": f"{PINNED_INDEXES}, for Edit",
        "size": f"{QWEN_README}, for 1:1",
        "parameters": QWEN_README,
        "licence": f"{QWEN_README}; {LICENCES}",
        "architecture": f"{MUSUBI}utils/sai_model_spec.py, dataset/architectures.py",
    },
    unconfirmed=("files of the tokenizer", "dtype of the autoencoder"),
)

_2512 = QWEN_IMAGE_BASE.but(
    "Qwen-Image-2512",
    "Qwen/Qwen-Image-2512",
    unconfirmed=(*QWEN_IMAGE_BASE.unconfirmed, "that its settings are those of Qwen-Image"),
)

QWEN_EDIT = QWEN_IMAGE_BASE.but(
    "Qwen-Image-Edit",
    "Qwen/Qwen-Image-Edit",
    pipeline_class="QwenImageEditPipeline",
    tokenizers={"processor": ReleaseTokenizer("Qwen2VLProcessor")},
    size=(1024, 1024, 1),
    architecture="Qwen-Image-Edit",
    version="qwen_image_edit",
    sources={"size": "the area that the pipeline brings images to", "pipeline": PINNED_INDEXES},
    unconfirmed=(*QWEN_IMAGE_BASE.unconfirmed, "settings of the scheduler"),
)


_LORA_LAYERS = LayerNames(
    layers=(
        *under(DOUBLE, JOINT_ATTENTION),
        *under(DOUBLE, ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")),
        *under(DOUBLE, ("img_mod.1", "txt_mod.1")),
        *under("time_text_embed.timestep_embedder", EMBEDDER),
        *("img_in", "txt_in", "norm_out.linear", "proj_out"),
    )
)


class QwenImage(DiffusersFamily):
    """Qwen-Image, from text.

    60 dual-stream blocks, Qwen2.5-VL prompts, a causal 3D VAE with 16 channels at 1/8 size.

    The sampler's shift grows little with the image: 1.7 at 512 x 512 pixels and 2.0 at 1024 x 1024, where
    DiffSynth-Studio and musubi-tuner (``docs/qwen_image.md``) train with 2.2 at any size.
    """

    pipelines: ClassVar[tuple[Any, ...]] = (QwenImagePipeline,)
    releases: ClassVar[tuple[Release, ...]] = (QWEN_IMAGE_BASE, _2512)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image": "qwen_lora.yaml"}
    transformer_class = QwenImageTransformer2DModel
    lora_spelling = taken_by_comfyui()
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    encoder_classes: ClassVar[Mapping[str, Any]] = {
        "text_encoder": Qwen2_5_VLForConditionalGeneration,
        "vae": AutoencoderKLQwenImage,
    }
    block_lists = ("transformer_blocks",)
    unused_matmuls = ("img_mlp.net.2", "txt_mlp.net.2")
    sequence_split = SequenceSplit(prompts="padded")
    size_divisor = 16
    max_prompt_tokens = 512
    patch = _PATCH
    model_fn = model_fn_qwen_image
    prompt_id = "qwen_image/prompt/2"
    latents_id = "qwen_image/latents/1"
    scale_argument = "true_cfg_scale"
    prompt_width = "joint_attention_dim"
    default_target_modules = (*JOINT_PROJECTIONS, "img_mod.1", "img_mlp.net.2", "txt_mod.1", "txt_mlp.net.2")
    target_sets: ClassVar[TargetSets] = {
        "attention": JOINT_PROJECTIONS,
        "all": (*default_target_modules, "img_mlp.net.0.proj", "txt_mlp.net.0.proj"),
    }
    unused_in_last_block = ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")

    @property
    def prompt_template(self) -> str:
        template: str = assemble(self.pipeline).prompt_template_encode
        return template

    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        """With the end of the chat around each text, which counts too; the instruction before it does not."""
        pipeline = assemble(self.pipeline)
        chats = [pipeline.prompt_template_encode.format(text) for text in texts]
        tokens = self.load_tokenizer()(chats)["input_ids"]
        return [len(row) - pipeline.prompt_template_encode_start_idx for row in tokens]

    def prompt_argument(self, prompt: Conditioning, like: Mapping[str, Any]) -> dict[str, Any]:
        embeds_bld, mask = self.padded([prompt], like)
        return {"prompt_embeds": embeds_bld, "prompt_embeds_mask": mask_of(embeds_bld, mask)}

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        # What is longer is cut already, and may be padded.
        return super().call_arguments(pipeline, request) | {"max_sequence_length": LONGEST_PROMPT}


def tiny() -> QwenImagePipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of 48 channels; 16 latent channels at 1/8 size with the real model's statistics.
    """
    tokenizer = tokenizers.qwen2_tokenizer()
    text_encoder = text_encoders.tiny_qwen2_5_vl(tokenizer)
    with seeded(0):
        transformer = QwenImageTransformer2DModel(
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=3,
            joint_attention_dim=text_encoder.config.text_config.hidden_size,
            axes_dims_rope=(8, 4, 4),
        )
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**QWEN_IMAGE_BASE.scheduler.config),
        vae=autoencoders.tiny_qwen_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
