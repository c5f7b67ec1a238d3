"""This file trains Ideogram 4 (text to image), whose previews are guided by a second transformer.

Layouts: b batch, c channels of a token (2 x 2 places of 32 latent channels), h and w height and width in
tokens; l tokens, d channels.
Sources: diffusers ``transformer_ideogram4.py`` and ``pipeline_ideogram4.py``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Unpack

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Ideogram4Pipeline,
    Ideogram4Transformer2DModel,
)
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import QWEN3_VL_ACTIVATION_LAYERS
from PIL.Image import Image
from torch.nn.functional import pad
from transformers import BatchEncoding, Qwen3VLModel

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, fused, renamed, under
from diffsynth_lite.lora.shared_names import QKV
from diffsynth_lite.lora.spelling import JOINED_IN_COMFYUI
from diffsynth_lite.media import Prompt, RecordKind
from diffsynth_lite.pipelines.base.diffusers_components import assemble
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily, device_and_dtype
from diffsynth_lite.pipelines.base.family import Conditioning, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.latents import encode_patched_latents
from diffsynth_lite.pipelines.base.model_function import Checkpointing, checkpointed, model_function
from diffsynth_lite.pipelines.base.preview_request import in_turn
from diffsynth_lite.releases.components import FLUX2_VAE, MUSUBI, QWEN3_VL_8B
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

_PATCH = 2
_GUIDE = "unconditional_transformer"
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_UNSHIFTED_SIDE = 512  # pixels; a literal in the pipeline


@model_function
def model_fn_ideogram4(
    transformer: torch.nn.Module,
    latents_bchw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_ld: Sequence[torch.Tensor],
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of Ideogram 4, each transformer block run by the gradient engine.

    Args:
        transformer: an ``Ideogram4Transformer2DModel``, plain or wrapped by DDP.
        latents_bchw: (B, 128, H, W), noisy normalised latents, one place a token.
        timestep: (B,), in [0, 1] and reversed: 0 is pure noise, 1 is none.
        prompt_embeds_ld: of each sample (L_i, D), prompt embeddings without padding, on any device. Shorter
            ones are padded on the left, and what a batch adds is masked.

    Returns:
        (B, 128, H, W), what the model predicts, which is ``latents - noise``.
    """
    height, width = latents_bchw.shape[-2:]
    lengths = [len(row_ld) for row_ld in prompt_embeds_ld]
    longest, num_places = max(lengths), height * width
    positions, segments, roles = Ideogram4Pipeline._prepare_ids(
        lengths, height, width, longest, latents_bchw.device
    )
    # Each is moved within the expression, so that no copy of what is this wide waits next to the batch.
    embeds_bld = torch.stack(
        [
            pad(row_ld.to(latents_bchw), (0, 0, longest - len(row_ld), num_places))
            for row_ld in prompt_embeds_ld
        ]
    )
    with checkpointed(Ideogram4, transformer, gradient_checkpoint_forward, **checkpointing):
        predicted_bld = transformer(
            hidden_states=pad(latents_bchw.flatten(2).transpose(1, 2), (0, 0, longest, 0)),
            timestep=timestep,
            encoder_hidden_states=embeds_bld,
            position_ids=positions,
            segment_ids=segments,
            indicator=roles,
            return_dict=False,
        )[0]
    of_image: torch.Tensor = predicted_bld[:, longest:]
    return of_image.transpose(1, 2).reshape(latents_bchw.shape)


_SDNEXT = "SD.Next, data/reference-base.json"
_TRANSFORMER = ReleaseComponent(
    "Ideogram4Transformer2DModel",
    dtype="bfloat16",
    source=f"{MUSUBI}ideogram4/ideogram4_model.py: the defaults of the class; dtype from the name",
)
_RELEASE = Release(
    name="Ideogram 4 in bfloat16",
    hub_id="CalamitousFelicitousness/Ideogram-4-bf16-Diffusers",
    pipeline_class="Ideogram4Pipeline",
    components={
        "transformer": _TRANSFORMER,
        "text_encoder": QWEN3_VL_8B,
        "vae": FLUX2_VAE,
        "unconditional_transformer": _TRANSFORMER,
    },
    scheduler=ReleaseComponent(
        "FlowMatchEulerDiscreteScheduler",
        source="signature of the pipeline in diffusers, which computes the noise levels itself",
    ),
    tokenizers={"tokenizer": ReleaseTokenizer("Qwen2Tokenizer", ("tokenizer.json",))},
    size=(2048, 2048, 1),
    parameters=9.3e9,
    licence="Ideogram's non-commercial model agreement",
    gated=None,
    architecture="Ideogram-4",
    version="ideogram4",
    sources={
        "pipeline": "signature of the pipeline in diffusers",
        "size": "defaults of the pipeline",
        "parameters": _SDNEXT,
        "licence": "musubi-tuner, docs/ideogram4.md, which calls it non-commercial",
        "architecture": f"{MUSUBI}utils/sai_model_spec.py, dataset/architectures.py",
    },
    unconfirmed=(
        "that the copy, which the makers of the model did not release, has these settings",
        "settings of the scheduler",
        "files of the tokenizer",
    ),
)


_BLOCK = "layers.*"
_GATED = under("feed_forward", ("w1", "w2", "w3"))
_LORA_LAYERS = LayerNames(
    layers=(
        *under(f"{_BLOCK}.attention", (*QKV, "to_out.0")),
        *under(_BLOCK, (*_GATED, "adaln_modulation")),
        *("input_proj", "llm_cond_proj", "t_embedding.mlp_in", "t_embedding.mlp_out", "adaln_proj"),
        *("final_layer.linear", "final_layer.adaln_modulation"),
    ),
    kohya={
        f"{_BLOCK}.attention.qkv": fused(*under(f"{_BLOCK}.attention", QKV)),
        f"{_BLOCK}.attention.o": renamed(f"{_BLOCK}.attention.to_out.0"),
    },
)


class Ideogram4(DiffusersFamily):
    """Ideogram 4, from text.

    34 single-stream blocks, Qwen3-VL prompts, the autoencoder of FLUX.2: 128 channels a token of 16 x 16
    pixels.

    The model is made for captions in JSON, in the schema of its prompt guide; it reads plain ones, too. The
    transformer reads the states of 13 layers of Qwen3-VL, 53,248 numbers a token: in bfloat16 a prompt of 100
    tokens takes 11 MB of the cache and one of 2048, the longest, 218. Padding is not kept. Longer prompts,
    which the pipeline refuses, lose their end.

    Previews are guided by a second transformer of the same size (``unconditional_transformer``), which sees
    no prompt and is not trained; it is loaded only for previews with a guidance scale above 1, in the format
    of the first. There is no negative prompt. The scale is one for all steps, where the pipeline by default
    has 7 and, in its last steps, 3.

    Noise levels grow with the image, as by its pipeline: a shift of 2 at 1024 x 1024 pixels and of 4 at
    2048 x 2048. The pipeline, diffusers' training script and musubi-tuner have a logit-normal density of a
    standard deviation of 1.5 around that.

    diffusers' guide (``README_ideogram4.md``) trains without autocast, under which images were gray and noisy
    in bfloat16, and NaN in float16. One cause is known: positions count from 65536, where bfloat16 is too
    coarse for them. diffusers computes them in float32 since its pull request 13922, and a test holds it to
    that under the CPU's autocast; autocast on a GPU was not tried. Where previews with the LoRA get gray, set
    ``train.mixed_precision: "no"``, which is what that guide does.

    Its weights are released in 8 and in 4 bits only; the folder named here is a copy in bfloat16. ComfyUI
    has one layer for queries, keys and values, and no names for a LoRA on each of them: it takes what
    ``diffsynth-lite convert --to comfyui`` makes of the file. No layer of the last block is unused.
    """

    pipelines = (Ideogram4Pipeline,)
    releases = (_RELEASE,)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image": "ideogram4_lora.yaml"}
    transformer_class = Ideogram4Transformer2DModel
    lora_spelling = JOINED_IN_COMFYUI
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    encoder_classes: ClassVar[Mapping[str, Any]] = {"text_encoder": Qwen3VLModel, "vae": AutoencoderKLFlux2}
    block_lists = ("layers",)
    masks_attention = "always"
    size_divisor = 16
    max_prompt_tokens = 2048
    model_fn = model_fn_ideogram4
    is_reversed = True
    prompt_id = "ideogram4/prompt/1"
    prompt_template = QWEN3_VL_ACTIVATION_LAYERS
    latents_id = "ideogram4/latents/1"
    prompt_width = "llm_features_dim"
    target_sets: ClassVar[TargetSets] = {
        "attention": _ATTENTION,
        # That of ``final_layer``, which ends alike, is in no block.
        "all": (*_ATTENTION, "w1", "w2", "w3", "layers.*.adaln_modulation"),
    }
    default_target_modules = (*_ATTENTION, "w1", "w2", "w3")

    @property
    def components(self) -> tuple[str, ...]:
        return (*super().components, _GUIDE)

    def load_prompt_encoder(
        self, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Sequence[Prompt]], list[Conditioning]]:
        tokenizer = _Cutting(self.load_tokenizer(), self.max_prompt_tokens)
        pipeline = assemble(self.pipeline, tokenizer=tokenizer, **self.load_text_encoders(dtype, device))

        @torch.no_grad()
        def encode(prompts: Sequence[Prompt]) -> list[Conditioning]:
            texts = [prompt.text for prompt in prompts]
            lengths = [min(length, self.max_prompt_tokens) for length in tokenizer.lengths(texts)]
            # One by one: a token is as wide as 13 layers, in fp32, and padding would only be cut away again.
            return [
                {"prompt_embeds": pipeline.encode_prompt(text, 0, 0, length, device)[0][0].to("cpu", dtype)}
                for text, length in zip(texts, lengths, strict=True)
            ]

        return encode

    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        """With the chat around each text, which counts too."""
        return _Cutting(self.load_tokenizer(), self.max_prompt_tokens).lengths(texts)

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        return encode_patched_latents(vae, pixels, _place_first)

    def resolution_shift(self, latents_shape: Sequence[int]) -> float:
        """That of the pipeline, which reads no settings: the side of a square of as many pixels, over 512."""
        return math.sqrt(self.num_tokens(latents_shape)) * self.size_divisor / _UNSHIFTED_SIDE

    def family_shift(self, latents_shape: Sequence[int]) -> float:
        """That of the pipeline, 2 at 1024 x 1024 pixels."""
        return self.resolution_shift(latents_shape)

    def timestep(self, sigma: torch.Tensor, like: Mapping[str, Any]) -> torch.Tensor:
        return super().timestep(sigma, like).to(**like)

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds_ld": [sample["prompt_embeds"] for sample in conditioning]}

    def sample(
        self, transformer: torch.nn.Module, vae_dtype: torch.dtype, requests: Sequence[PreviewRequest]
    ) -> list[list[Image]]:
        like = device_and_dtype(transformer)
        guide: torch.nn.Module = _NoGuide(like)
        if any(request.guidance_scale > 1 for request in requests):
            guide = self.load_component(_GUIDE, like["dtype"]).requires_grad_(False).to(like["device"])
        pipeline = self.preview_pipeline(transformer, vae_dtype, unconditional_transformer=guide)
        return [self.generate(pipeline, request) for request in in_turn(requests)]

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        # Without these it has scales of its own, one a step; its guidance is off at 1.
        return {"guidance_scale": max(request.guidance_scale, 1.0), "guidance_schedule": None}

    def generate(self, pipeline: Any, request: PreviewRequest) -> list[Image]:
        like = device_and_dtype(pipeline.transformer)
        embeds_bld = request.conditioning["prompt_embeds"][None].to(**like)
        length = embeds_bld.shape[1]

        def encode(*, grid_h: int, grid_w: int, device: Any, **_: Any) -> tuple[torch.Tensor, ...]:
            layout = pipeline._prepare_ids([length], grid_h, grid_w, length, device)
            return pad(embeds_bld, (0, 0, 0, grid_h * grid_w)), *layout

        pipeline.encode_prompt = encode  # which the pipeline has no argument for
        images: list[Image] = pipeline(
            prompt="",
            max_sequence_length=length,
            **self.usage_arguments(request),
            **request.call_arguments(),
        ).images
        return images


def _place_first(latents_bchw: torch.Tensor) -> torch.Tensor:
    """(B, 4 C, h / 2, w / 2), 2 x 2 places in one: row, column, channel, as the pipeline unpacks them."""
    batch, channels, height, width = latents_bchw.shape
    patches = latents_bchw.view(batch, channels, height // _PATCH, _PATCH, width // _PATCH, _PATCH)
    return patches.permute(0, 3, 5, 1, 2, 4).reshape(batch, -1, height // _PATCH, width // _PATCH)


class _Cutting:
    """The tokenizer, as the pipeline calls it; what is longer than it takes loses its end."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        chat: str = self.tokenizer.apply_chat_template(list(conversation), **settings)
        return chat

    def __call__(self, text: str, **settings: Any) -> BatchEncoding:
        cut: BatchEncoding = self.tokenizer(text, truncation=True, max_length=self.max_tokens, **settings)
        return cut

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each, uncut, with the chat around it."""
        chats = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in texts]
        whole = self.tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        return [len(tokens) for tokens in self.tokenizer(whole, add_special_tokens=False)["input_ids"]]


class _NoGuide(torch.nn.Module):
    """Replaces the second transformer where its weight is 0."""

    def __init__(self, like: Mapping[str, Any]) -> None:
        super().__init__()
        self.device, self.dtype = like["device"], like["dtype"]
        self.config = SimpleNamespace()

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
        """Zeros, of the shape of the latents."""
        return (torch.zeros_like(hidden_states),)


def tiny() -> Ideogram4Pipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of 32 channels in each transformer; a text encoder of 36 layers, because the pipeline takes the
    embeddings after the last; 32 latent channels at 1/8 size.
    """
    tokenizer = tokenizers.qwen2_tokenizer()
    text_encoder = text_encoders.tiny_qwen3_vl(tokenizer, num_layers=QWEN3_VL_ACTIVATION_LAYERS[-1] + 1)
    width = text_encoder.config.text_config.hidden_size

    def transformer() -> Ideogram4Transformer2DModel:
        return Ideogram4Transformer2DModel(
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            intermediate_size=64,
            adaln_dim=16,
            llm_features_dim=width * len(QWEN3_VL_ACTIVATION_LAYERS),
            mrope_section=(4, 2, 2),
        )

    with seeded(0):
        first, second = transformer(), transformer()
    return Ideogram4Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=autoencoders.tiny_flux2_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=first,
        unconditional_transformer=second,
    )
