"""This file trains LongCat-Image (text to image): the final model and the one to fine-tune, Dev.

Layouts: b batch, c latent channels, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_longcat_image.py`` and ``pipeline_longcat_image.py``; the model is arXiv
2512.07584, and ``train_examples`` of meituan-longcat/LongCat-Image its authors' trainer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    LongCatImagePipeline,
    LongCatImageTransformer2DModel,
)
from diffusers.pipelines.longcat_image import pipeline_longcat_image as longcat
from transformers import Qwen2_5_VLForConditionalGeneration

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.lora import shared_names as shared
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, renamed, renamed_in, under
from diffsynth_lite.lora.spelling import taken_by_comfyui
from diffsynth_lite.media import RecordKind
from diffsynth_lite.pipelines.base.diffusers_components import assemble
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import Conditioning, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.model_function import Checkpointing, checkpointed, model_function, stacked
from diffsynth_lite.pipelines.qwen_image import QWEN_TEXT_ENCODER
from diffsynth_lite.releases import components as known
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

_PATCH = 2
_SINGLE = ("proj_mlp", "single_transformer_blocks.*.proj_out")


@model_function
def model_fn_longcat_image(
    transformer: torch.nn.Module,
    latents_bchw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    *,
    input_latents_bchw: torch.Tensor | None = None,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of LongCat-Image, each transformer block run by the gradient engine.

    Args:
        transformer: a ``LongCatImageTransformer2DModel``, plain or wrapped by DDP.
        latents_bchw: (B, 16, H, W), noisy normalised latents, H and W even.
        timestep: (B,), noise level in [0, 1].
        prompt_embeds_bld: (B, L, D) prompt embeddings with those of their padding, which the model sees; the
            positions of images start after the last one, L.
        input_latents_bchw: (B, 16, H_i, W_i), clean normalised latents of the image to edit.

    Returns:
        (B, 16, H, W), the predicted velocity ``noise - latents``.
    """
    length, (height, width) = prompt_embeds_bld.shape[1], latents_bchw.shape[-2:]
    images = [latents_bchw] if input_latents_bchw is None else [latents_bchw, input_latents_bchw]
    tokens_bld = [LongCatImagePipeline._pack_latents(image, *image.shape) for image in images]
    with checkpointed(LongCatImage, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bld = transformer(
            hidden_states=torch.cat(tokens_bld, dim=1),
            timestep=timestep,
            encoder_hidden_states=prompt_embeds_bld,
            txt_ids=longcat.prepare_pos_ids(num_token=length).to(latents_bchw.device),
            img_ids=_positions(images, length),
            return_dict=False,
        )[0]
    velocity_bchw: torch.Tensor = LongCatImagePipeline._unpack_latents(
        velocity_bld[:, : tokens_bld[0].shape[1]], height, width, vae_scale_factor=1
    )
    return velocity_bchw


def _positions(images: Sequence[torch.Tensor], start: int) -> torch.Tensor:
    """(L, 3), of the tokens of all images: the number of the image, its rows and columns from ``start`` on."""
    sizes = [(image.shape[2] // _PATCH, image.shape[3] // _PATCH) for image in images]
    of_each = [
        longcat.prepare_pos_ids(number, "image", (start, start), height=height, width=width)
        for number, (height, width) in enumerate(sizes, start=1)
    ]
    return torch.cat(of_each).to(images[0].device)


_AUTHORS = "meituan-longcat/LongCat-Image on GitHub, "
_BYTES = "dtype from the bytes of the repository on the hub, as a public comparison of models lists them"
LONGCAT_IMAGE = Release(
    name="LongCat-Image",
    hub_id="meituan-longcat/LongCat-Image",
    pipeline_class="LongCatImagePipeline",
    components={
        "transformer": ReleaseComponent(
            "LongCatImageTransformer2DModel",
            {"num_layers": 10, "num_single_layers": 20},
            dtype="bfloat16",
            source=f"vLLM-Omni, longcat_image of its diffusion configs: the repository's file; {_BYTES}",
        ),
        "text_encoder": replace(QWEN_TEXT_ENCODER, source=f"{QWEN_TEXT_ENCODER.source}; {_BYTES}"),
        "vae": replace(known.FLUX_VAE, source=f"{known.FLUX_VAE.source}; {_BYTES}"),
    },
    scheduler=replace(
        known.FLUX_SCHEDULER,
        source=f"MNN, longcat_diffusion.cpp; that its shift is dynamic also {_AUTHORS}train_config.yaml",
    ),
    tokenizers={"tokenizer": ReleaseTokenizer("Qwen2Tokenizer", ("vocab.json", "merges.txt"))},
    size=(1024, 1024, 1),
    parameters=6e9,
    licence="Apache-2.0",
    gated=False,
    sources={
        "pipeline": f"{_AUTHORS}README.md",
        "size": "`default_sample_size` of the pipeline",
        "parameters": f"{_AUTHORS}README.md",
        "licence": f"{_AUTHORS}LICENSE; a copy of the card of Dev",
        "architecture": "no program is known to give it one",
    },
    unconfirmed=("files of the tokenizer", "settings of the text encoder and of the autoencoder"),
)
_DEV = LONGCAT_IMAGE.but(
    "LongCat-Image-Dev",
    "meituan-longcat/LongCat-Image-Dev",
    unconfirmed=(*LONGCAT_IMAGE.unconfirmed, "that its settings are those of LongCat-Image"),
)


_LORA_LAYERS = LayerNames(
    layers=(
        *under(shared.DOUBLE, (*shared.JOINT_ATTENTION, *shared.FLUX_FEED_FORWARD)),
        *under(shared.DOUBLE, ("norm1.linear", "norm1_context.linear")),
        *under(shared.SINGLE, (*shared.FLUX_SINGLE, "norm.linear")),
        *under("time_embed.timestep_embedder", shared.EMBEDDER),
        *("x_embedder", "context_embedder", "norm_out.linear", "proj_out"),
    ),
    kohya={
        **shared.FLUX_BLOCKS,
        "double_blocks.*.img_mod.lin": renamed(f"{shared.DOUBLE}.norm1.linear"),
        "double_blocks.*.txt_mod.lin": renamed(f"{shared.DOUBLE}.norm1_context.linear"),
        "single_blocks.*.modulation.lin": renamed(f"{shared.SINGLE}.norm.linear"),
        **renamed_in({"time_in": "time_embed.timestep_embedder"}, shared.ORIGINAL_EMBEDDER),
        "final_layer.adaLN_modulation.1": shared.LAST_NORM,
    },
)


class LongCatImage(DiffusersFamily):
    """LongCat-Image and LongCat-Image-Dev, from text.

    10 dual-stream and 20 single-stream blocks, Qwen2.5-VL prompts, the autoencoder of FLUX.1: 16 channels at
    1/8 size. No layer of the last block is unused: text and image share its weights.

    Words to write in the image stand between quotation marks in the caption, 'so' or "so": the tokenizer then
    reads them character by character, which takes more of the 512 tokens. Each prompt is padded to 512, which
    the model sees; ComfyUI does not pad.

    The pipeline has the text encoder rewrite prompts by default. Captions and the prompts of previews are
    used as they are written: to generate with a LoRA as in the previews, give the pipeline
    ``enable_prompt_rewrite=False``. Its guidance never makes a prediction longer than that of the prompt
    (``enable_cfg_renorm``), in previews too.

    The authors train LoRAs on Dev, a checkpoint of the middle of the training, and use them on
    LongCat-Image (``train_examples/lora`` and ``scripts/inference_t2i_lora.py``).

    The sampler's shift grows with the image, as that of FLUX.1, 3.16 at 1024 x 1024 pixels. The authors train
    a logit-normal density with it.

    Its pipelines load no LoRA (diffusers issue 12859); the transformer does:
    ``pipeline.transformer.load_lora_adapter(folder, use_safetensors=True)``. Nor do they generate from
    encoded prompts in diffusers 0.42.1 (issue 13636), which previews correct.
    """

    pipelines: ClassVar[tuple[Any, ...]] = (LongCatImagePipeline,)
    releases: ClassVar[tuple[Release, ...]] = (LONGCAT_IMAGE, _DEV)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image": "longcat_image_lora.yaml"}
    transformer_class = LongCatImageTransformer2DModel
    lora_spelling = taken_by_comfyui(but=("time_embed.",))
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    encoder_classes: ClassVar[Mapping[str, Any]] = {
        "text_encoder": Qwen2_5_VLForConditionalGeneration,
        "vae": AutoencoderKL,
    }
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    unused_matmuls = ("ff.net.2", "ff_context.net.2", "proj_out")
    size_divisor = 16
    max_prompt_tokens = 512
    patch = _PATCH
    model_fn = model_fn_longcat_image
    prompt_id = "longcat_image/prompt/1"
    latents_id = "longcat_image/latents/1"
    prompt_outputs = ("prompt_embeds",)
    prompt_width = "joint_attention_dim"
    # Those of the authors' trainer.
    default_target_modules: ClassVar[tuple[str, ...]] = (*shared.JOINT_PROJECTIONS, *shared.FLUX_FEED_FORWARD)
    target_sets: ClassVar[TargetSets] = {
        "attention": shared.JOINT_PROJECTIONS,
        "all": (*default_target_modules, *_SINGLE, "norm1.linear", "norm1_context.linear", "norm.linear"),
    }

    @property
    def prompt_template(self) -> Any:
        pipeline = assemble(self.pipeline)
        return pipeline.prompt_template_encode_prefix, pipeline.prompt_template_encode_suffix

    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        """Those of the texts, whose quoted words are read character by character."""
        tokenizer = self.load_tokenizer()

        def length(text: str) -> int:
            split = longcat.split_quotation(text)
            pieces = [piece for part, is_quoted in split for piece in (part if is_quoted else [part])]
            return sum(len(tokenizer(piece, add_special_tokens=False)["input_ids"]) for piece in pieces)

        return [length(text) for text in texts]

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds_bld": stacked(conditioning, "prompt_embeds", like)}

    def preview_pipeline(self, model: torch.nn.Module, vae_dtype: torch.dtype, **settings: Any) -> Any:
        """As of other families, but ``encode_prompt`` takes what is encoded without a text."""
        pipeline = super().preview_pipeline(model, vae_dtype, **settings)
        encode_prompt = pipeline.encode_prompt
        pipeline.encode_prompt = lambda prompt=None, **given: encode_prompt(prompt=prompt or "", **given)
        return pipeline

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        return {"enable_prompt_rewrite": False}

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        return super().call_arguments(pipeline, request) | {"enable_prompt_rewrite": False}


def tiny() -> LongCatImagePipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of each kind, of 32 channels; 16 latent channels at 1/8 size with the real model's statistics.
    Its processor does the same as that of the released model, whose class needs torchvision.
    """
    tokenizer = tokenizers.qwen2_tokenizer()
    text_encoder = text_encoders.tiny_qwen2_5_vl(tokenizer)
    with seeded(0):
        transformer = LongCatImageTransformer2DModel(
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=text_encoder.config.text_config.hidden_size,
            axes_dims_rope=(4, 6, 6),
        )
    return LongCatImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**LONGCAT_IMAGE.scheduler.config),
        vae=autoencoders.tiny_flux_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_processor=tokenizers.qwen3_vl_processor(tokenizer, patch_size=14),
        transformer=transformer,
    )
