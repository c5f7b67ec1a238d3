"""This file trains HiDream-I1 (text to image), whose feed-forward layers are mixtures of experts.

Layouts: b batch, c latent channels, h and w latent height and width; l tokens, d channels; k layers of Llama.
Sources: diffusers ``transformer_hidream_image.py`` and ``pipeline_hidream_image.py``; the model is
arXiv 2505.22705.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, ClassVar, Unpack

import torch
from diffusers import (
    AutoencoderKL,
    HiDreamImagePipeline,
    HiDreamImageTransformer2DModel,
    UniPCMultistepScheduler,
)
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU
from transformers import CLIPTextModelWithProjection, LlamaForCausalLM, T5EncoderModel

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.core.weights.packing import HostBlocks
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, under
from diffsynth_lite.lora.spelling import taken_by_comfyui
from diffsynth_lite.media import Prompt, RecordKind
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import Conditioning, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.folder import PipelineFolder
from diffsynth_lite.pipelines.base.folder.index import IndexEntry
from diffsynth_lite.pipelines.base.model_function import Checkpointing, checkpointed, model_function, stacked
from diffsynth_lite.releases import components as known
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

_LLAMA = "meta-llama/Meta-Llama-3.1-8B-Instruct"
_ELSEWHERE = {
    part: IndexEntry(library="transformers", class_name=class_name, location=_LLAMA, subfolder="")
    for part, class_name in {
        "text_encoder_4": "LlamaForCausalLM",
        "tokenizer_4": "PreTrainedTokenizerFast",
    }.items()
}


class RoutedExperts(MOEFeedForwardSwiGLU):  # type: ignore[misc]  # diffusers has no types
    """The mixture of experts of a block, with a gradient in both modes.

    In diffusers 0.42.1 the routed experts run without one unless the model is in training mode, and there it
    returns its tokens as they are; ``force_inference_output``, which its training script sets, keeps the
    output and loses the gradient (huggingface/diffusers issue 11777 has what becomes of such LoRAs). The
    numbers here are those of its inference.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, D) to (B, L, D); of all tokens each expert gets those that chose it, which may be none."""
        chosen, weights, _ = self.gate(x)
        tokens_nd, chosen = x.flatten(0, 1), chosen.flatten()
        order = chosen.argsort()
        tokens, num_experts = order // self.num_activated_experts, len(self.experts)
        if x.is_meta:  # where nothing shows how often each was chosen
            parts = tokens_nd[tokens].tensor_split(num_experts)
        else:
            parts = torch.split(tokens_nd[tokens], chosen.bincount(minlength=num_experts).tolist())
        outputs_nd = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        weighted_nd = (outputs_nd * weights.flatten()[order, None]).to(outputs_nd.dtype)
        routed_nd = outputs_nd.new_zeros(tokens_nd.shape).index_add(0, tokens, weighted_nd)
        output: torch.Tensor = routed_nd.view_as(x) + self.shared_experts(x)
        return output


def _with_gradients(model: torch.nn.Module) -> torch.nn.Module:
    """A transformer that gives the same in both modes, and a gradient to all of its layers."""
    transformer: Any = model
    transformer.register_to_config(force_inference_output=True)
    transformer.patchify = MethodType(_patchify, transformer)
    for module in model.modules():
        if isinstance(module, MOEFeedForwardSwiGLU):
            module.__class__ = RoutedExperts
            module.gate._force_inference_output = True  # else it computes a loss that nobody uses
    return model


def _patchify(model: HiDreamImageTransformer2DModel, latents_bchw: torch.Tensor) -> tuple[Any, ...]:
    """That of diffusers, whose sizes are on the device: to be read back, where meta has no numbers."""
    tokens_bld, masks, _, positions = type(model).patchify(model, latents_bchw)
    height, width = (side // model.config.patch_size for side in latents_bchw.shape[-2:])
    return tokens_bld, masks, [(height, width)] * len(latents_bchw), positions


@model_function
def model_fn_hidream(
    transformer: torch.nn.Module,
    latents_bchw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    llama_embeds_kbld: torch.Tensor,
    pooled_prompt_embeds_bd: torch.Tensor,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of HiDream-I1, each transformer block run by the gradient engine.

    Args:
        transformer: a ``HiDreamImageTransformer2DModel`` that the family loaded, plain or wrapped by DDP.
        latents_bchw: (B, 16, H, W), noisy normalised latents, H and W even.
        timestep: (B,), in [0, 1000].
        prompt_embeds_bld: (B, 128, D) prompt embeddings of T5, padding included.
        llama_embeds_kbld: (K, B, 128, D_llama), those of each layer of Llama, padding included.
        pooled_prompt_embeds_bd: (B, D_pooled), one vector of each CLIP, side by side.

    Returns:
        (B, 16, H, W), the velocity ``noise - latents``; the model predicts the opposite.
    """
    with checkpointed(HiDream, transformer, gradient_checkpoint_forward, **checkpointing):
        predicted_bchw: torch.Tensor = transformer(
            hidden_states=latents_bchw,
            timesteps=timestep,
            encoder_hidden_states_t5=prompt_embeds_bld,
            encoder_hidden_states_llama3=llama_embeds_kbld,
            pooled_embeds=pooled_prompt_embeds_bd,
            return_dict=False,
        )[0]
    return -predicted_bchw


_CARD = "HiDream-ai/HiDream-I1 on GitHub, "


def _long(clip: ReleaseComponent) -> ReleaseComponent:
    config = {**clip.config, "max_position_embeddings": 248}
    source = f"{clip.source}; of longer texts as Draw Things names its files, its 248 places from memory"
    return replace(clip, class_name="CLIPTextModelWithProjection", config=config, source=source)


_FULL = Release(
    name="HiDream-I1 Full",
    hub_id="HiDream-ai/HiDream-I1-Full",
    pipeline_class="HiDreamImagePipeline",
    components={
        "transformer": ReleaseComponent(
            "HiDreamImageTransformer2DModel",
            {
                **dict.fromkeys(("in_channels", "out_channels"), 16),
                "patch_size": 2,
                "caption_channels": (4096, 4096),
                "axes_dims_rope": (64, 32, 32),
                "llama_layers": (*range(32), *(31,) * 16),
            },
            dtype="bfloat16",
            source="deAPI-ai/hidreami1dev on the hub, a copy of I1-Dev, transformer/config.json",
        ),
        "text_encoder": _long(known.CLIP_L),
        "text_encoder_2": _long(known.CLIP_G),
        "text_encoder_3": known.T5_XXL,
        "text_encoder_4": ReleaseComponent(
            "LlamaForCausalLM",
            {**known.encoder_sizes(4096, 14336, 32, 32, 8, 128256), "tie_word_embeddings": False},
            dtype="bfloat16",
            source=f"{_LLAMA} on the hub; its numbers as in ComfyUI, comfy/text_encoders/llama.py",
        ),
        "vae": known.FLUX_VAE,
    },
    scheduler=ReleaseComponent(
        "UniPCMultistepScheduler",
        {"flow_shift": 3.0, "prediction_type": "flow_prediction", "use_flow_sigmas": True},
        source=f"{_CARD}inference.py; the class by the branch for it in diffusers' pipeline",
    ),
    tokenizers={
        **dict.fromkeys(("tokenizer", "tokenizer_2"), known.CLIP_TOKENIZER),
        "tokenizer_3": known.T5_TOKENIZER_SLOW,
        "tokenizer_4": ReleaseTokenizer("PreTrainedTokenizerFast", ("tokenizer.json",)),
    },
    size=(1024, 1024, 1),
    parameters=17e9,
    licence="MIT; Llama 3.1 Community License for one of its text encoders",
    gated=False,
    architecture="hidream-i1",
    sources={
        "pipeline": "files of HiDream-ai/HiDream-I1-Dev on the hub, commit 6d5c9cfd6927",
        "size": "`default_sample_size` of the pipeline",
        "parameters": f"{_CARD}README.md",
        "licence": f"{_CARD}LICENSE",
        "architecture": f"{known.ONE_TRAINER}hi_dream_full-lora.json",
    },
    unconfirmed=("dtypes of the weights", "settings of the CLIPs and of the scheduler"),
)


def _distilled(name: str, shift: float, num_steps: int) -> Release:
    source = f"HiDream-ai/HiDream-I1-Dev on the hub, commit e2447070a9a4; shift: {_CARD}inference.py"
    return _FULL.but(
        f"HiDream-I1 {name}",
        f"HiDream-ai/HiDream-I1-{name}",
        scheduler=ReleaseComponent("FlowMatchLCMScheduler", {"shift": shift}, source=source),
        distilled=f"{num_steps} steps without guidance",
    )


_EMBEDDER = ("linear_1", "linear_2")
_ATTENTION = under("attn1", ("to_q", "to_k", "to_v", "to_out"))
_TEXT_ATTENTION = tuple(f"{layer}_t" for layer in _ATTENTION)
_SHARED, _TEXT, _EXPERTS = (
    under(part, ("w1", "w2", "w3")) for part in ("ff_i.shared_experts", "ff_t", "ff_i.experts.*")
)
_IN_ALL_BLOCKS = (*_ATTENTION, *_SHARED, *_EXPERTS, "adaLN_modulation.1")
_LORA_LAYERS = LayerNames(
    layers=(
        *under("double_stream_blocks.*.block", (*_IN_ALL_BLOCKS, *_TEXT_ATTENTION, *_TEXT)),
        *under("single_stream_blocks.*.block", _IN_ALL_BLOCKS),
        *under("t_embedder.timestep_embedder", _EMBEDDER),
        *under("p_embedder.pooled_embedder", _EMBEDDER),
        *("x_embedder.proj", "caption_projection.*.linear"),
        *under("final_layer", ("linear", "adaLN_modulation.1")),
    ),
)


class HiDream(DiffusersFamily):
    """HiDream-I1 Full, from text; Dev and Fast are distilled from it.

    16 dual-stream and 32 single-stream blocks, prompts of two CLIPs, T5 and Llama 3.1, the autoencoder of
    FLUX.1: 16 channels at 1/8 size. Each encoder reads the first 128 of its tokens, and the model sees all of
    them, padding included: nothing is masked.

    Llama is not in the model's folder: it is read from `meta-llama/Meta-Llama-3.1-8B-Instruct`, whose terms
    must be accepted on the hub. To take another copy of it, download the pipeline to a local folder, and put
    the copy's weights into its `text_encoder_4` and the tokenizer into `tokenizer_4`. Each block is given
    another one of Llama's layers: all 32 are in the cache, 34 MB for each caption.

    For each token a router in each block chooses two of four experts. By default, and in `all`, they get no
    LoRA, as with ai-toolkit: each sees half of the tokens. `lora.target_modules` may name them
    (`ff_i.experts.*.w1`); one that no token of a batch chose gets a gradient of zeros, so that several
    devices need no setting for it. The routers stay as they are, and the loss has no term for their balance:
    of the trainers that were read only SimpleTuner has one, as a setting.

    Square images cost what their tokens do. Others are filled up to the 4,096 tokens of 1024x1024, which the
    model sees, and may have no more. diffusers' pipeline brings each size to that of 1024x1024, unless its
    `default_sample_size` is changed, as it is for previews and by the code in model cards.

    Full's sampler has a shift of 3 at any size; ai-toolkit and diffusers' script train uniformly with it,
    diffusion-pipe and OneTrainer a logit-normal density without. Dev and Fast are recognised by their
    sampler, `FlowMatchLCMScheduler`.
    """

    pipelines = (HiDreamImagePipeline,)
    releases = (_FULL, _distilled("Dev", 6.0, 28), _distilled("Fast", 3.0, 16))
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image": "hidream_lora.yaml"}
    transformer_class = HiDreamImageTransformer2DModel
    lora_spelling = taken_by_comfyui()
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    encoder_classes: ClassVar[Mapping[str, Any]] = {
        "text_encoder": CLIPTextModelWithProjection,
        "text_encoder_2": CLIPTextModelWithProjection,
        "text_encoder_3": T5EncoderModel,
        "text_encoder_4": LlamaForCausalLM,
        "vae": AutoencoderKL,
    }
    tokenizers = ("tokenizer", "tokenizer_2", "tokenizer_3", "tokenizer_4")
    prompt_tokenizer = "tokenizer_3"
    block_lists = ("double_stream_blocks", "single_stream_blocks")
    unused_matmuls = ("block.ff_t.w2", "block.ff_i.shared_experts.w2")
    size_divisor = 16
    max_prompt_tokens = 128
    keeps_padding = True
    patch = 2
    model_fn = model_fn_hidream
    num_timesteps = 1000
    prompt_id = "hidream/prompt/1"
    latents_id = "hidream/latents/1"
    default_target_modules = _ATTENTION
    target_sets: ClassVar[TargetSets] = {
        "attention": (*_ATTENTION, *_TEXT_ATTENTION),
        "all": (*_ATTENTION, *_TEXT_ATTENTION, *_SHARED, *_TEXT, "block.adaLN_modulation.1"),
    }

    def __init__(self, folder: PipelineFolder, *, trained: Sequence[str] | None = None) -> None:
        super().__init__(replace(folder, elsewhere=_ELSEWHERE), trained=trained)

    @property
    def distilled(self) -> str | None:
        """Dev and Fast: their sampler is one of consistency models. Better train Full."""
        if self.sampler != "FlowMatchLCMScheduler":
            return None
        return f"its sampler is {self.sampler}, as of HiDream-I1 Dev and Fast; better train HiDream-I1 Full"

    @property
    def _llama_layers(self) -> list[int]:
        """Those that the transformer reads, each once."""
        return sorted(set(self.folder.component_config("transformer")["llama_layers"]))

    def load_component(self, name: str, dtype: torch.dtype, encoder_blocks: HostBlocks | None = None) -> Any:
        component = super().load_component(name, dtype, encoder_blocks)
        return _with_gradients(component) if name in self.denoisers else component

    def empty_component(self, name: str) -> torch.nn.Module:
        component = super().empty_component(name)
        return _with_gradients(component) if name in self.denoisers else component

    @property
    def _most_tokens(self) -> int:
        """That an image of unequal sides may have, and is filled up to."""
        config = self.folder.component_config("transformer")
        return int(math.prod(config["max_resolution"])) // self.patch**2

    def check_size(self, width: int, height: int, *, keys: str) -> None:
        super().check_size(width, height, keys=keys)
        most = self._most_tokens * self.size_divisor**2
        if width != height and width * height > most:
            raise UserError(
                f"{keys}: {width}x{height}; of images that are not square this model takes at most {most} "
                f"pixels, such as {math.isqrt(most)}x{math.isqrt(most)} are"
            )

    def num_given_tokens(self, latents_shape: Sequence[int]) -> int:
        is_square = latents_shape[-2] == latents_shape[-1]
        return 0 if is_square else self._most_tokens - self.num_tokens(latents_shape)

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning:
        config = self.folder.component_config("transformer")
        of_t5, of_llama = config["caption_channels"]
        return {
            "prompt_embeds": torch.ones(self.max_prompt_tokens, of_t5),
            "llama_embeds": torch.ones(len(self._llama_layers), self.max_prompt_tokens, of_llama),
            "pooled_prompt_embeds": torch.ones(config["text_emb_dim"]),
        }

    def prompt_encoder_id(self, dtype: torch.dtype) -> str:
        return f"{super().prompt_encoder_id(dtype)} {self._llama_layers}"

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        t5_bld, _, llama_kbld, _, pooled_bd, _ = pipeline.encode_prompt(
            [prompt.text for prompt in prompts],
            do_classifier_free_guidance=False,
            device=device,
            max_sequence_length=self.max_prompt_tokens,
        )
        columns = t5_bld, llama_kbld[self._llama_layers].transpose(0, 1), pooled_bd
        names = ("prompt_embeds", "llama_embeds", "pooled_prompt_embeds")
        rows = zip(*(column.cpu().unbind() for column in columns), strict=True)
        return [{name: row.clone() for name, row in zip(names, of_one, strict=True)} for of_one in rows]

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        given_kbld = stacked(conditioning, "llama_embeds", like).transpose(0, 1)
        layers = self._llama_layers
        # By the numbers of layers, also of those that the model does not read.
        llama_embeds_kbld = given_kbld.new_zeros(layers[-1] + 1, *given_kbld.shape[1:])
        llama_embeds_kbld[layers] = given_kbld
        return {
            "prompt_embeds_bld": stacked(conditioning, "prompt_embeds", like),
            "llama_embeds_kbld": llama_embeds_kbld,
            "pooled_prompt_embeds_bd": stacked(conditioning, "pooled_prompt_embeds", like),
        }

    def prompt_argument(self, prompt: Conditioning, like: Mapping[str, Any]) -> dict[str, Any]:
        inputs = self.model_inputs([prompt], like)
        return {
            "prompt_embeds_t5": inputs["prompt_embeds_bld"],
            "prompt_embeds_llama3": inputs["llama_embeds_kbld"],
            "pooled_prompt_embeds": inputs["pooled_prompt_embeds_bd"],
        }

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        pipeline.default_sample_size = _sample_size(pipeline.vae_scale_factor, request)
        return super().call_arguments(pipeline, request)

    def usage_setup(self, request: PreviewRequest) -> Sequence[str]:
        return (f"pipeline.default_sample_size = {_sample_size(8, request)!r}  # keeps the size below",)


def _sample_size(scale: int, request: PreviewRequest) -> float:
    """With it the pipeline keeps the size that it is given, rounding included."""
    return math.sqrt(request.width * request.height) / scale * (1 + 1e-9)


def tiny() -> HiDreamImagePipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of each kind, of 32 channels and four experts; three of Llama's four layers; 16 latent channels
    at 1/8 size with the real model's statistics.
    """
    clip, clip_2 = tokenizers.clip_tokenizer(), tokenizers.clip_tokenizer(pad_token="!")
    clip.model_max_length = clip_2.model_max_length = 248
    t5, llama = tokenizers.t5_tokenizer(), tokenizers.llama3_tokenizer()
    flows = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    with seeded(0):
        transformer = HiDreamImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            caption_channels=[32, 16],
            text_emb_dim=64,
            axes_dims_rope=(8, 4, 4),
            max_resolution=(8, 8),
            llama_layers=[0, 2, 3, 3],
        )
    return HiDreamImagePipeline(
        scheduler=UniPCMultistepScheduler(flow_shift=3.0, **flows),
        vae=autoencoders.tiny_flux_vae(),
        text_encoder=text_encoders.tiny_clip_text_with_projection(clip),
        tokenizer=clip,
        text_encoder_2=text_encoders.tiny_clip_text_with_projection(clip_2, seed=1),
        tokenizer_2=clip_2,
        text_encoder_3=text_encoders.tiny_t5(t5),
        tokenizer_3=t5,
        text_encoder_4=text_encoders.tiny_llama_lm(llama, num_layers=4),
        tokenizer_4=llama,
        transformer=transformer.eval(),
    )
