"""This file trains Wan text to video: Wan 2.1 (1.3B and 14B), and Wan 2.2 A14B (two experts) and TI2V-5B.

Layouts: b batch, c latent channels, f latent frames, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_wan.py``, ``pipeline_wan.py`` and ``pipeline_wan_i2v.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Unpack

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from diffusers.utils import is_ftfy_available
from transformers import UMT5EncoderModel

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.core.parallel import SequenceSplit
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media, Prompt, RecordKind
from diffsynth_lite.pipelines.base.diffusers_components import assemble
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.first_frame import (
    encode_start,
    preview_start,
    start_code,
    with_first_frames,
)
from diffsynth_lite.pipelines.base.model_function import (
    Checkpointing,
    checkpointed,
    model_function,
    pad_tokens,
)
from diffsynth_lite.pipelines.base.model_settings import ModelSettings
from diffsynth_lite.pipelines.wan.experts import ExpertFamily
from diffsynth_lite.pipelines.wan.names import WAN_LAYERS, WAN_NAMES
from diffsynth_lite.pipelines.wan.releases import WAN
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

_PATCH = 2


@model_function
def model_fn_wan(
    transformer: torch.nn.Module,
    latents_bcfhw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    image_embeds_bld: torch.Tensor | None = None,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of Wan, each transformer block run by the gradient engine.

    Args:
        transformer: a ``WanTransformer3DModel``, plain or wrapped by DDP.
        latents_bcfhw: (B, C, F, H, W), noisy normalised latents, H and W even.
        timestep: (B,), or (B, F * H * W / 4) with one for each token, in [0, 1000]. Where all tokens of a
            sample have the same, (B,) spares a modulation tensor for each token, which is large.
        prompt_embeds_bld: (B, 512, D) prompt embeddings, filled up with zeros; there is no mask.
        image_embeds_bld: (B, L, D_image), for models that see an image.

    Returns:
        (B, C, F, H, W), the predicted velocity ``noise - latents``.
    """
    with checkpointed(Wan, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bcfhw: torch.Tensor = transformer(
            hidden_states=latents_bcfhw,
            timestep=timestep,
            encoder_hidden_states=prompt_embeds_bld,
            encoder_hidden_states_image=image_embeds_bld,
            return_dict=False,
        )[0]
    return velocity_bcfhw


class Wan(ExpertFamily):
    """Wan 2.1 and 2.2 text to video (1.3B, 14B, the two experts of A14B) and Wan 2.2 TI2V-5B.

    30 or 40 blocks, UMT5 prompts, a causal video VAE: 1/4 of the frames, 1/8 or 1/16 of the size.

    A prompt is cleaned as by the pipelines, with ftfy among others. Characters without a token, such as new
    emoji, are unknown tokens, as in the pipelines: transformers 5 does not split them into bytes.

    Wan 2.2 A14B has two experts, which are trained together or, by ``lora.components``, one only.

    Wan 2.2 TI2V-5B also makes clips from an image, and is trained as ``WanImageToVideoPipeline`` samples:
    the first latent frame is that of the image, without noise and at timestep 0, and not in the loss.

    The shift of diffusers' conversions is 3, and 5 in TI2V-5B. DiffSynth-Studio trains all of Wan with 5
    (``set_timesteps_wan`` in ``flow_match.py``); the example in musubi-tuner's ``docs/wan.md`` has 3, with a
    density around the middle. Of two experts it also decides how many steps each gets; the recipes say why.
    """

    pipelines = (WanPipeline,)
    releases = WAN
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"video": "wan_t2v_lora.yaml"}
    transformer_class = WanTransformer3DModel
    patch = _PATCH
    lora_spelling = WAN_NAMES
    lora_layers = WAN_LAYERS
    block_lists: ClassVar[tuple[str, ...]] = ("blocks",)
    unused_matmuls = ("ffn.net.2",)
    sequence_split: ClassVar[SequenceSplit | None] = SequenceSplit(whole_attention=("attn2",))
    frame_step = 4
    masks_attention = "never"
    max_prompt_tokens = 512
    model_fn: ClassVar[Callable[..., Any]] = model_fn_wan
    num_timesteps = 1000
    prompt_id = "wan/prompt/2"
    latents_id = "wan/latents/1"

    @property
    def default_target_modules(self) -> tuple[str, ...]:
        """All linear layers of the blocks: set ``all``."""
        return self.target_sets["all"]

    @property
    def target_sets(self) -> TargetSets:
        """``attention``: ``to_q, to_k, to_v, to_out.0``; ``all`` adds ``ffn.net.0.proj, ffn.net.2``."""
        attention = ("to_q", "to_k", "to_v", "to_out.0")
        return {"attention": attention, "all": (*attention, "ffn.net.0.proj", "ffn.net.2")}

    @property
    def encoder_classes(self) -> Mapping[str, Any]:
        return {"text_encoder": UMT5EncoderModel, "vae": AutoencoderKLWan}

    @property
    def record_kinds(self) -> tuple[RecordKind, ...]:
        """Clips and images; TI2V-5B also clips with a first frame."""
        return ("video", "image", "image_to_video") if self._is_ti2v else ("video", "image")

    @cached_property
    def _is_ti2v(self) -> bool:
        """Wan 2.2 TI2V-5B, whose pipeline gives a noise level to each token."""
        return bool(self.folder.pipeline_config().get("expand_timesteps"))

    @property
    def size_divisor(self) -> int:
        """16; 32 with TI2V-5B."""
        return _PATCH * int(self._vae_config["scale_factor_spatial"])

    @property
    def default_num_frames(self) -> int:
        """81; 121 with TI2V-5B."""
        return 121 if self._is_ti2v else 81

    @property
    def default_fps(self) -> float:
        """16; 24 with TI2V-5B."""
        return 24.0 if self._is_ti2v else 16.0

    def check_folder(self, *, with_weights: bool = True) -> None:
        # Without it diffusers' text-to-video pipeline leaves a prompt as it is, and the other one fails.
        if not is_ftfy_available():
            raise UserError(
                "model.family: prompts of Wan are cleaned with the package ftfy, which is not installed: "
                "`pip install ftfy`"
            )
        super().check_folder(with_weights=with_weights)

    def prompt_pipeline(self, dtype: torch.dtype, device: torch.device, **settings: Any) -> Any:
        encoders = self.load_text_encoders(dtype, device)
        return assemble(WanPipeline, tokenizer=self.load_tokenizer(), **encoders, **settings)

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        texts = [prompt.text for prompt in prompts]
        embeds_bld, _ = pipeline.encode_prompt(
            texts,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_prompt_tokens,
            device=device,
        )
        # Past its tokens a row is zero; 512 rows of a short caption would fill the cache with nothing.
        return [
            {"prompt_embeds": row[:length].cpu().clone()}
            for row, length in zip(embeds_bld, _num_tokens(pipeline.tokenizer, texts), strict=True)
        ]

    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        return _num_tokens(self.load_tokenizer(), texts)

    def encode_given(self, pipeline: Any, item: Media) -> EncodedMedia:
        return encode_start(self, pipeline, item)

    @cached_property
    def _vae_config(self) -> ModelSettings:
        settings = self.folder.component_config("vae")
        # A folder saved by an older diffusers lacks the two, which were 8 and 4 then.
        return ModelSettings(
            {"scale_factor_spatial": 8, "scale_factor_temporal": 4, **settings}, settings.file
        )

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning:
        width = self.folder.component_config(self.trained[0])["text_dim"]
        return {"prompt_embeds": torch.ones(self.max_prompt_tokens, width)}

    def input_like(self, transformer: torch.nn.Module) -> dict[str, Any]:
        """Of the first layer: diffusers keeps the norms, the time embedding and some tables in fp32."""
        return next(
            {"device": parameter.device, "dtype": parameter.dtype}
            for name, parameter in transformer.named_parameters()
            if name.endswith("patch_embedding.weight")
        )

    def noisy_inputs(
        self,
        noisy_latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
        like: Mapping[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        timestep = self.timestep(sigma, like)
        return with_first_frames(noisy_latents, timestep, conditioning, patch_size=_PATCH)

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds_bld": self._prompt_embeds(conditioning).to(**like)}

    def _prompt_embeds(self, conditioning: Sequence[Conditioning]) -> torch.Tensor:
        """(B, 512, D): as in the pipeline, the model attends to the zeros after a prompt too."""
        rows_ld = [sample["prompt_embeds"][: self.max_prompt_tokens] for sample in conditioning]
        return pad_tokens(rows_ld, length=self.max_prompt_tokens)[0]

    def prompt_argument(self, prompt: Conditioning, like: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds": self._prompt_embeds([prompt]).to(like["device"])}

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        return super().call_arguments(pipeline, request) | preview_start(request)

    @property
    def pipeline_settings(self) -> dict[str, Any]:
        return super().pipeline_settings | {"expand_timesteps": self._is_ti2v}

    def pipeline_for(self, request: PreviewRequest) -> Any:
        return WanImageToVideoPipeline if request.inputs else WanPipeline

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        return start_code(request)


def tiny() -> WanPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of 24 channels; 16 latent channels at 1/8 of the size with the real model's statistics.
    """
    tokenizer = tokenizers.t5_tokenizer()
    text_encoder = text_encoders.tiny_umt5(tokenizer)
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=autoencoders.tiny_wan_vae(),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=tiny_wan_transformer(text_encoder.config.d_model),
    )


def tiny_wan_transformer(text_dim: int, *, seed: int = 0, **layout: int) -> WanTransformer3DModel:
    """A random Wan transformer in eval mode: two blocks of 24 channels.

    Args:
        **layout: what a release has of its own, such as ``in_channels`` or ``image_dim``.
    """
    with seeded(seed):
        return WanTransformer3DModel(
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=12,
            ffn_dim=32,
            text_dim=text_dim,
            rope_max_seq_len=32,
            **layout,
        ).eval()


def _num_tokens(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Tokens of each text after the pipeline's cleaning, uncut."""
    return [len(tokens) for tokens in tokenizer([prompt_clean(text) for text in texts])["input_ids"]]
