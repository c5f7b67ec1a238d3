"""Wan 2.1 and 2.2: text to video, TI2V, image to video, first and last frame to video, VACE, and Animate."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diffsynth_lite.releases import components as known
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer

_SCRIPT = f"{known.DIFFUSERS}scripts/convert_wan_to_diffusers.py"
_SIZE_480P, _SIZE_720P = (832, 480, 81), (1280, 720, 81)
_SHIFT = "flow_shift: 3 in the conversion script; Wan-Video/Wan2.1 samples at 5, from an image in 480P at 3"
_A14B_SHIFT = (
    "flow_shift: 3 in the conversion script; Wan-Video/Wan2.2 samples at 12 from text, at 5 from an image"
)


def _transformer(name: str, config: Mapping[str, Any]) -> ReleaseComponent:
    return ReleaseComponent(
        "WanTransformer3DModel",
        config,
        dtype="float32",
        source=f"`{name}` in {_SCRIPT}; dtype from the number of shards in {known.PINNED_FILES}",
    )


def _scheduler(flow_shift: float) -> ReleaseComponent:
    return ReleaseComponent(
        "UniPCMultistepScheduler",
        {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": flow_shift},
        source=_SCRIPT,
    )


_T5_TOKENIZER = ReleaseTokenizer("T5TokenizerFast", ("tokenizer.json", "spiece.model"))

_VAE_22 = {
    "base_dim": 160,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "decoder_base_dim": 256,
    "scale_factor_spatial": 16,
    "patch_size": 2,
    "latents_mean": (
        *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557),
        *(-0.1382, 0.0542, 0.2813, 0.0891, 0.157, -0.0098, 0.0375, -0.1825),
        *(-0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502),
        *(-0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.123),
        *(-0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.052, 0.3748),
        *(0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
    ),
    "latents_std": (
        *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.499, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901),
        *(0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659),
        *(0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944),
        *(0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.06, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
    ),
}

_T2V_14B = Release(
    name="Wan 2.1 T2V 14B",
    hub_id="Wan-AI/Wan2.1-T2V-14B-Diffusers",
    pipeline_class="WanPipeline",
    components={
        "transformer": _transformer("Wan-T2V-14B", {}),
        "text_encoder": known.UMT5_XXL_FP32,
        "vae": known.WAN_VAE,
    },
    scheduler=_scheduler(3.0),
    tokenizers={"tokenizer": _T5_TOKENIZER},
    size=_SIZE_480P,
    parameters=14e9,
    licence="Apache-2.0",
    gated=None,
    architecture="wan2.1",
    version="wan",
    sources={
        "pipeline": f"{known.PINNED_INDEXES}; files: {known.PINNED_FILES}",
        "size": "defaults of the pipeline",
        "parameters": "its name",
        "licence": "Wan-Video/Wan2.1, LICENSE.txt",
        "architecture": f"{known.MUSUBI}utils/sai_model_spec.py, dataset/architectures.py: for 2.1 and A14B",
    },
    unconfirmed=(_SHIFT, "dtype of the transformer"),
)
_T2V_1B = _T2V_14B.but(
    "Wan 2.1 T2V 1.3B",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    transformer=_transformer("Wan-T2V-1.3B", {"ffn_dim": 8960, "num_attention_heads": 12, "num_layers": 30}),
    parameters=1.3e9,
    unconfirmed=(_SHIFT,),
)

_WAN22_SOURCES = {
    **_T2V_14B.sources,
    "pipeline": f"{_SCRIPT}; files: {known.PINNED_FILES}",
    "size": "Wan-Video/Wan2.2, README.md",
    "licence": known.LICENCES,
}
_T2V_A14B = _T2V_14B.but(
    "Wan 2.2 T2V A14B",
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    settings={"boundary_ratio": 0.875},
    transformer=_transformer("Wan2.2-T2V-A14B", {}),
    transformer_2=_transformer("Wan2.2-T2V-A14B", {}),
    text_encoder=known.UMT5_XXL,
    size=_SIZE_720P,
    gated=False,
    sources=_WAN22_SOURCES,
    unconfirmed=(_A14B_SHIFT,),
)
_TI2V_5B = _T2V_14B.but(
    "Wan 2.2 TI2V 5B",
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    settings={"expand_timesteps": True},
    transformer=_transformer(
        "Wan2.2-TI2V-5B",
        {
            "ffn_dim": 14336,
            "in_channels": 48,
            "num_attention_heads": 24,
            "num_layers": 30,
            "out_channels": 48,
        },
    ),
    text_encoder=known.UMT5_XXL,
    vae=ReleaseComponent(
        "AutoencoderKLWan",
        _VAE_22,
        dtype="float32",
        source=f"`vae22_diffusers_config` in {_SCRIPT}; dtype from memory",
    ),
    scheduler=_scheduler(5.0),
    size=(1280, 704, 121),
    parameters=5e9,
    gated=False,
    architecture="wan-2_2-ti2v-5b",
    version=None,
    sources={**_WAN22_SOURCES, "architecture": known.SWARM},
    unconfirmed=("dtype of the autoencoder",),
)
WAN: tuple[Release, ...] = (_T2V_1B, _T2V_14B, _T2V_A14B, _TI2V_5B)

_SEES_IMAGES = {"added_kv_proj_dim": 5120, "image_dim": 1280, "in_channels": 36}
_I2V_480P = _T2V_14B.but(
    "Wan 2.1 I2V 14B 480P",
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
    pipeline_class="WanImageToVideoPipeline",
    transformer=_transformer("Wan-I2V-14B-480p", _SEES_IMAGES),
    image_encoder=known.CLIP_VISION_H,
    tokenizers={"tokenizer": _T5_TOKENIZER, "image_processor": ReleaseTokenizer("CLIPImageProcessor")},
    parameters=None,
    sources={"parameters": "none: 14B in its name leaves out what sees the images", "size": "its name"},
    unconfirmed=(_SHIFT, "dtype of the image encoder"),
)
_I2V_720P = _I2V_480P.but(
    "Wan 2.1 I2V 14B 720P",
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
    transformer=_transformer("Wan-I2V-14B-720p", _SEES_IMAGES),
    size=_SIZE_720P,
)
_FLF2V = _I2V_480P.but(
    "Wan 2.1 FLF2V 14B 720P",
    "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
    transformer=_transformer("Wan-FLF2V-14B-720P", {**_SEES_IMAGES, "pos_embed_seq_len": 2 * 257}),
    scheduler=_scheduler(16.0),
    tokenizers={
        "tokenizer": _T5_TOKENIZER,
        "image_processor": ReleaseTokenizer("CLIPProcessor", ("tokenizer.json", "vocab.json", "merges.txt")),
    },
    size=_SIZE_720P,
    unconfirmed=("dtype of the image encoder",),
)
_I2V_A14B = _T2V_A14B.but(
    "Wan 2.2 I2V A14B",
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    pipeline_class="WanImageToVideoPipeline",
    settings={"boundary_ratio": 0.9},
    transformer=_transformer("Wan2.2-I2V-14B-720p", {"in_channels": 36}),
    transformer_2=_transformer("Wan2.2-I2V-14B-720p", {"in_channels": 36}),
)
WAN_I2V: tuple[Release, ...] = (_I2V_480P, _I2V_720P, _FLF2V, _I2V_A14B)


def _vace_transformer(name: str, config: Mapping[str, Any]) -> ReleaseComponent:
    return ReleaseComponent("WanVACETransformer3DModel", config, source=f"`{name}` in {_SCRIPT}")


_VACE_14B = _T2V_14B.but(
    "Wan 2.1 VACE 14B",
    "Wan-AI/Wan2.1-VACE-14B-diffusers",
    pipeline_class="WanVACEPipeline",
    transformer=_vace_transformer("Wan-VACE-14B", {}),
    text_encoder=known.UMT5_XXL,
    size=_SIZE_720P,
    parameters=None,
    architecture="wan-2_1-vace-14b",
    version=None,
    sources={
        "pipeline": f"{_SCRIPT}; hub ids: {known.DIFFUSERS}docs/source/en/api/pipelines/wan.md",
        "parameters": "none: 14B in its name leaves out the further blocks",
        "size": "that of Wan 2.1 T2V 14B",
        "architecture": known.SWARM,
    },
    unconfirmed=(_SHIFT, "dtype of the transformer"),
)
_VACE_1B = _VACE_14B.but(
    "Wan 2.1 VACE 1.3B",
    "Wan-AI/Wan2.1-VACE-1.3B-diffusers",
    transformer=_vace_transformer(
        "Wan-VACE-1.3B",
        {
            "ffn_dim": 8960,
            "num_attention_heads": 12,
            "num_layers": 30,
            "vace_layers": tuple(range(0, 30, 2)),
        },
    ),
    size=_SIZE_480P,
    architecture="wan-2_1-vace-1_3b",
    sources={
        "parameters": "none: 1.3B in its name leaves out the further blocks",
        "size": "that of Wan 2.1 T2V 1.3B",
    },
)
_VIDEOX_FUN = "aigc-apps/VideoX-Fun, "
_VACE_FUN = replace(
    _vace_transformer("Wan2.2-VACE-Fun-14B", {}),
    dtype="bfloat16",
    source=f"as of Wan 2.1 VACE 14B in {_SCRIPT}; dtype from seven shards, 34.7 GB",
)
_VACE_FUN_A14B = _VACE_14B.but(
    "Wan 2.2 VACE-Fun A14B",
    "linoyts/Wan2.2-VACE-Fun-14B-diffusers",
    settings={"boundary_ratio": 0.875},
    transformer=_VACE_FUN,
    transformer_2=_VACE_FUN,
    sources={
        "pipeline": f"{_SCRIPT}; its model_index.json on the hub",
        "size": "that of Wan 2.2 T2V A14B, of which it is made",
        "licence": "of alibaba-pai/Wan2.2-VACE-Fun-A14B, by the card of a conversion of it",
        "architecture": f"that of Wan 2.1 VACE 14B, whose layers it has: {known.SWARM}",
    },
    unconfirmed=(
        "the folder is a conversion of alibaba-pai/Wan2.2-VACE-Fun-A14B by another account",
        f"flow_shift: 3 in the conversion script; {_VIDEOX_FUN}examples/wan2.2_vace_fun samples at 5",
    ),
)
WAN_VACE: tuple[Release, ...] = (_VACE_1B, _VACE_14B, _VACE_FUN_A14B)

_ANIMATE_14B = _I2V_480P.but(
    "Wan 2.2 Animate 14B",
    "Wan-AI/Wan2.2-Animate-14B-Diffusers",
    pipeline_class="WanAnimatePipeline",
    transformer=ReleaseComponent(
        "WanAnimateTransformer3DModel",
        {"added_kv_proj_dim": 5120},
        dtype="bfloat16",
        source=f"`Wan2.2-Animate-14B` in {_SCRIPT}; dtype from memory",
    ),
    scheduler=_scheduler(5.0),
    size=(1280, 720, 77),
    architecture=None,
    sources={
        "size": f"the defaults of its pipeline in {known.DIFFUSERS}",
        "architecture": "no program is known to name it",
    },
    unconfirmed=("dtype of the transformer and of the image encoder",),
)
WAN_ANIMATE: tuple[Release, ...] = (_ANIMATE_14B,)
