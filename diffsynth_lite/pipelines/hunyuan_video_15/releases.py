"""HunyuanVideo 1.5: 480p and 720p, from text and from images, and what was distilled from these."""

from diffsynth_lite.releases.components import DIFFUSERS, MUSUBI, T5_SHAPE, encoder_sizes, flow_euler
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer

_SCRIPT_15 = f"{DIFFUSERS}scripts/convert_hunyuan_video1_5_to_diffusers.py"

_README_15 = "Tencent-Hunyuan/HunyuanVideo-1.5, README.md"


def _transformer_15(task_type: str, target_size: int) -> ReleaseComponent:
    return ReleaseComponent(
        "HunyuanVideo15Transformer3DModel",
        {"task_type": task_type, "target_size": target_size},
        source=_SCRIPT_15,
    )


_480P_T2V = Release(
    name="HunyuanVideo 1.5 480p T2V",
    hub_id="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
    pipeline_class="HunyuanVideo15Pipeline",
    components={
        "transformer": _transformer_15("i2v", 640),
        "text_encoder": ReleaseComponent(
            "Qwen2_5_VLTextModel",
            encoder_sizes(3584, 18944, 28, 28, 4, 152064),
            dtype="bfloat16",
            source=f"the language model of Qwen/Qwen2.5-VL-7B-Instruct, as {_SCRIPT_15} takes it; its "
            f"numbers as in {MUSUBI}qwen_image/qwen_image_utils.py",
        ),
        "text_encoder_2": ReleaseComponent(
            "T5EncoderModel",
            {
                **T5_SHAPE,
                "d_ff": 3584,
                "d_model": 1472,
                "num_heads": 6,
                "num_layers": 12,
                "tie_word_embeddings": False,
                "vocab_size": 384,
            },
            source=f"google/byt5-small, as in {MUSUBI}hunyuan_video_1_5/hunyuan_video_1_5_text_encoder.py",
        ),
        "vae": ReleaseComponent(
            "AutoencoderKLHunyuanVideo15", source=f"{_SCRIPT_15}: the defaults of the class"
        ),
    },
    scheduler=flow_euler(5.0, _SCRIPT_15),
    tokenizers={
        "tokenizer": ReleaseTokenizer("Qwen2Tokenizer"),
        "tokenizer_2": ReleaseTokenizer("ByT5Tokenizer"),
        "guider": ReleaseTokenizer("ClassifierFreeGuidance"),
    },
    size=(848, 480, 121),
    parameters=8.3e9,
    licence="Tencent Hunyuan Community, not for the EU, the UK and South Korea",
    gated=None,
    architecture="hunyuan-video-1.5",
    sources={
        "pipeline": f"{DIFFUSERS}docs/source/en/api/pipelines/hunyuan_video15.md",
        "size": f"frames of the pipeline's default; 480p, whose width is not in {_README_15}",
        "parameters": _README_15,
        "licence": "Tencent-Hunyuan/HunyuanVideo-1.5, LICENSE",
        "architecture": f"{MUSUBI}utils/sai_model_spec.py",
    },
    unconfirmed=(
        "dtypes of transformer, autoencoder and ByT5",
        "the rows that the conversion adds to ByT5's vocabulary for colours and fonts",
        "hub id, but for that of 480p T2V",
        "width",
    ),
)

_FROM_IMAGES = {
    "image_encoder": ReleaseComponent(
        "SiglipVisionModel",
        {"image_size": 384, "patch_size": 14, **encoder_sizes(1152, 4304, 16, 27)},
        dtype="bfloat16",
        source=f"SigLIP so400m of FLUX.1-Redux-dev, as {_SCRIPT_15} takes it; its numbers from memory",
    )
}

_480P_I2V = _480P_T2V.but(
    "HunyuanVideo 1.5 480p I2V",
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v",
    pipeline_class="HunyuanVideo15ImageToVideoPipeline",
    **_FROM_IMAGES,
    tokenizers={"feature_extractor": ReleaseTokenizer("SiglipImageProcessor")},
    unconfirmed=(*_480P_T2V.unconfirmed, "numbers of the image encoder"),
)

_720P_T2V = _480P_T2V.but(
    "HunyuanVideo 1.5 720p T2V",
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
    transformer=_transformer_15("t2v", 960),
    scheduler=flow_euler(9.0, _SCRIPT_15),
    size=(1280, 720, 121),
)

_720P_I2V = _480P_I2V.but(
    "HunyuanVideo 1.5 720p I2V",
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v",
    transformer=_transformer_15("i2v", 960),
    scheduler=flow_euler(7.0, _SCRIPT_15),
    size=(1280, 720, 121),
)

_WITHOUT_GUIDANCE = "50 steps without guidance"

_480P_T2V_DISTILLED = _480P_T2V.but(
    "HunyuanVideo 1.5 480p T2V distilled",
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v_distilled",
    transformer=_transformer_15("t2v", 640),
    distilled=_WITHOUT_GUIDANCE,
)

_480P_I2V_DISTILLED = _480P_I2V.but(
    "HunyuanVideo 1.5 480p I2V distilled",
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v_distilled",
    distilled=_WITHOUT_GUIDANCE,
)

_720P_I2V_DISTILLED = _720P_I2V.but(
    "HunyuanVideo 1.5 720p I2V distilled",
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v_distilled",
    distilled=_WITHOUT_GUIDANCE,
)

HUNYUAN_VIDEO_15: tuple[Release, ...] = (
    *(_480P_T2V, _480P_I2V, _720P_T2V, _720P_I2V),
    *(_480P_T2V_DISTILLED, _480P_I2V_DISTILLED, _720P_I2V_DISTILLED),
)
