"""This file trains LongCat-Image (text to image): the final model and the one to fine-tune, Dev.

Layouts: b batch, c latent channels, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_longcat_image.py`` and ``pipeline_longcat_image.py``; the model is arXiv
2512.07584, and ``train_examples`` of meituan-longcat/LongCat-Image its authors' trainer.
"""

import re
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
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, renamed, renamed_in
from diffsynth_lite.lora.spelling import taken_by_comfyui
from diffsynth_lite.media import Prompt, RecordKind
from diffsynth_lite.pipelines.base.diffusers_components import assemble
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import Conditioning, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.model_function import Checkpointing, checkpointed, model_function
from diffsynth_lite.pipelines.flux import Flux, pack_images, unpack_image
from diffsynth_lite.pipelines.qwen_image import QWEN_TEXT_ENCODER
from diffsynth_lite.releases import components as known
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

_PATCH = 2
_LONGEST_PROMPT = 512
_WITH_APOSTROPHE = re.compile(r"[a-zA-Z]+'[a-zA-Z]+")
_HIDDEN = "\ue000"


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
    tokens_bld, positions = pack_images(images)
    start = positions.new_tensor([1, length, length])  # the text is image 0, and takes the rows before
    with checkpointed(LongCatImage, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bld = transformer(
            hidden_states=tokens_bld,
            timestep=timestep,
            encoder_hidden_states=prompt_embeds_bld,
            txt_ids=longcat.prepare_pos_ids(num_token=length).to(latents_bchw.device),
            img_ids=positions + start,
            return_dict=False,
        )[0]
    return unpack_image(velocity_bld, height, width)


class SplitTokenizer:
    """A tokenizer to which the pipelines give each prompt as the numbers of its tokens, which it splits.

    ``split_quotation`` of diffusers 0.42.1 reads one of several words with an apostrophe for another, in each
    process another one, and the pipeline of edits fails where it would cut (issue 13636).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.pad, self.convert_tokens_to_ids = tokenizer.pad, tokenizer.convert_tokens_to_ids

    def tokens(self, text: str) -> list[int]:
        """Of a prompt, of which what is quoted is read character by character."""
        hidden = _WITH_APOSTROPHE.sub(lambda word: word[0].replace("'", _HIDDEN), text)
        tokens = []
        for part, is_quoted in longcat.split_quotation(hidden):
            shown = part.replace(_HIDDEN, "'")
            for piece in shown if is_quoted else [shown]:
                tokens += self._tokenizer(piece, add_special_tokens=False)["input_ids"]
        return tokens

    def numbers(self, text: str) -> str:
        """The tokens of a prompt, cut, as this reads them."""
        return " ".join(map(str, self.tokens(text)[:_LONGEST_PROMPT]))

    def __call__(self, text: str, **settings: Any) -> Mapping[str, Any]:
        """Tokens of what ``numbers`` returned, or of a part of the pipeline's template."""
        if text[0].isdigit():
            return {"input_ids": [int(number) for number in text.split()]}
        tokens: Mapping[str, Any] = self._tokenizer(text, **settings)
        return tokens


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
    tokenizers={
        "tokenizer": ReleaseTokenizer("Qwen2Tokenizer", ("vocab.json", "merges.txt")),
        "text_processor": ReleaseTokenizer("Qwen2VLProcessor"),
    },
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
    unconfirmed=("settings and files of all but the transformer",),
)
_DEV = LONGCAT_IMAGE.but(
    "LongCat-Image-Dev",
    "meituan-longcat/LongCat-Image-Dev",
    unconfirmed=(*LONGCAT_IMAGE.unconfirmed, "that its settings are those of LongCat-Image"),
)


_KOHYA = {
    **shared.FLUX_BLOCKS,
    "double_blocks.*.img_mod.lin": renamed(f"{shared.DOUBLE}.norm1.linear"),
    "double_blocks.*.txt_mod.lin": renamed(f"{shared.DOUBLE}.norm1_context.linear"),
    "single_blocks.*.modulation.lin": renamed(f"{shared.SINGLE}.norm.linear"),
    **renamed_in({"time_in": "time_embed.timestep_embedder"}, shared.ORIGINAL_EMBEDDER),
    "final_layer.adaLN_modulation.1": shared.LAST_NORM,
}
_LORA_LAYERS = LayerNames(
    layers=tuple(layer for place in _KOHYA.values() for layer in place.layers),
    kohya=_KOHYA,
    # FLUX.1 has the same names, and 19 and 38 blocks.
    num_blocks={"transformer_blocks": 10, "single_transformer_blocks": 20},
)


class LongCatImage(DiffusersFamily):
    """LongCat-Image and LongCat-Image-Dev, from text.

    10 dual-stream and 20 single-stream blocks, Qwen2.5-VL prompts, the autoencoder of FLUX.1: 16 channels at
    1/8 size. No layer of the last block is unused: text and image share its weights.

    Put words that are to be written in the image between quotation marks, ' or ", in captions: they are then
    read character by character, which takes more of the 512 tokens. Each prompt is padded to 512, which the
    model sees; ComfyUI does not pad. Of several words with an apostrophe (it's, don't) diffusers 0.42.1, the
    authors' trainer and ComfyUI read one in place of another; here they are read as they are written.

    The pipeline has the text encoder rewrite prompts by default. Captions and the prompts of previews are
    used as they are written: to generate with a LoRA as in the previews, give the pipeline
    ``enable_prompt_rewrite=False``. Previews have its guidance, which makes no prediction larger than that of
    the prompt (``enable_cfg_renorm``).

    The authors train LoRAs on Dev, a checkpoint from the middle of the training, and use them on
    LongCat-Image (``train_examples/lora``, ``scripts/inference_t2i_lora.py``): a logit-normal density with
    the sampler's shift, which grows with the image as that of FLUX.1, to 3.16 at 1024 x 1024 pixels.

    Its pipelines load no LoRA (diffusers issue 12859); the transformer does:
    ``pipeline.transformer.load_lora_adapter(folder, use_safetensors=True)``.
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
    max_prompt_tokens = _LONGEST_PROMPT
    keeps_padding = True
    patch = _PATCH
    model_fn = model_fn_longcat_image
    prompt_id = "longcat_image/prompt/1"
    latents_id = "longcat_image/latents/1"
    prompt_outputs = ("prompt_embeds",)
    prompt_width = "joint_attention_dim"
    # Those of the authors' trainer.
    default_target_modules = Flux.default_target_modules
    target_sets: ClassVar[TargetSets] = Flux.target_sets

    @property
    def prompt_template(self) -> Any:
        pipeline = assemble(self.pipeline, **self.pipeline_settings)
        return pipeline.prompt_template_encode_prefix, pipeline.prompt_template_encode_suffix

    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        tokenizer = SplitTokenizer(self.load_tokenizer())
        return [len(tokenizer.tokens(text)) for text in texts]

    def prompt_pipeline(self, dtype: torch.dtype, device: torch.device, **settings: Any) -> Any:
        pipeline = super().prompt_pipeline(dtype, device, **settings)
        pipeline.tokenizer = SplitTokenizer(pipeline.tokenizer)
        return pipeline

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        read = [replace(one, text=pipeline.tokenizer.numbers(one.text)) for one in prompts]
        return super().encode_prompts(pipeline, read, device)

    def preview_pipeline(self, model: torch.nn.Module, vae_dtype: torch.dtype, **settings: Any) -> Any:
        """As of other families; its ``encode_prompt`` fails without a text (diffusers issue 13636)."""
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
