"""Where each number that a release states was read, as a repository, a commit and a path; or why it was not.

Those that diffusers has are in ``class_defaults.py`` and ``diffusers_numbers.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from class_defaults import Row, size


def _language(*values: int | None, prefix: str = "") -> dict[str, Any]:
    """Widths, heads, layers, heads of keys, vocabulary and width of a head of a language model, in order."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    names += ("num_key_value_heads", "vocab_size", "head_dim")
    given = zip(names, values, strict=False)
    return {f"{prefix}{name}": value for name, value in given if value is not None}


def _vision(**values: Any) -> dict[str, Any]:
    return {f"vision_config.{name}": value for name, value in values.items()}


def _qwen3_vl(*language: int, layers: Sequence[int], depth: int, width: int, inner: int) -> dict[str, Any]:
    return _language(*language, prefix="text_config.") | _vision(
        deepstack_visual_indexes=tuple(layers),
        depth=depth,
        hidden_size=width,
        intermediate_size=inner,
        num_heads=16,
        out_hidden_size=language[0],
    )


def _clip(width: int, inner: int, heads: int, layers: int) -> dict[str, int]:
    return _language(width, inner, heads, layers) | {"projection_dim": width}


def _t5(width: int, inner: int, heads: int, layers: int, **others: Any) -> dict[str, Any]:
    return {"d_model": width, "d_ff": inner, "num_heads": heads, "num_layers": layers, "d_kv": 64} | others


_K5 = ("model_dim", "ff_dim", "num_visual_blocks", "axes_dims")
_T5_XXL = _t5(4096, 10240, 64, 24, vocab_size=32128, tie_word_embeddings=False)
_CLIP_L = _clip(768, 3072, 12, 12)
_TOWER = {"num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "head_dim": 64}
_PIXTRAL = _vision(**_TOWER, hidden_size=1024, image_size=1540, intermediate_size=4096)
_SIGLIP = _language(1152, 4304, 16, 27) | {"patch_size": 14}
_QWEN3_VL_8B = _qwen3_vl(
    *(4096, 12288, 32, 36, 8, 151936, 128), layers=(8, 16, 24), depth=27, width=1152, inner=4304
)
_QWEN3_VL_32B = _QWEN3_VL_8B | _language(5120, 25600, 64, 64, prefix="text_config.")
_QWEN25_VL_7B = (3584, 18944, 28, 28, 4, 152064)
_LLAMA = (4096, 14336, 32, 32, 8, 128320)
_LLAVA = _language(*_LLAMA, prefix="text_config.") | {"image_token_index": 128257, "pad_token_id": 128258}
_QWEN_LINE = {"base_image_seq_len": 256, "max_image_seq_len": 8192, "base_shift": 0.5, "max_shift": 0.9}
_QWEN_SHIFT = _QWEN_LINE | {"use_dynamic_shifting": True, "shift_terminal": 0.02}
_KL = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "sample_size": 1024}
_KL_16 = _KL | {"latent_channels": 16, "use_post_quant_conv": False, "use_quant_conv": False}
_FLUX_VAE_OF = ("FLUX.1 ", "Chroma1", "Kandinsky 5.0 T2I", "LongCat", "Lumina", "NetaYume", "Z-Image")
_WITH_FLUX_VAE = tuple(f"{name}* / vae" for name in _FLUX_VAE_OF)
_AURA = {at: (f"AuraFlow* / {at}", f"Pony V7 / {at}") for at in ("transformer", "text_encoder", "vae")}
_SD3 = {"joint_attention_dim": 4096, "pooled_projection_dim": 2048}
_SD3_MEDIUM = {"caption_projection_dim": 1536, "num_attention_heads": 24, "num_layers": 24}
_BETAS = {"beta_end": 0.012, "beta_start": 0.00085, "steps_offset": 1}

MUSUBI = "kohya-ss/musubi-tuner, 30c658c4f4b0, src/musubi_tuner/"
FORGE = "lllyasviel/stable-diffusion-webui-forge, dfdcbab685e5, backend/huggingface/"
LUMINA = "Alpha-VLLM/Lumina-Image-2.0 on the hub, 26d0f62a411a, "

READ: Mapping[str, Sequence[Row]] = {
    "tdrussell/diffusion-pipe, 8f83dbf25d03, configs/auraflow, which has three such files": (
        (_AURA["transformer"], {"pos_embed_max_size": 9216}),
        (_AURA["text_encoder"], _t5(2048, 5120, 32, 24, vocab_size=32128)),
        (_AURA["vae"], _KL | {"scaling_factor": 0.13025}),
    ),
    f"{LUMINA}scheduler/scheduler_config.json": (("Lumina-Image 2.0 / scheduler", {"shift": 6.0}),),
    f"{LUMINA}transformer/config.json": (
        (("Lumina-Image 2.0 / transformer", "NetaYume Lumina* / transformer"), {"cap_feat_dim": 2304}),
    ),
    f"{MUSUBI}flux/flux_utils.py": (
        (("Chroma1* / text_encoder", "CogVideoX* / text_encoder", "LTX-Video* / text_encoder"), _T5_XXL),
        (("FLUX.1 * / text_encoder_2", "Stable Diffusion 3* / text_encoder_3"), _T5_XXL),
    ),
    f"{MUSUBI}flux_2/flux2_utils.py": (
        ("FLUX.2 dev / text_encoder", {"spatial_merge_size": 2}),
        ("FLUX.2 dev / text_encoder", _language(5120, 32768, 32, 40, 8, 131072, 128, prefix="text_config.")),
        (("FLUX.2 dev / text_encoder", "ERNIE-Image* / text_encoder"), _PIXTRAL),
    ),
    f"{MUSUBI}frame_pack/framepack_utils.py": (
        ("HunyuanVideo 1.5*I2V* / image_encoder", _SIGLIP | {"image_size": 384}),
    ),
    "asadfgglie/banban-vision-8b-v1-pretrain-zh/config.json": (("HunyuanVideo I2V* / text_encoder", _LLAVA),),
    f"{MUSUBI}hunyuan_model/text_encoder.py": (
        ("HunyuanVideo / text_encoder", _language(*_LLAMA)),
        (("HunyuanVideo / text_encoder_2", "HunyuanVideo I2V* / text_encoder_2"), _CLIP_L),
    ),
    f"{MUSUBI}hunyuan_video_1_5/hunyuan_video_1_5_text_encoder.py": (
        ("HunyuanVideo 1.5* / text_encoder_2", _t5(1472, 3584, 6, 12, vocab_size=384)),
        ("HunyuanVideo 1.5* / text_encoder_2", {"tie_word_embeddings": False}),
    ),
    f"{MUSUBI}ideogram4/ideogram4_utils.py": (
        (("Ideogram 4* / text_encoder", "Qwen-Image 2.1 / text_encoder"), _QWEN3_VL_8B),
        (
            ("Ideogram 4* / text_encoder", "Qwen-Image 2.1 / text_encoder"),
            {"tie_word_embeddings": False},
        ),
    ),
    f"{MUSUBI}krea2/krea2_encoder.py": (
        (
            ("Krea 2* / text_encoder", "FLUX.3 * / text_encoder"),
            _qwen3_vl(
                *(2560, 9728, 32, 36, 8, 151936, 128), layers=(5, 11, 17), depth=24, width=1024, inner=4096
            ),
        ),
        (("Krea 2* / text_encoder", "FLUX.3 * / text_encoder"), {"tie_word_embeddings": True}),
    ),
    "modelscope/DiffSynth-Studio, fed7b18fac2e, minimax_h3_text_encoder.py, but its 64 layers": (
        ("MiniMax-H3 / text_encoder", _QWEN3_VL_32B | _vision(out_hidden_size=5120)),
        ("MiniMax-H3 / text_encoder", {"tie_word_embeddings": False}),
    ),
    f"{MUSUBI}qwen_image/qwen_image_utils.py": (
        ("HunyuanVideo 1.5* / text_encoder", _language(*_QWEN25_VL_7B)),
        (
            tuple(
                f"{one} / text_encoder" for one in ("Qwen-Image", "Qwen-Image-*", "LongCat*", "Kandinsky*")
            ),
            _language(*_QWEN25_VL_7B, prefix="text_config.")
            | _vision(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=3584)
            | {"tie_word_embeddings": False},
        ),
        (("Qwen-Image / scheduler", "Qwen-Image-2512 / scheduler"), _QWEN_SHIFT),
    ),
    f"{MUSUBI}qwen_image_cache_latents.py": (("Qwen-Image-Layered / vae", {"input_channels": 4}),),
    f"{MUSUBI}qwen_image/qwen_image_model.py, what it says of the layered model": (
        ("Qwen-Image-Layered / transformer", {"use_additional_t_cond": True, "use_layer3d_rope": True}),
    ),
    f"{MUSUBI}wan/modules/t5.py": (("Wan * / text_encoder", _t5(4096, 10240, 64, 24, vocab_size=256384)),),
    f"{MUSUBI}wan/modules/clip.py": (
        (
            ("Wan 2.1 *[0-9]P / image_encoder", "Wan 2.2 Animate * / image_encoder"),
            _clip(1280, 5120, 16, 32) | {"projection_dim": 1024, "patch_size": 14},
        ),
    ),
    f"{MUSUBI}zimage/zimage_utils.py": (
        (
            ("FLUX.2 klein*4B / text_encoder", "Z-Image* / text_encoder"),
            _language(2560, 9728, 32, 36, 8, None, 128) | {"tie_word_embeddings": True},
        ),
        (
            "FLUX.2 klein*9B / text_encoder",
            _language(4096, 12288, 32, 36, 8, None, 128) | {"tie_word_embeddings": False},
        ),
    ),
    f"{FORGE}black-forest-labs/FLUX.1-dev": (
        (("FLUX.1 *dev / transformer",), {"guidance_embeds": True}),
        (("FLUX.1 * / text_encoder", "Kandinsky 5.0 * / text_encoder_2"), _CLIP_L),
        (_WITH_FLUX_VAE, _KL_16 | {"scaling_factor": 0.3611, "shift_factor": 0.1159}),
        # convert_flux2_to_diffusers.py loads this one, too.
        (("FLUX.1 *dev / scheduler", "FLUX.2 * / scheduler"), {"shift": 3.0, "use_dynamic_shifting": True}),
    ),
    f"{FORGE}stabilityai/stable-diffusion-3-medium-diffusers": (
        ("Stable Diffusion 3 medium / transformer", _SD3 | _SD3_MEDIUM | {"pos_embed_max_size": 192}),
        ("Stable Diffusion 3* / text_encoder", _CLIP_L),
        ("Stable Diffusion 3* / text_encoder_2", _clip(1280, 5120, 20, 32)),
        ("Stable Diffusion 3* / vae", _KL_16 | {"scaling_factor": 1.5305, "shift_factor": 0.0609}),
        ("Stable Diffusion 3* / scheduler", {"shift": 3.0}),
    ),
    "lllyasviel/stable-diffusion-webui-forge, 2d5b6cacefa4, "
    "backend/huggingface/stabilityai/stable-diffusion-3.5-large": (
        (
            "Stable Diffusion 3.5 large* / transformer",
            _SD3 | {"caption_projection_dim": 2432, "num_attention_heads": 38, "num_layers": 38},
        ),
        ("Stable Diffusion 3.5 large* / transformer", {"pos_embed_max_size": 192}),
    ),
    f"{FORGE}stabilityai/stable-diffusion-xl-base-1.0": (
        ("SDXL base 1.0 / size", size(1024, 1024)),
        (
            "SDXL * / unet",
            {"addition_time_embed_dim": 256, "attention_head_dim": (5, 10, 20), "cross_attention_dim": 2048}
            | {"block_out_channels": (320, 640, 1280), "projection_class_embeddings_input_dim": 2816}
            | {"sample_size": 128, "transformer_layers_per_block": (1, 2, 10), "use_linear_projection": True},
        ),
        ("SDXL * / text_encoder", _CLIP_L),
        ("SDXL * / text_encoder_2", _clip(1280, 5120, 20, 32)),
        ("SDXL * / vae", _KL | {"scaling_factor": 0.13025}),
        ("SDXL base 1.0 / scheduler", _BETAS),
    ),
    "kandinskylab/kandinsky-5, 6e2a80517cdf, configs/k5_lite_t2i_sft_hd.yaml and k5_*_t2v_5s_sft_sd.yaml": (
        ("Kandinsky 5.0 * / transformer", {"in_visual_dim": 16, "out_visual_dim": 16}),
        ("Kandinsky 5.0 T2I * / transformer", dict(zip(_K5, (2560, 10240, 50, (32, 48, 48)), strict=True))),
        ("Kandinsky 5.0 ?2V * / transformer", {"visual_cond": True}),
        ("Kandinsky*2V Lite * / transformer", dict(zip(_K5, (1792, 7168, 32, (16, 24, 24)), strict=True))),
        ("Kandinsky*2V Pro * / transformer", dict(zip(_K5, (4096, 16384, 60, (32, 48, 48)), strict=True))),
        ("Kandinsky 5.0 ?2V Pro * / transformer", {"num_text_blocks": 4, "time_dim": 1024}),
    ),
    "QwenLM/Qwen-Image, 0a83598a8929, README.md": (
        (("Qwen-Image / size", "Qwen-Image-2512 / size"), size(1328, 1328)),
    ),
    "QwenLM/Qwen-Image-2.1, 0f0715e801e8, README.md": (("Qwen-Image 2.1 / size", size(2048, 2048)),),
    "deAPI-ai/hidreami1dev on the hub; HiDream-ai/HiDream-I1, f418a4b13bc5, inference.py; shared parts": (
        ("HiDream-I1* / transformer", {"axes_dims_rope": (64, 32, 32), "caption_channels": (4096, 4096)}),
        ("HiDream-I1* / transformer", {"in_channels": 16, "out_channels": 16, "patch_size": 2}),
        ("HiDream-I1* / transformer", {"llama_layers": (*range(32), *(31,) * 16)}),
        ("HiDream-I1 Full / scheduler", {"flow_shift": 3.0, "use_flow_sigmas": True}),
        ("HiDream-I1 Dev / scheduler", {"shift": 6.0}),
        ("HiDream-I1 Fast / scheduler", {"shift": 3.0}),
        ("HiDream-I1* / text_encoder", _CLIP_L | {"max_position_embeddings": 248}),
        ("HiDream-I1* / text_encoder_2", _clip(1280, 5120, 20, 32) | {"max_position_embeddings": 248}),
        ("HiDream-I1* / text_encoder_3", _T5_XXL),
        ("HiDream-I1* / text_encoder_4", _language(4096, 14336, 32, 32, 8, 128256)),
        ("HiDream-I1* / vae", _KL_16 | {"scaling_factor": 0.3611, "shift_factor": 0.1159}),
    ),
    "Wan-Video/Wan2.2, 84b91a8719b2, wan/configs/__init__.py": (
        ("Wan 2.2 * A14B / size", {"width": 1280, "height": 720}),
        ("Wan 2.2 TI2V 5B / size", {"width": 1280, "height": 704}),
    ),
    f"{MUSUBI}wan/configs/__init__.py": (
        (("Wan 2.1 * 720P / size", "Wan 2.1 VACE 14B / size"), {"width": 1280, "height": 720}),
    ),
    "dgrauet/ernie-image-mlx, 23c9637e5e32, "
    "packages/ernie-image-core-mlx/src/ernie_image_core_mlx/model/config.py": (
        (
            "ERNIE-Image* / transformer",
            {"ffn_hidden_size": 12288, "hidden_size": 4096, "num_attention_heads": 32, "num_layers": 36}
            | {"text_in_dim": 3072},
        ),
        (
            "ERNIE-Image* / text_encoder",
            _language(3072, 9216, 32, 26, 8, 131072, 128, prefix="text_config.")
            | {"text_config.tie_word_embeddings": True},
        ),
    ),
}

UNCONFIRMED: Mapping[str, Sequence[Row]] = {
    "which together give the number of parameters of google/gemma-4-12B": (
        (
            "LTX-2.5 22B / text_encoder",
            _language(3840, 15360, 16, 48, 8, None, 256, prefix="text_config.")
            | {"text_config.attention_k_eq_v": True, "text_config.num_global_key_value_heads": 1},
        ),
    ),
    "of the published file, which the conversion reads from its weights": (
        ("Anima* / text_encoder", _language(1024, 3072, 16, 28, 8, 151936, 128)),
        (
            "Stable Diffusion 3.5 medium / transformer",
            _SD3 | _SD3_MEDIUM | {"dual_attention_layers": tuple(range(13)), "pos_embed_max_size": 384},
        ),
    ),
    "as in copies that are not at hand at a commit": (
        (("AuraFlow* / scheduler", "Pony V7 / scheduler"), {"shift": 1.73}),
        ("Pony V7 / size", size(1280, 1536)),
        (
            ("Chroma1* / scheduler", "LongCat-Image* / scheduler"),
            {"shift": 3.0, "use_dynamic_shifting": True},
        ),
        ("LongCat-Image* / transformer", {"num_layers": 10, "num_single_layers": 20}),
        ("ERNIE-Image* / scheduler", {"shift": 4.0}),
        ("FLUX.1 Fill dev / transformer", {"in_channels": 384, "out_channels": 64}),
        ("Kandinsky 5.0 * / scheduler", {"shift": 5.0}),
        ("ERNIE-Image* / text_encoder", {"spatial_merge_size": 2, "tie_word_embeddings": True}),
        ("NetaYume Lumina* / scheduler", {"shift": 6.0}),
        ("Qwen-Image 2.1 / scheduler", _QWEN_SHIFT),
        (("Qwen-Image-Edit* / scheduler", "Qwen-Image-Layered / scheduler"), _QWEN_SHIFT),
        ("Qwen-Image-Edit-2511 / transformer", {"zero_cond_t": True}),
        ("Z-Image / scheduler", {"shift": 6.0}),
        ("Z-Image-Turbo / scheduler", {"shift": 3.0}),
    ),
    "from memory": (
        (("FLUX.2 dev / text_encoder", "HiDream-I1* / text_encoder_4"), {"tie_word_embeddings": False}),
        (
            ("LTX-2 19B / text_encoder", "LTX-2.3 22B / text_encoder"),
            _language(3840, 15360, 16, 48, 8, None, 256, prefix="text_config.")
            | {"text_config.sliding_window": 1024}
            | _vision(**_SIGLIP, image_size=896),
        ),
        ("SDXL Turbo / scheduler", _BETAS),
    ),
    "no source says the width, or the number of frames": (
        ("HunyuanVideo 1.5 480p* / size", {"width": 848, "height": 480}),
        ("HunyuanVideo 1.5 720p* / size", {"width": 1280, "height": 720}),
        ("Wan 2.2 TI2V 5B / size", {"frames": 121}),
    ),
}
