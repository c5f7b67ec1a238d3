"""This file trains FLUX.3 Image Klein: images from text only, and with images to start from.

Layouts: b batch, c channels of a token (32 latent channels of 2 x 2 places), h and w height and width in
tokens; l tokens, d channels.
Sources: diffusers ``transformer_flux3.py`` and the blocks in ``modular_pipelines/flux3``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Unpack

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux3DistilledModularPipeline,
    Flux3ModularPipeline,
    Flux3Transformer2DModel,
)
from diffusers.image_processor import VaeImageProcessor
from diffusers.modular_pipelines.flux3.before_denoise import (
    Flux3PrepareLatentsStep,
    Flux3SetTimestepsStep,
    Flux3TextRoPEInputsStep,
    _prepare_image_ids,
)
from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep
from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor
from PIL.Image import Image
from transformers import Qwen3VLForConditionalGeneration

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, renamed, renamed_in, under
from diffsynth_lite.lora.shared_names import LAST_NORM, ORIGINAL_EMBEDDER
from diffsynth_lite.lora.spelling import Spelling
from diffsynth_lite.media import Media, Prompt, RecordKind
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily, device_and_dtype
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.latents import encode_latents
from diffsynth_lite.pipelines.base.mixins import EditInputs
from diffsynth_lite.pipelines.base.model_function import (
    INPUT,
    Checkpointing,
    checkpointed,
    model_function,
    stack_inputs,
    stacked,
)
from diffsynth_lite.pipelines.base.model_settings import ModelSettings
from diffsynth_lite.pipelines.base.preview_request import INPUT_IMAGE
from diffsynth_lite.pipelines.krea2 import QWEN3_VL_4B
from diffsynth_lite.releases.components import FLUX2_VAE
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.testing import seeded
from diffsynth_lite.testing.autoencoders import tiny_flux2_vae
from diffsynth_lite.testing.modular import handled_as_others
from diffsynth_lite.testing.text_encoders import tiny_qwen3_vl_lm
from diffsynth_lite.testing.tokenizers import qwen2_tokenizer, qwen3_vl_processor

_SCALE_OF_PLACES = Flux3PrepareLatentsStep().image_rope_scale
_SHIFT = Flux3SetTimestepsStep().shift
_WINDOW = Flux3TextEncoderStep().pad_multiple
_READ_LAYERS = (4, 8, 12, 16, 20, 24, 28, 32)  # a default of the pipeline's step
_MAX_INPUTS = 10
_LARGEST_OF_SEVERAL = 1024 * 1024  # a literal in its processor

_ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
_FEED_FORWARD = ("ff.linear_in", "ff.linear_out")
_MODES = ("image", "image_cond")
_OF_INPUTS = "mode_blocks.image_cond"
_TRAINED = ("txt_mode_blocks.*", "mode_blocks.image.*", "single_transformer_blocks.*")
"""Blocks that every image goes through; those of ``_OF_INPUTS`` only see images to start from."""


@model_function
def model_fn_flux3(
    transformer: torch.nn.Module,
    latents_bchw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    *,
    input_latents_bchw: Sequence[torch.Tensor] = (),
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of FLUX.3, each transformer block run by the gradient engine.

    Args:
        transformer: a ``Flux3Transformer2DModel`` that is not distilled, plain or wrapped by DDP.
        latents_bchw: (B, 128, H, W), noisy normalised latents, one place a token.
        timestep: (B,), noise level in [0, 1]; prompts and images to start from are at 0.
        prompt_embeds_bld: (B, L, D) prompt embeddings with their padding, which the model sees.
        input_latents_bchw: each (B, 128, H_i, W_i), clean normalised latents of the images to start from.

    Returns:
        (B, 128, H, W), the predicted velocity ``noise - latents``.
    """
    given: dict[str, torch.Tensor] = {}
    if input_latents_bchw:
        ids = [_places(latents, -(1 + place)) for place, latents in enumerate(input_latents_bchw)]
        given["image_cond_ids"] = torch.cat(ids)
        given["image_cond_hidden_states"] = torch.cat([_packed(one) for one in input_latents_bchw], dim=1)
    more = (_OF_INPUTS,) if input_latents_bchw else ()
    with checkpointed(Flux3, transformer, gradient_checkpoint_forward, more=more, **checkpointing):
        velocity_bld = transformer(
            hidden_states=_packed(latents_bchw),
            encoder_hidden_states=prompt_embeds_bld,
            timestep=timestep,
            img_ids=_places(latents_bchw, 0),
            txt_ids=Flux3TextRoPEInputsStep._prepare_text_ids(prompt_embeds_bld).to(latents_bchw.device),
            **given,
            return_dict=False,
        )[0]
    velocity_bchw: torch.Tensor = velocity_bld.transpose(1, 2).reshape(latents_bchw.shape)
    return velocity_bchw


def _packed(latents_bchw: torch.Tensor) -> torch.Tensor:
    return latents_bchw.flatten(2).transpose(1, 2)


def _places(latents_bchw: torch.Tensor, image: int) -> torch.Tensor:
    """(H * W, 4), the positions of an image's tokens: of the generated one 0, of others -1, -2 and so on."""
    places: torch.Tensor = _prepare_image_ids(*latents_bchw.shape[-2:], _SCALE_OF_PLACES, l_coord=image)
    return places.to(latents_bchw.device)


_CARD = "black-forest-labs/flux-3-image-klein, its card and README.md"
_TRANSFORMER = ReleaseComponent(
    "Flux3Transformer2DModel",
    dtype="bfloat16",
    source="defaults of the class; dtype: AtomicChat/FLUX-3-Image-Klein-GGUF, of the published weights",
)
_TEXT_ENCODER = replace(
    QWEN3_VL_4B,
    class_name="Qwen3VLForConditionalGeneration",
    source=f"{_CARD}: Qwen3-VL-4B-Instruct; {QWEN3_VL_4B.source}",
)
_BASE = Release(
    name="FLUX.3 Image Klein base",
    hub_id="black-forest-labs/flux-3-image-klein-base",
    pipeline_class="Flux3ModularPipeline",
    components={"transformer": _TRANSFORMER, "text_encoder": _TEXT_ENCODER, "vae": FLUX2_VAE},
    scheduler=ReleaseComponent(
        "FlowMatchEulerDiscreteScheduler",
        {"shift": _SHIFT},
        source="the pipeline's own, which no folder holds",
    ),
    tokenizers={"tokenizer": ReleaseTokenizer("Qwen3VLProcessor", ("tokenizer.json",))},
    size=(1024, 1024, 1),
    parameters=5.6e9,
    licence="FLUX Kommunity License",
    gated=True,
    sources={
        "pipeline": "its defaults; diffusers, loaders/single_file_utils.py has the names of the repositories",
        "size": "defaults of the pipeline",
        "parameters": _CARD,
        "licence": f"{_CARD}: both releases",
        "architecture": "no program is known to give it one",
    },
    unconfirmed=("whether base is gated, as the distilled one is", "files of the tokenizer"),
)
_DISTILLED = _BASE.but(
    "FLUX.3 Image Klein",
    "black-forest-labs/flux-3-image-klein",
    transformer=replace(_TRANSFORMER, config={"flow_map": True}),
    pipeline_class="Flux3DistilledModularPipeline",
    distilled="16 steps without guidance",
    unconfirmed=("files of the tokenizer",),
)
FLUX3: tuple[Release, ...] = (_BASE, _DISTILLED)


_NAMES = Spelling(
    prefixes={"transformer": "diffusion_model"},
    renames=(
        ("single_transformer_blocks", "single_blocks"),
        ("mode_blocks", "content_mode_blocks"),
        ("attn.to_q", "q_proj"),
        ("attn.to_k", "k_proj"),
        ("attn.to_v", "v_proj"),
        ("attn.to_out.0", "attn_out"),
        ("ff.linear_in", "mlp_in"),
        ("ff.linear_out", "mlp_out"),
    ),
)
"""The names of the authors' own files, which diffusers reads as well."""
_BLOCK_LAYERS = tuple(
    layer
    for blocks in (*_TRAINED, f"{_OF_INPUTS}.*")
    for layer in under(blocks, (*_ATTENTION, *_FEED_FORWARD))
)
_OTHER_LAYERS = {
    **renamed_in({"time_in": "timestep_embedder"}, ORIGINAL_EMBEDDER),
    **renamed_in({"ref_time_in": "target_timestep_embedder"}, ORIGINAL_EMBEDDER),
    **{
        f"{place}_stream_modulations.{mode}.lin": renamed(f"{place}_stream_modulations.{mode}.linear")
        for place in ("early", "single")
        for mode in (*_MODES, "txt")
    },
    **{f"emb_in.{mode}": renamed(f"x_embedders.{mode}") for mode in _MODES},
    "txt_in": renamed("context_embedder"),
    "final_layer.image.linear": renamed("proj_out"),
    "final_layer.image.adaLN_modulation.1": LAST_NORM,
}
_LORA_LAYERS = replace(
    LayerNames.spelled(_NAMES, _BLOCK_LAYERS),
    layers=(*_BLOCK_LAYERS, *(layer for other in _OTHER_LAYERS.values() for layer in other.layers)),
    others=_OTHER_LAYERS,
)


class Flux3(EditInputs, DiffusersFamily):
    """FLUX.3 Image Klein, base and distilled, from text and from up to ten reference images.

    Train base: its LoRA is used on the distilled model (16 steps without guidance), and
    `validation.model_path: black-forest-labs/flux-3-image-klein` generates the previews there. The distilled
    model takes the level that a step ends at as well, and is not trained here.

    Text, the image and the references first go through five blocks each, which see nothing of the others,
    then through 28 blocks together. References and text are at noise level 0. A LoRA is by default on all of
    these blocks but the five of the references, which get no gradient from items without any; to train them
    too, name them in `lora.target_modules`: `mode_blocks.image_cond.*.attn.to_q` and so on.

    Prompts are read by Qwen3-VL 4B, 20,480 numbers a token: 41 KB each in bfloat16. The padding is seen, and
    is part of the model: prompts are padded to the next multiple of 80 tokens, so that items of different
    windows go through the model one window after another and count as they do by themselves. Processes that
    share its weights (`memory.shard_base`) therefore take one sample at a time. Its pipeline cuts prompts of
    more than 8,192 tokens; here those of more than 1,040 lose their end.

    Its authors trained it on long captions of whole scenes, and advise to have short prompts written out by
    their prompt upsampler, another model: captions and prompts are taken here as they are given.

    A single reference is kept whole, up to 4 megapixels, and padded by its reflection; of several each is
    brought to a megapixel at most and cropped. The sampler's shift is 6.93 at any size and is part of the
    pipeline: no folder holds it.

    LoRA files have the names of the authors' files, as diffusers reads them; ComfyUI's source was not at hand
    to confirm that it takes the same.
    """

    pipelines: ClassVar[tuple[Any, ...]] = (Flux3ModularPipeline, Flux3DistilledModularPipeline)
    releases = FLUX3
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {
        "image": "flux3_klein_lora.yaml",
        "edit": "flux3_klein_edit_lora.yaml",
    }
    transformer_class = Flux3Transformer2DModel
    encoder_classes: ClassVar[Mapping[str, Any]] = {
        "text_encoder": Qwen3VLForConditionalGeneration,
        "vae": AutoencoderKLFlux2,
    }
    lora_spelling = _NAMES
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    record_kinds = ("image", "edit")
    block_lists = ("txt_mode_blocks", "mode_blocks.image", "single_transformer_blocks")
    unused_matmuls = ("attn.to_out.0", "ff.linear_out")
    size_divisor = 16
    max_prompt_tokens = 13 * _WINDOW
    model_fn = model_fn_flux3
    prompt_id = "flux3/prompt/1"
    latents_id = "flux3/latents/1"
    prompt_width = "joint_attention_dim"
    splits_batches = True
    is_counted_by_few_blocks = False
    target_sets: ClassVar[TargetSets] = {
        "attention": tuple(name for blocks in _TRAINED for name in under(blocks, _ATTENTION)),
        "all": tuple(name for blocks in _TRAINED for name in under(blocks, (*_ATTENTION, *_FEED_FORWARD))),
    }
    default_target_modules = target_sets["all"]

    @property
    def max_inputs(self) -> int | None:
        """10, by its authors' word."""
        return _MAX_INPUTS

    def input_size(self, width: int, height: int, num_inputs: int = 1) -> tuple[int, int]:
        if num_inputs == 1:
            shown = _SIZES._resize_if_canvas_exceeds_area(_Size(width, height))
            canvas_height, canvas_width = _SIZES._get_canvas_height_width(shown.height, shown.width)
            return canvas_width, canvas_height
        scale = min(1.0, math.sqrt(_LARGEST_OF_SEVERAL / (width * height)))
        fitted = [int(side * scale) // self.size_divisor * self.size_divisor for side in (width, height)]
        if not all(fitted):
            raise UserError(
                f"{width}x{height} pixels are too narrow for one of several input images of this family"
            )
        return fitted[0], fitted[1]

    @property
    def components_without_weights(self) -> tuple[str, ...]:
        """The tokenizer; its sampler is a part of the pipeline."""
        return self.tokenizers

    @property
    def sampler(self) -> str:
        return str(self.scheduler_config["_class_name"])

    @cached_property
    def scheduler_config(self) -> ModelSettings:
        config = {"_class_name": FlowMatchEulerDiscreteScheduler.__name__, "shift": _SHIFT}
        return ModelSettings(config, self.folder.path / "modular_model_index.json")

    @property
    def is_distilled(self) -> bool:
        return bool(self.folder.component_config("transformer").get("flow_map"))

    @property
    def distilled(self) -> str | None:
        """flow_map in the settings of its transformer: refused, as only base is trained."""
        return "flow_map in the settings of its transformer; train its base" if self.is_distilled else None

    def check_trained(self) -> None:
        if self.is_distilled:
            raise UserError(
                f"model.path: {self.folder.path} is a distilled FLUX.3 (flow_map), not to be trained: "
                "train its base, such as black-forest-labs/flux-3-image-klein-base, and name this one in "
                "validation.model_path, to see the LoRA on it"
            )

    @property
    def prompt_template(self) -> Any:
        return _WINDOW, _READ_LAYERS

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        # What its processor does with texts, whose class needs torchvision.
        tokenizer = pipeline.tokenizer
        reader = SimpleNamespace(tokenizer=tokenizer, apply_chat_template=tokenizer.apply_chat_template)
        rows = [
            Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds(
                pipeline.text_encoder,
                reader,
                prompt.text,
                device,
                self.max_prompt_tokens,
                _WINDOW,
                _READ_LAYERS,
            )
            for prompt in prompts
        ]
        return [{"prompt_embeds": row_bld[0].cpu()} for row_bld in rows]

    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        """With the chat around each text, which counts too."""
        chats = [[{"role": "user", "content": text}] for text in texts]
        encoded = self.load_tokenizer().apply_chat_template(chats, add_generation_prompt=True)
        return [len(tokens) for tokens in encoded["input_ids"]]

    def media_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        vae = self.load_component("vae", dtype).to(device)
        # The pipeline's own processor is one of references, which it may pad.
        processors = {"image_processor": VaeImageProcessor(), "references": Flux3ImageProcessor()}
        return SimpleNamespace(vae=vae, **processors)

    def encode_given(self, pipeline: Any, item: Media) -> EncodedMedia:
        mode = "fill" if len(item.inputs) == 1 else "crop"
        encoded = {}
        for place, image in enumerate(item.inputs):
            pixels_bchw, _ = pipeline.references.preprocess(image, resize_mode=mode)
            encoded[f"{INPUT}{place}"] = encode_latents(pipeline.vae, pixels_bchw)[0]
        return encoded

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "prompt_embeds_bld": stacked(conditioning, "prompt_embeds", like),
            "input_latents_bchw": stack_inputs(conditioning, like),
        }

    def preview_pipeline(self, model: torch.nn.Module, vae_dtype: torch.dtype, **settings: Any) -> Any:
        whole = super().preview_pipeline(model, vae_dtype, **settings)
        blocks = whole.blocks
        for name in ("prompt_upsampler", "text_encoder"):  # their prompts are already encoded
            blocks.sub_blocks.pop(name)
        pipeline = type(whole)(blocks=blocks)
        pipeline.update_components(transformer=whole.transformer, vae=whole.vae, scheduler=whole.scheduler)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def usage_setup(self, request: PreviewRequest) -> list[str]:
        return [
            "# The prompt as it is: the model that writes it out is not asked.",
            'pipeline._blocks.sub_blocks.pop("prompt_upsampler", None)',
        ]

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        return {"image": INPUT_IMAGE} if request.inputs else {}

    def generate(self, pipeline: Any, request: PreviewRequest) -> list[Image]:
        like = device_and_dtype(pipeline.transformer)
        prompts = {"prompt_embeds": request.conditioning}
        if not self.is_distilled:
            scale, is_guided = request.guidance_scale, request.is_guided
            pipeline.guider = pipeline.guider.new(guidance_scale=scale, enabled=is_guided)
            prompts |= {"negative_prompt_embeds": request.negative} if is_guided else {}
        images: list[Image] = pipeline(
            image=list(request.inputs) or None,
            **{name: row["prompt_embeds"][None].to(**like) for name, row in prompts.items()},
            output="images",
            **request.call_arguments(),
        )
        return images


class _Size(NamedTuple):
    """An image of which only the size is known."""

    width: int
    height: int

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height


class _Sizes(Flux3ImageProcessor):  # type: ignore[misc]  # diffusers' class has no types
    """Prepares sizes of references instead of images."""

    def resize(self, image: _Size, height: int, width: int) -> _Size:
        return _Size(width, height)


_SIZES = _Sizes()


def tiny() -> Flux3ModularPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of each kind, of 32 channels; 32 latent channels at 1/8 size. Its processor does the same with
    texts as that of the released model, whose class needs torchvision.
    """
    tokenizer = qwen2_tokenizer()
    # A layer more than the last that is read, which has no norm after it.
    text_encoder = tiny_qwen3_vl_lm(tokenizer, num_layers=max(_READ_LAYERS) + 1)
    with seeded(0):
        transformer = Flux3Transformer2DModel(
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=len(_READ_LAYERS) * text_encoder.config.text_config.hidden_size,
            axes_dims_rope=(4, 4, 4, 4),
        )
    pipeline = handled_as_others(Flux3ModularPipeline)()
    pipeline.update_components(
        text_encoder=text_encoder,
        tokenizer=qwen3_vl_processor(tokenizer),
        transformer=transformer.eval(),
        vae=tiny_flux2_vae(),
    )
    return pipeline
