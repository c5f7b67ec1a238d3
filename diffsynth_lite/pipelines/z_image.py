"""This file trains Z-Image (text to image): the base model and Turbo.

Layouts: b batch, c latent channels, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_z_image.py`` and ``pipeline_z_image.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Model

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, fused, renamed, under
from diffsynth_lite.lora.shared_names import QKV
from diffsynth_lite.lora.spelling import taken_by_comfyui
from diffsynth_lite.media import RecordKind
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import Conditioning, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.model_function import Checkpointing, checkpointed, model_function
from diffsynth_lite.releases.components import FLUX_VAE, LICENCES, MUSUBI, QWEN3_4B, flow_euler
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

_PATCH = 2
# Source: InvokeAI, pull request 8799, which distinguishes Turbo from the base model by it.
_SHIFT_OF_TURBO = 3.0
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


@model_function
def model_fn_z_image(
    transformer: torch.nn.Module,
    latents_bchw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_ld: Sequence[torch.Tensor],
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of Z-Image, each transformer block run by the gradient engine.

    Args:
        transformer: a ``ZImageTransformer2DModel``, plain or wrapped by DDP.
        latents_bchw: (B, 16, H, W), noisy normalised latents, H and W even.
        timestep: (B,), in [0, 1] and reversed: 0 is pure noise, 1 is none.
        prompt_embeds_ld: of each sample (L_i, D), prompt embeddings without padding. The transformer fills
            each up to a multiple of 32 tokens with an embedding of its own, and masks what a batch adds.

    Returns:
        (B, 16, H, W), what the model predicts, which is ``latents - noise``.
    """
    with checkpointed(ZImage, transformer, gradient_checkpoint_forward, **checkpointing):
        predicted_cfhw = transformer(
            x=list(latents_bchw.unsqueeze(2).unbind()),
            t=timestep,
            cap_feats=list(prompt_embeds_ld),
            return_dict=False,
        )[0]
    return torch.stack(predicted_cfhw).squeeze(2)


_REPOSITORY = "Tongyi-MAI/Z-Image, "
_CONFIGS = "settings that public ports write out as those of Z-Image-Turbo, such as rullama's"


_BASE = Release(
    name="Z-Image",
    hub_id="Tongyi-MAI/Z-Image",
    pipeline_class="ZImagePipeline",
    components={
        "transformer": ReleaseComponent(
            "ZImageTransformer2DModel", source=f"{_REPOSITORY}src/config/model.py: the defaults of the class"
        ),
        "text_encoder": replace(QWEN3_4B, class_name="Qwen3Model", source=f"{QWEN3_4B.source}; {_CONFIGS}"),
        "vae": FLUX_VAE,
    },
    scheduler=flow_euler(6.0, "zml, a public runtime that names the file of this repository as its source"),
    tokenizers={"tokenizer": ReleaseTokenizer("Qwen2Tokenizer", ("tokenizer.json",))},
    size=(1024, 1024, 1),
    parameters=6e9,
    licence="Apache-2.0",
    gated=None,
    architecture="Z-Image",
    version="z_image",
    sources={
        "pipeline": f"{_REPOSITORY}src/config/manifests/z-image-turbo.txt; {_CONFIGS}",
        "size": "defaults of the pipeline",
        "parameters": f"{_REPOSITORY}README.md",
        "licence": LICENCES,
        "architecture": f"{MUSUBI}utils/sai_model_spec.py, dataset/architectures.py",
    },
    unconfirmed=("dtype of the transformer", "files of the tokenizer"),
)
_TURBO = _BASE.but(
    "Z-Image-Turbo",
    "Tongyi-MAI/Z-Image-Turbo",
    transformer=replace(
        _BASE.components["transformer"],
        dtype="float32",
        source=f"{_BASE.components['transformer'].source}; dtype from its three shards",
    ),
    scheduler=flow_euler(3.0, f"{_REPOSITORY}src/config/model.py"),
    distilled="8 steps without guidance",
    unconfirmed=(),
)


_BLOCKS = ("layers.*", "noise_refiner.*", "context_refiner.*")
_GATED = under("feed_forward", ("w1", "w2", "w3"))
_LORA_LAYERS = LayerNames(
    layers=(
        *(f"{block}.attention.{layer}" for block in _BLOCKS for layer in (*QKV, "to_out.0")),
        *(f"{block}.{layer}" for block in _BLOCKS for layer in _GATED),
        *("layers.*.adaLN_modulation.0", "noise_refiner.*.adaLN_modulation.0"),
        *("all_x_embedder.2-1", "all_final_layer.2-1.linear", "all_final_layer.2-1.adaLN_modulation.1"),
        *("t_embedder.mlp.0", "t_embedder.mlp.2", "cap_embedder.1"),
    ),
    others={
        **{f"{block}.attention.qkv": fused(*under(f"{block}.attention", QKV)) for block in _BLOCKS},
        **{f"{block}.attention.out": renamed(f"{block}.attention.to_out.0") for block in _BLOCKS},
        "x_embedder": renamed("all_x_embedder.2-1"),
        "final_layer.linear": renamed("all_final_layer.2-1.linear"),
        "final_layer.adaLN_modulation.1": renamed("all_final_layer.2-1.adaLN_modulation.1"),
    },
)


class ZImage(DiffusersFamily):
    """Z-Image and Z-Image-Turbo, from text.

    34 single-stream blocks, Qwen3 prompts, the autoencoder of FLUX.1: 16 channels at 1/8 size.

    Two blocks refine the image only, two the prompt only, and 30 see both. One batch may hold captions of any
    lengths. No layer of the last block is unused: text and image share its weights.

    Turbo, distilled to 8 steps without guidance, has the same layout. Training knows nothing of the
    distillation and undoes it: with a LoRA trained on Turbo, 8 steps give blurred images while 30 with
    guidance give good ones, unless an adapter that restores it is loaded, too (see
    https://huggingface.co/DiffSynth-Studio/Z-Image-Turbo-DistillPatch). The base model has no such trouble;
    ``model.training_adapter`` and ``objective.guidance_target`` are other ways out.

    The guidance scale of its pipeline counts from 0: s there is s + 1 elsewhere. Previews pass it on as
    given, and have no guidance at 1 or less.

    The base model's sampler has a shift of 6 and Turbo's 3. diffusers' training script takes that of the
    folder; DiffSynth-Studio takes 3 for both (``set_timesteps_z_image``), as the recipe here does to leave
    more steps for detail, and musubi-tuner (``docs/zimage.md``) 2 with a density around the middle.

    diffusers 0.42.1 has one transformer of Z-Image. Its pipelines that start from an image
    (``ZImageImg2ImgPipeline``, ``ZImageInpaintPipeline``) use the same weights and the same inputs of
    the model, so a LoRA trained here works in them, too; those of a ControlNet also run a second model.

    Omni models, which also see images, as latents and through SigLIP, are refused. Their forward is not the
    reason: that of a tiny model runs bit for bit in the gradient engine, with images and without, and
    training can give the model exactly the inputs of ``ZImageOmniPipeline``. The reasons:

    No released model was found (https://github.com/Tongyi-MAI/Z-Image/issues/163 asks for one), nor its
    settings, so that there is nothing to train, to count or to compare with. diffusers spreads what SigLIP
    sees of an image over twice the rows and columns that the image's own tokens have, and it is not known
    whether the model was trained so.

    A batch without images reaches neither ``siglip_embedder`` nor ``siglip_refiner``: a LoRA there gets no
    gradient, which DDP refuses, and as blocks are numbered by their calls (``core/gradient/blocks.py``),
    those that follow have other numbers in such a batch than in one with images.

    Plans count an image to start from by its latents only. These models also need the features of SigLIP, and
    prompts in two pieces more than there are images.

    The pipeline hands its autoencoder images in bfloat16, and fails where that is kept in float32 or float16.
    It brings images of more than a megapixel to the area of the generated one, which a family does not know
    when it encodes them.
    """

    pipelines = (ZImagePipeline,)
    releases = (_BASE, _TURBO)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image": "z_image_lora.yaml"}
    transformer_class = ZImageTransformer2DModel
    lora_spelling = taken_by_comfyui(by_kohya_names=False)
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    encoder_classes: ClassVar[Mapping[str, Any]] = {"text_encoder": Qwen3Model, "vae": AutoencoderKL}
    masks_attention = "never"
    block_lists = ("noise_refiner", "context_refiner", "layers")
    size_divisor = 16
    max_prompt_tokens = 512
    patch = _PATCH
    model_fn = model_fn_z_image
    is_reversed = True
    prompt_id = "z_image/prompt/1"
    prompt_outputs = ("prompt_embeds",)
    latents_id = "z_image/latents/1"
    prompt_width = "cap_feat_dim"
    default_target_modules = (*_ATTENTION, "w1", "w2", "w3")
    target_sets: ClassVar[TargetSets] = {
        "attention": _ATTENTION,
        "all": (*default_target_modules, "adaLN_modulation.0"),
    }

    def check_folder(self, *, with_weights: bool = True) -> None:
        super().check_folder(with_weights=with_weights)
        if self.folder.component_config("transformer").get("siglip_feat_dim") is not None:
            raise UserError(
                f"model.path: {self.folder.path} holds a Z-Image Omni, whose transformer sees images "
                "(siglip_feat_dim), which is not supported; use Z-Image or Z-Image-Turbo"
            )

    @property
    def distilled(self) -> str | None:
        """Turbo: its sampler has a shift of 3, that of the base model 6. Better train the base model."""
        if self.scheduler_config.get("shift") != _SHIFT_OF_TURBO:
            return None
        return (
            f"its sampler has a shift of {_SHIFT_OF_TURBO:g}, as Z-Image-Turbo's (the base model's is 6); "
            "better train the base model, Z-Image"
        )

    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        """With the chat around each text, which counts too: a prompt that is too long loses its end."""
        tokenizer = self.load_tokenizer()
        chats = [[{"role": "user", "content": text}] for text in texts]
        encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True, enable_thinking=True)
        return [len(tokens) for tokens in encoded["input_ids"]]

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds_ld": [sample["prompt_embeds"].to(**like) for sample in conditioning]}

    def prompt_argument(self, prompt: Conditioning, like: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds": [prompt["prompt_embeds"].to(**like)]}

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        return {"guidance_scale": request.guidance_scale if request.is_guided else 0.0}


def tiny() -> ZImagePipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of each kind, of 32 channels; 16 latent channels at 1/8 size with the real model's statistics.
    """
    tokenizer = tokenizers.qwen2_tokenizer()
    text_encoder = text_encoders.tiny_qwen3(tokenizer)
    with seeded(0):
        transformer = ZImageTransformer2DModel(
            dim=32,
            n_layers=2,
            n_refiner_layers=2,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=text_encoder.config.hidden_size,
            axes_dims=[4, 6, 6],
        )
        # The class starts them at zero, where a wrong use of them would not show.
        for padding in (transformer.x_pad_token, transformer.cap_pad_token):
            torch.nn.init.normal_(padding)
    return ZImagePipeline(
        # As in the base model's repository: a fixed shift.
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=autoencoders.tiny_flux_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
