"""This file trains Krea 2 (text to image): Raw, whose LoRA is for Turbo.

Layouts: b batch, c latent channels, f frames (1), h and w latent height and width; l tokens, k layers of the
text encoder, d channels.
Sources: diffusers ``transformer_krea2.py`` and ``pipeline_krea2.py``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Unpack

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    Krea2Pipeline,
    Krea2Transformer2DModel,
    QwenImagePipeline,
)
from transformers import Qwen3VLModel

from diffsynth_lite.core.gradient import gradient_checkpoint_forward, unwrapped
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, renamed, renamed_in, under
from diffsynth_lite.lora.shared_names import DOUBLE, QKV
from diffsynth_lite.lora.spelling import taken_by_comfyui
from diffsynth_lite.media import RecordKind
from diffsynth_lite.pipelines.base.diffusers_components import assemble
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily, exponential_shift
from diffsynth_lite.pipelines.base.family import Conditioning, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.model_function import (
    Checkpointing,
    checkpointed,
    model_function,
    padded_together,
)
from diffsynth_lite.releases.components import MUSUBI, QWEN_VAE, encoder_sizes
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

_PATCH = 2
_MU_OF_TURBO = 1.15  # a literal in the pipeline
_ATTENTION = ("to_q", "to_k", "to_v", "to_gate", "to_out.0")


@model_function
def model_fn_krea2(
    transformer: torch.nn.Module,
    latents_bcfhw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_blkd: torch.Tensor,
    prompt_embeds_mask: torch.Tensor | None = None,
    input_latents_bcfhw: Sequence[torch.Tensor] = (),
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of Krea 2, each transformer block run by the gradient engine.

    Args:
        transformer: a ``Krea2Transformer2DModel``, plain or wrapped by DDP.
        latents_bcfhw: (B, 16, 1, H, W), noisy normalised latents, H and W even.
        timestep: (B,), noise level in [0, 1].
        prompt_embeds_blkd: (B, L, K, D), of each token what K layers of the text encoder gave.
        prompt_embeds_mask: (B, L), 1 for a token and 0 for padding; None when no prompt is padded.
        input_latents_bcfhw: of the images that an edit starts from, see :func:`clean_references`.

    Returns:
        (B, 16, 1, H, W), the predicted velocity ``noise - latents``.
    """
    height, width = latents_bcfhw.shape[-2:]
    tokens_bld = _packed(latents_bcfhw)
    positions = Krea2Pipeline.prepare_position_ids(
        prompt_embeds_blkd.shape[1], height // _PATCH, width // _PATCH, latents_bcfhw.device
    )
    with (
        clean_references(transformer, input_latents_bcfhw),
        checkpointed(Krea2, transformer, gradient_checkpoint_forward, **checkpointing),
    ):
        velocity_bld = transformer(
            hidden_states=tokens_bld,
            encoder_hidden_states=prompt_embeds_blkd,
            timestep=timestep,
            position_ids=positions,
            # Truth values: torch adds numbers to the attention's scores, which hides nothing.
            encoder_attention_mask=None if prompt_embeds_mask is None else prompt_embeds_mask.bool(),
            return_dict=False,
        )[0]
    velocity_bcfhw: torch.Tensor = QwenImagePipeline._unpack_latents(
        velocity_bld, height, width, vae_scale_factor=1
    )
    return velocity_bcfhw


def _packed(latents_bcfhw: torch.Tensor) -> torch.Tensor:
    """Tokens, (B, L, D), of latents of one frame."""
    batch, channels, _, height, width = latents_bcfhw.shape
    # ``Krea2Pipeline`` packs in the same way, but only one that is assembled can do it.
    packed: torch.Tensor = QwenImagePipeline._pack_latents(
        latents_bcfhw.squeeze(2), batch, channels, height, width
    )
    return packed


@contextmanager
def clean_references(
    transformer: torch.nn.Module, references_bcfhw: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Scope in which each forward of Krea 2 also sees clean images, after the noisy one.

    Their tokens are at noise level 0, where those of the prompt and the noisy image are at the timestep.
    The places of the i-th are counted from its own corner, and from 1 on the axis that is 0 for all others.
    Nothing is returned of them. diffusers has this neither in its model nor in a pipeline.

    Args:
        transformer: a ``Krea2Transformer2DModel``, plain or wrapped by DDP.
        references_bcfhw: each (B, 16, 1, H, W), or (1, ...) for all of a batch; normalised latents, H and W
            even, each of a size of its own. With none the forward is that of diffusers.
    """
    if not references_bcfhw:
        yield
        return
    model: Any = unwrapped(transformer)
    clean_bld = torch.cat([_packed(latents) for latents in references_bcfhw], dim=1)
    places = []
    for place, latents in enumerate(references_bcfhw, start=1):
        rows, columns = (side // _PATCH for side in latents.shape[-2:])
        places.append(Krea2Pipeline.prepare_position_ids(0, rows, columns, latents.device))
        places[-1][:, 0] = place
    num_clean, num_others = clean_bld.shape[1], 0

    def append(_model: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        nonlocal num_others
        num_others = len(given["position_ids"])
        noisy_bld = given["hidden_states"]
        tokens_bld = torch.cat([noisy_bld, clean_bld.expand(len(noisy_bld), -1, -1)], dim=1)
        position_ids = torch.cat([given["position_ids"], *places])
        return args, {**given, "hidden_states": tokens_bld, "position_ids": position_ids}

    def add_level_zero(_embedding: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (torch.cat([args[0], torch.zeros_like(args[0])]),)

    def of_each_token(_projection: Any, _args: Any, modulation_b1d: torch.Tensor) -> torch.Tensor:
        noisy_b1d, zero_b1d = modulation_b1d.chunk(2)
        return torch.cat([noisy_b1d.expand(-1, num_others, -1), zero_b1d.expand(-1, num_clean, -1)], dim=1)

    def drop_clean(_layer: Any, args: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return args[0][:, :-num_clean], args[1].chunk(2)[0]

    with (
        model.register_forward_pre_hook(append, prepend=True, with_kwargs=True),
        model.time_embed.register_forward_pre_hook(add_level_zero),
        model.time_mod_proj.register_forward_hook(of_each_token),
        model.final_layer.register_forward_pre_hook(drop_clean),
    ):
        yield


_README = "krea-ai/krea-2, README.md"
_PIPELINE = "docstring of the pipeline in diffusers"
QWEN3_VL_4B = ReleaseComponent(
    "Qwen3VLModel",
    {
        "text_config": {"model_type": "qwen3_vl_text", **encoder_sizes(2560, 9728, 32, 36, 8, 151936, 128)},
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "deepstack_visual_indexes": [5, 11, 17],
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": 2560,
        },
        "tie_word_embeddings": True,
    },
    dtype="bfloat16",
    source=f"{MUSUBI}krea2/krea2_encoder.py: Qwen3-VL-4B-Instruct; class from the {_PIPELINE}, dtype of the "
    "original",
)
_RAW = Release(
    name="Krea 2 Raw",
    hub_id="krea/Krea-2-Raw",
    pipeline_class="Krea2Pipeline",
    settings={
        "is_distilled": False,
        "patch_size": 2,
        "text_encoder_select_layers": [2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35],
    },
    components={
        "transformer": ReleaseComponent(
            "Krea2Transformer2DModel",
            source="SceneWorks/inference, crates/media/candle-gen/candle-gen-krea/src/config.rs, which has "
            "the file of Turbo and says that Raw shares it: the defaults of the class",
        ),
        "text_encoder": QWEN3_VL_4B,
        "vae": QWEN_VAE,
    },
    scheduler=ReleaseComponent(
        "FlowMatchEulerDiscreteScheduler",
        {
            "base_image_seq_len": 256,
            "base_shift": 0.5,
            "max_image_seq_len": 6400,
            "max_shift": 1.15,
            "use_dynamic_shifting": True,
        },
        source=_PIPELINE,
    ),
    tokenizers={"tokenizer": ReleaseTokenizer("Qwen2Tokenizer", ("tokenizer.json",))},
    size=(1024, 1024, 1),
    parameters=12e9,
    licence="Krea 2 Community License",
    gated=True,
    architecture="Krea-2",
    version="krea2",
    sources={
        "pipeline": f"{_PIPELINE}, and its defaults",
        "size": _README,
        "parameters": "diffusers, examples/dreambooth/README_krea2.md",
        "licence": f"{_README}; gated as WebbDuck, a public interface, informs those without access",
        "architecture": f"{MUSUBI}utils/sai_model_spec.py, dataset/architectures.py",
    },
    unconfirmed=("dtype of the transformer and of the autoencoder", "files of the tokenizer"),
)
_TURBO = _RAW.but(
    "Krea 2 Turbo", "krea/Krea-2-Turbo", settings={"is_distilled": True}, distilled="8 steps without guidance"
)
KREA2 = (_RAW, _TURBO)


_BLOCK_LAYERS = (*under("attn", (*QKV, "to_gate", "to_out.0")), *under("ff", ("gate", "up", "down")))
_BLOCKS = {
    "blocks.*": DOUBLE,
    "txtfusion.layerwise_blocks.*": "text_fusion.layerwise_blocks.*",
    "txtfusion.refiner_blocks.*": "text_fusion.refiner_blocks.*",
}
_OTHERS = {
    "first": "img_in",
    "tmlp.0": "time_embed.linear_1",
    "tmlp.2": "time_embed.linear_2",
    "tproj.1": "time_mod_proj",
    "txtmlp.1": "txt_in.linear_1",
    "txtmlp.3": "txt_in.linear_2",
    "txtfusion.projector": "text_fusion.projector",
    "last.linear": "final_layer.linear",
}
_LORA_LAYERS = LayerNames(
    layers=(
        *(f"{block}.{layer}" for block in _BLOCKS.values() for layer in _BLOCK_LAYERS),
        *_OTHERS.values(),
    ),
    kohya={
        **renamed_in(
            _BLOCKS,
            {
                **{f"attn.w{part}": f"attn.to_{part}" for part in "qkv"},
                "attn.gate": "attn.to_gate",
                "attn.wo": "attn.to_out.0",
                **{f"mlp.{part}": f"ff.{part}" for part in ("gate", "up", "down")},
            },
        ),
        **{name: renamed(layer) for name, layer in _OTHERS.items()},
    },
)


class Krea2(DiffusersFamily):
    """Krea 2 Raw, from text; its LoRA is used on Turbo.

    28 single-stream blocks after four that read the prompt, the autoencoder of Qwen-Image: 16 channels at
    1/8 size.

    Its authors train on Raw, which is not distilled and not meant to make pleasing images, and generate with
    Turbo, distilled to 8 steps without guidance. Training on Turbo itself undoes the distillation.

    The transformer reads the states of 12 layers of Qwen3-VL, 30,720 numbers a token. Padding, which the
    pipeline hides, is not kept: in bfloat16 a prompt of 100 tokens takes 6 MB of the cache and one of 512,
    the longest, 31.

    The guidance scale of its pipeline counts from 0: s there is s + 1 elsewhere. Previews pass it on as
    given, and have no guidance at 1 or less.

    By default the LoRA is on the layers that its authors recommend within the blocks, those that read the
    prompt included. The recipe has their whole list, which goes with their rank of 32: it adds the layers
    around the blocks, eight of which are in no set here, from ``img_in`` to ``final_layer.linear``.
    musubi-tuner and DiffSynth-Studio train these, too. For long runs the authors advise only the attention,
    with a higher rank, so that prompts are followed as before.

    The sampler's shift grows with the image: 1.8 at 512 x 512 pixels and 2.5 at 1024 x 1024; Turbo has 3.2
    at any size. DiffSynth-Studio trains Raw with 2.2 (``set_timesteps_krea2``), and diffusers' script with
    none. No layer of the last block is unused: text and image share its weights.
    """

    pipelines = (Krea2Pipeline,)
    releases = KREA2
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image": "krea2_lora.yaml"}
    transformer_class = Krea2Transformer2DModel
    lora_spelling = taken_by_comfyui()
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    encoder_classes: ClassVar[Mapping[str, Any]] = {
        "text_encoder": Qwen3VLModel,
        "vae": AutoencoderKLQwenImage,
    }
    block_lists = ("text_fusion.layerwise_blocks", "text_fusion.refiner_blocks", "transformer_blocks")
    unused_matmuls = ("attn.to_out.0", "ff.down")
    size_divisor = 16
    max_prompt_tokens = 512
    patch = _PATCH
    model_fn = model_fn_krea2
    latents_id = "krea2/latents/1"
    blocks_by_hook = False  # diffusers has none for the blocks that read the prompt
    default_target_modules = (*_ATTENTION, "ff.up", "ff.down")
    target_sets: ClassVar[TargetSets] = {
        "attention": _ATTENTION,
        "all": (*default_target_modules, "ff.gate"),
    }

    @property
    def distilled(self) -> str | None:
        """Turbo, by ``is_distilled`` in ``model_index.json``. Better train Raw, whose LoRA it takes."""
        if not self.is_distilled:
            return None
        return "is_distilled in its model_index.json; better train Krea 2 Raw, whose LoRA it takes"

    @property
    def pipeline_settings(self) -> Mapping[str, Any]:
        """Also which layers of the text encoder the transformer is given."""
        name = "text_encoder_select_layers"
        return {"is_distilled": self.is_distilled, name: self.folder.pipeline_config().get(name)}

    def prompt_encoder_id(self, dtype: torch.dtype) -> str:
        parts = self.folder.fingerprints("text_encoder", "tokenizer")
        # The template is a part of diffusers, so that another version may bring another one.
        pipeline = assemble(self.pipeline, **self.pipeline_settings)
        template = pipeline.prompt_template_encode_prefix, pipeline.prompt_template_encode_suffix
        layers = pipeline.text_encoder_select_layers
        return f"krea2/prompt/1 {parts} {dtype} {self.max_prompt_tokens} {layers} {template!r}"

    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        """With the end of the chat around each text, which counts too."""
        num_after = assemble(self.pipeline).prompt_template_encode_num_suffix_tokens
        return [length + num_after for length in super().prompt_lengths(texts)]

    def resolution_shift(self, latents_shape: Sequence[int]) -> float:
        """That of the folder's sampler, which grows with the image; Turbo's pipeline has one for all."""
        if self.is_distilled:
            return exponential_shift(_MU_OF_TURBO)
        return super().resolution_shift(latents_shape)

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning:
        config = self.folder.component_config("transformer")
        of_a_token = config["num_text_layers"], config["text_hidden_dim"]
        return {"prompt_embeds": torch.ones(self.max_prompt_tokens, *of_a_token)}

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        embeds_blkd, mask = self.padded(conditioning, like)
        return {"prompt_embeds_blkd": embeds_blkd, "prompt_embeds_mask": mask}

    def prompt_arguments(
        self, prompts: Mapping[str, Conditioning], like: Mapping[str, Any]
    ) -> dict[str, Any]:
        return padded_prompts(prompts, like)

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        return {"guidance_scale": request.guidance_scale if request.is_guided else 0.0}


def padded_prompts(prompts: Mapping[str, Conditioning], like: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Arguments of the pipeline, by what the names of each prompt begin with."""
    # Of one length: the pipeline numbers the tokens of both as those of the first.
    given = padded_together(prompts, "prompt_embeds_mask", like)
    return {name: rows.bool() if "mask" in name else rows for name, rows in given.items()}


def tiny() -> Krea2Pipeline:
    """A random, complete and small pipeline of the real classes (Raw), built offline in a second.

    Two blocks of 32 channels, and one of each kind that reads the prompt, of two layers of the text encoder;
    16 latent channels at 1/8 size with the real model's statistics.
    """
    tokenizer = tokenizers.qwen2_tokenizer()
    text_encoder = text_encoders.tiny_qwen3_vl(tokenizer)
    with seeded(0):
        transformer = Krea2Transformer2DModel(
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=64,
            text_hidden_dim=text_encoder.config.text_config.hidden_size,
            num_text_layers=2,
            text_num_attention_heads=2,
            text_num_key_value_heads=1,
            text_intermediate_size=32,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 6, 6),
        )
    return Krea2Pipeline(
        # As in the released repositories: a shift that grows with the image.
        scheduler=FlowMatchEulerDiscreteScheduler(**_RAW.scheduler.config),
        vae=autoencoders.tiny_qwen_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
        text_encoder_select_layers=(0, 1),
    )
