"""This file trains Anima (text to image), whose pipeline is a modular one.

Layouts: b batch, c latent channels, f frames (1), h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_cosmos.py``, ``condition_embedder_anima.py`` and the blocks in
``modular_pipelines/anima``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, Unpack

import torch
from diffusers import (
    AnimaAutoBlocks,
    AnimaModularPipeline,
    AnimaTextConditioner,
    AutoencoderKLQwenImage,
    CosmosTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    SequentialPipelineBlocks,
)
from diffusers.models.transformers import transformer_cosmos
from diffusers.modular_pipelines.anima.before_denoise import AnimaTextConditioningStep
from diffusers.modular_pipelines.anima.encoders import AnimaTextEncoderStep
from PIL.Image import Image
from torch.nn.functional import interpolate
from transformers import Qwen3Model

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, under
from diffsynth_lite.lora.shared_names import ATTENTIONS, EMBEDDER
from diffsynth_lite.lora.spelling import Spelling
from diffsynth_lite.media import Prompt, RecordKind
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily, device_and_dtype
from diffsynth_lite.pipelines.base.family import Conditioning, TargetSets
from diffsynth_lite.pipelines.base.folder import ComponentFile
from diffsynth_lite.pipelines.base.model_function import (
    Checkpointing,
    checkpointed,
    model_function,
    pad_tokens,
)
from diffsynth_lite.pipelines.base.preview_request import PreviewRequest
from diffsynth_lite.pipelines.base.single_file import holds, names_in
from diffsynth_lite.releases.components import DIFFUSERS, ONE_TRAINER, QWEN_VAE, encoder_sizes, flow_euler
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers
from diffsynth_lite.testing.modular import handled_as_others

_PATCH = 2
_ENCODING = ("text_encoder", "denoise.text_conditioning")
"""Blocks of the pipeline that previews leave out: their prompts are already encoded."""
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_FEED_FORWARD = ("ff.net.0.proj", "ff.net.2")
_MODULATION = tuple(f"norm{norm}.linear_{layer}" for norm in (1, 2, 3) for layer in (1, 2))


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Scope in which diffusers' Cosmos transformer also runs where torchvision is not installed.

    Its forward resizes the padding mask with ``torchvision.transforms``, which its module imports if it is
    there, and calls in any case. The one function that it calls gives what torch's ``interpolate`` does.
    """
    if hasattr(transformer_cosmos, "transforms"):
        yield
        return
    stand_in = SimpleNamespace(
        functional=SimpleNamespace(resize=_resized), InterpolationMode=SimpleNamespace(NEAREST="nearest")
    )
    transformer_cosmos.transforms = stand_in
    try:
        yield
    finally:
        del transformer_cosmos.transforms


def _resized(mask_bchw: torch.Tensor, size: Sequence[int], interpolation: str) -> torch.Tensor:
    resized: torch.Tensor = interpolate(mask_bchw.float(), size=list(size), mode=interpolation)
    return resized.to(mask_bchw.dtype)


@model_function
def model_fn_anima(
    transformer: torch.nn.Module,
    latents_bcfhw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    *,
    padding_mask: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of Anima, each transformer block run by the gradient engine.

    Args:
        transformer: a ``CosmosTransformer3DModel``, plain or wrapped by DDP.
        latents_bcfhw: (B, 16, 1, H, W), noisy normalised latents, H and W even.
        timestep: (B,), noise level in [0, 1].
        prompt_embeds_bld: (B, 512, D) what the text conditioner made of the prompts, zeros after them, which
            the model sees: it was trained so.
        padding_mask: (1, 1, H', W'), 1 where the image is none, in any size; None is none of it, as the
            pipeline has it.
        attention_mask: (B, 512), True for a token that is seen; None, as in the pipeline, is all.

    Returns:
        (B, 16, 1, H, W), the predicted velocity ``noise - latents``.
    """
    if padding_mask is None:
        padding_mask = latents_bcfhw.new_zeros(1, 1, *latents_bcfhw.shape[-2:])
    with (
        without_torchvision(),
        checkpointed(Anima, transformer, gradient_checkpoint_forward, **checkpointing),
    ):
        velocity_bcfhw: torch.Tensor = transformer(
            hidden_states=latents_bcfhw,
            timestep=timestep,
            encoder_hidden_states=prompt_embeds_bld,
            attention_mask=attention_mask,
            padding_mask=padding_mask,
            return_dict=False,
        )[0]
    return velocity_bcfhw


_CONVERTED = f"{DIFFUSERS}scripts/convert_anima_to_diffusers.py"
_BYTES = "the bytes of the files of circlestone-labs/Anima, which it was converted from, in public loaders"
_NOTES = "serenitymojo, a public port, its notes on Anima"
_RELEASE = Release(
    name="Anima Base 1.0",
    hub_id="circlestone-labs/Anima-Base-v1.0-Diffusers",
    pipeline_class="AnimaModularPipeline",
    components={
        "transformer": ReleaseComponent(
            "CosmosTransformer3DModel",
            {
                "extra_pos_embed_type": None,
                "num_attention_heads": 16,
                "rope_scale": (1.0, 4.0, 4.0),
            },
            dtype="bfloat16",
            source="Cosmos-2.0-Diffusion-2B-Text2Image in "
            f"{DIFFUSERS}scripts/convert_cosmos_to_diffusers.py; its config.json in {_NOTES}; dtype from "
            f"{_BYTES}",
        ),
        "text_conditioner": ReleaseComponent(
            "AnimaTextConditioner",
            dtype="bfloat16",
            source=f"defaults of the class; {_CONVERTED}; dtype of the transformer, whose file holds it",
        ),
        "text_encoder": ReleaseComponent(
            "Qwen3Model",
            {"tie_word_embeddings": False, **encoder_sizes(1024, 3072, 16, 28, 8, 151936, 128)},
            dtype="bfloat16",
            source=f"Qwen3-0.6B, by {_CONVERTED}; dtype from {_BYTES}",
        ),
        "vae": QWEN_VAE,
    },
    scheduler=flow_euler(3.0, _CONVERTED),
    tokenizers={
        "tokenizer": ReleaseTokenizer("Qwen2Tokenizer", ("tokenizer.json",)),
        "t5_tokenizer": ReleaseTokenizer("T5Tokenizer", ("tokenizer.json",)),
    },
    size=(1024, 1024, 1),
    parameters=2e9,
    licence="CircleStone Labs Non-Commercial, which allows commercial use of images; made from a model "
    "under the NVIDIA Open Model License",
    gated=None,
    architecture="Anima",
    version=None,
    sources={
        "pipeline": "local-ai skills, anima references, of its modular_model_index.json; class of the "
        "tokenizers: a public converter, which writes the same index",
        "size": "defaults of the pipeline",
        "parameters": "the card of the model on the hub",
        "licence": "discussion 37 of circlestone-labs/Anima on the hub",
        "architecture": f"{ONE_TRAINER}anima-lora.json",
    },
    unconfirmed=("whether it is gated", "files of the tokenizers"),
)


_NAMES = Spelling(
    prefixes={"transformer": "diffusion_model"},
    renames=(
        ("transformer_blocks", "blocks"),
        ("norm1.linear_1", "adaln_modulation_self_attn.1"),
        ("norm1.linear_2", "adaln_modulation_self_attn.2"),
        ("norm2.linear_1", "adaln_modulation_cross_attn.1"),
        ("norm2.linear_2", "adaln_modulation_cross_attn.2"),
        ("norm3.linear_1", "adaln_modulation_mlp.1"),
        ("norm3.linear_2", "adaln_modulation_mlp.2"),
        ("attn1", "self_attn"),
        ("attn2", "cross_attn"),
        ("to_q", "q_proj"),
        ("to_k", "k_proj"),
        ("to_v", "v_proj"),
        ("to_out.0", "output_proj"),
        ("ff.net.0.proj", "mlp.layer1"),
        ("ff.net.2", "mlp.layer2"),
        ("norm_out.linear_1", "final_layer.adaln_modulation.1"),
        ("norm_out.linear_2", "final_layer.adaln_modulation.2"),
        ("proj_out", "final_layer.linear"),
        ("time_embed.t_embedder", "t_embedder.1"),
        ("patch_embed.proj", "x_embedder.proj.1"),
    ),
    unknown_to_comfyui=(),
)
"""The names of the models' own repository, which ComfyUI has, too."""
_LORA_LAYERS = LayerNames.spelled(
    _NAMES,
    (
        *under("transformer_blocks.*", (*ATTENTIONS, "ff.net.0.proj", "ff.net.2")),
        *(f"transformer_blocks.*.norm{norm}.{layer}" for norm in (1, 2, 3) for layer in EMBEDDER),
        *under("time_embed.t_embedder", EMBEDDER),
        *(*under("norm_out", EMBEDDER), "patch_embed.proj", "proj_out"),
    ),
)


class Anima(DiffusersFamily):
    """Anima, from text or tags.

    The transformer of Cosmos Predict 2 with 2 billion parameters: 28 blocks, each with self-attention,
    attention to the prompt and a feed-forward; the autoencoder of Qwen-Image. A text conditioner of 6 layers
    turns the states of Qwen3-0.6B and the tokens of T5's vocabulary into the transformer's input, padded with
    zeros to 512 tokens. It stays frozen, as the card of the model advises for LoRA (`llm_adapter_lr = 0` of
    diffusion-pipe), and the cache keeps its output, without the padding.

    Its folder is a modular one (`modular_model_index.json`), and previews are generated by the blocks of
    diffusers' `AnimaModularPipeline`. In diffusers 0.42.1 its transformer calls torchvision without requiring
    it: to generate with your LoRA there, `pip install torchvision`. Nothing here needs it.

    The sampler's shift is 3 at any size, which `objective.shift: family` trains with. sd-scripts
    (`docs/anima_train_network.md`) and OneTrainer train without one, on a normal distribution of levels
    (`logit_normal`), as does the recipe here.

    A checkpoint of ComfyUI's as `model.transformer_file` also holds the conditioner, which is read from it.
    That of Anima 2.9B, which people made of this model with 40 blocks, is trained with all of them.

    LoRA files have the names of the original model, as ComfyUI's: diffusers reads these as well. A file of
    another trainer that is also on the conditioner (`llm_adapter`) is refused by the names of these layers.
    """

    pipelines: ClassVar[tuple[Any, ...]] = (AnimaModularPipeline,)
    releases = (_RELEASE,)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image": "anima_lora.yaml"}
    transformer_class = CosmosTransformer3DModel
    lora_spelling = _NAMES
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    encoder_classes: ClassVar[Mapping[str, Any]] = {
        "text_encoder": Qwen3Model,
        "text_conditioner": AnimaTextConditioner,
        "vae": AutoencoderKLQwenImage,
    }
    tokenizers = ("tokenizer", "t5_tokenizer")
    prompt_tokenizer = "t5_tokenizer"  # there are more tokens of it in a text
    block_lists = ("transformer_blocks",)
    unused_matmuls = ("attn1.to_out.0", "attn2.to_out.0", "ff.net.2")
    size_divisor = 16
    max_prompt_tokens = 512
    patch = _PATCH
    model_fn = model_fn_anima
    latents_id = "anima/latents/1"
    prompt_width = "text_embed_dim"
    default_target_modules = (*_ATTENTION, *_FEED_FORWARD)
    target_sets: ClassVar[TargetSets] = {
        "attention": _ATTENTION,
        "all": (*default_target_modules, *_MODULATION),
    }

    def take_files(self, files: Mapping[str, ComponentFile]) -> None:
        """The text conditioner is read from the transformer's file, too, where that holds it."""
        super().take_files(files)
        file = files.get("transformer")
        if file is not None and holds(names_in(file), AnimaTextConditioner):
            self.folder = replace(self.folder, files={**files, "text_conditioner": file})

    def check_folder(self, *, with_weights: bool = True) -> None:
        super().check_folder(with_weights=with_weights)
        if self._num_text_tokens < self.max_prompt_tokens:
            raise UserError(
                f"model.path: {self.folder.place('text_conditioner')} pads prompts of up to "
                f"{self.max_prompt_tokens} tokens to {self._num_text_tokens} (min_sequence_length), so that "
                "one would count otherwise next to a longer one; no release does, get the folder again"
            )

    @property
    def _num_text_tokens(self) -> int:
        """Tokens that the transformer is given of any prompt."""
        length: int = self.folder.component_config("text_conditioner").get("min_sequence_length", 512)
        return length

    def prompt_encoder_id(self, dtype: torch.dtype) -> str:
        parts = self.folder.fingerprints("text_encoder", "text_conditioner", *self.tokenizers)
        return f"anima/prompt/1 {parts} {dtype} {self.max_prompt_tokens}"

    def load_prompt_encoder(
        self, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Sequence[Prompt]], list[Conditioning]]:
        conditioner = self.load_component("text_conditioner", dtype).to(device)
        pipeline = self.prompt_pipeline(dtype, device, text_conditioner=conditioner)

        @torch.no_grad()
        def encode(prompts: Sequence[Prompt]) -> list[Conditioning]:
            # One by one: padding at the wrong side would move the conditioner's positions.
            return [{"prompt_embeds": self._encoded(pipeline, prompt.text, dtype)} for prompt in prompts]

        return encode

    def _encoded(self, pipeline: Any, text: str, dtype: torch.dtype) -> torch.Tensor:
        """(L, D), what the conditioner makes of the tokens of a text, without the zeros after them."""
        device = pipeline.text_conditioner.device
        read = AnimaTextEncoderStep.encode_prompt(
            pipeline,
            [text],
            prepare_unconditional_embeds=False,
            max_sequence_length=self.max_prompt_tokens,
            device=device,
            dtype=dtype,
        )
        given = {name: value for name, value in read.items() if value is not None}
        embeds_bld: torch.Tensor = AnimaTextConditioningStep._condition_prompt_embeds(
            pipeline, **given, device=device, conditioning_dtype=dtype, output_dtype=dtype
        )
        return embeds_bld[0, : given["t5_input_ids"].shape[1]].cpu().clone()

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds_bld": self._padded(conditioning, like)}

    def _padded(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> torch.Tensor:
        rows_ld = [sample["prompt_embeds"] for sample in conditioning]
        embeds_bld, _ = pad_tokens(rows_ld, length=self._num_text_tokens, **like)
        return embeds_bld

    def preview_pipeline(self, model: torch.nn.Module, vae_dtype: torch.dtype, **settings: Any) -> Any:
        whole = super().preview_pipeline(model, vae_dtype, **settings)
        blocks = AnimaAutoBlocks().get_workflow("text2image").sub_blocks
        generation = SequentialPipelineBlocks.from_blocks_dict(
            {name: block for name, block in blocks.items() if name not in _ENCODING}
        )
        pipeline = self.pipeline(blocks=generation)
        pipeline.update_components(transformer=whole.transformer, vae=whole.vae, scheduler=whole.scheduler)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def generate(self, pipeline: Any, request: PreviewRequest) -> list[Image]:
        like = device_and_dtype(pipeline.transformer)
        scale, is_guided = request.guidance_scale, request.is_guided
        pipeline.guider = pipeline.guider.new(guidance_scale=scale, enabled=is_guided)
        with without_torchvision():
            images: list[Image] = pipeline(
                prompt_embeds=self._padded([request.conditioning], like),
                negative_prompt_embeds=self._padded([request.negative], like) if is_guided else None,
                output="images",
                **request.call_arguments(),
            )
        return images


def tiny() -> AnimaModularPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of 36 channels, a conditioner of one layer; 16 latent channels at 1/8 size with the real
    model's statistics.
    """
    tokenizer, t5 = tokenizers.qwen2_tokenizer(), tokenizers.t5_tokenizer()
    text_encoder = text_encoders.tiny_qwen3(tokenizer)
    with seeded(0):
        conditioner = AnimaTextConditioner(
            source_dim=text_encoder.config.hidden_size,
            target_dim=16,
            model_dim=16,
            num_layers=1,
            num_attention_heads=2,
            target_vocab_size=len(t5),
        )
        transformer = CosmosTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=18,
            num_layers=2,
            mlp_ratio=2.0,
            text_embed_dim=16,
            adaln_lora_dim=4,
            rope_scale=(1.0, 4.0, 4.0),
            extra_pos_embed_type=None,
        )
    pipeline = handled_as_others(AnimaModularPipeline)()
    pipeline.update_components(
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        t5_tokenizer=t5,
        text_conditioner=conditioner.eval(),
        transformer=transformer.eval(),
        vae=autoencoders.tiny_qwen_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),  # as in the released repository
    )
    return pipeline
