"""Where each number of a release was read that diffusers' own scripts and pages have.

Those that are defaults of its classes are in ``class_defaults.py``, all others in ``release_numbers.py``.
"""

from collections.abc import Mapping, Sequence

from class_defaults import Row, size
from wan22_statistics import WAN22_DEVIATIONS, WAN22_MEANS

_AT = "huggingface/diffusers, 58eb52c0803e, "
_LTX_LINE = {"base_image_seq_len": 1024, "max_image_seq_len": 4096, "base_shift": 0.95, "max_shift": 2.05}
_LTX_USE = {"use_dynamic_shifting": True, "shift_terminal": 0.1}
_CONNECTOR = {"caption_channels": 3840, "text_proj_in_factor": 49}
_SEES = {"added_kv_proj_dim": 5120, "image_dim": 1280, "in_channels": 36}

READ_IN_DIFFUSERS: Mapping[str, Sequence[Row]] = {
    f"{_AT}scripts/convert_anima_to_diffusers.py": (
        ("Anima* / scheduler", {"shift": 3.0}),
        ("Anima* / text_encoder", {"tie_word_embeddings": False}),
    ),
    f"{_AT}scripts/convert_cosmos_to_diffusers.py": (
        ("Anima* / transformer", {"num_attention_heads": 16, "rope_scale": (1.0, 4.0, 4.0)}),
    ),
    f"{_AT}scripts/convert_cogvideox_to_diffusers.py, its arguments and what it says of them": (
        ("CogVideoX* / scheduler", {"clip_sample": False, "rescale_betas_zero_snr": True}),
        ("CogVideoX 2B / scheduler", {"snr_shift_scale": 3.0}),
        ("CogVideoX* 5B / scheduler", {"snr_shift_scale": 1.0}),
        ("CogVideoX 2B / vae", {"scaling_factor": 1.15258426}),
        ("CogVideoX* 5B / vae", {"scaling_factor": 0.7}),
        ("CogVideoX 1.5 5B / vae", {"invert_scale_latents": True}),
        (
            "CogVideoX* 5B / transformer",
            {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
        ),
        ("CogVideoX 1.5 5B / transformer", {"patch_bias": False, "patch_size_t": 2}),
        (
            "CogVideoX 1.5 5B / transformer",
            {"sample_frames": 81, "sample_height": 300, "sample_width": 300},
        ),
    ),
    f"{_AT}docs/source/en/api/pipelines/cogvideox.md": (("CogVideoX 1.5 5B / size", size(1360, 768, 81)),),
    f"{_AT}scripts/convert_dcae_to_diffusers.py": (
        (
            "Sana* / vae",
            {
                "encoder_layers_per_block": (2, 2, 2, 3, 3, 3),
                "encoder_qkv_multiscales": (*((),) * 3, *((5,),) * 3),
                "decoder_qkv_multiscales": (*((),) * 3, *((5,),) * 3),
                "scaling_factor": 0.41407,
            },
        ),
    ),
    f"{_AT}scripts/convert_flux2_to_diffusers.py": (
        ("FLUX.2 klein* / transformer", {"guidance_embeds": False}),
        (
            "FLUX.2 klein*4B / transformer",
            {
                "joint_attention_dim": 7680,
                "num_attention_heads": 24,
                "num_layers": 5,
                "num_single_layers": 20,
            },
        ),
        (
            "FLUX.2 klein*9B / transformer",
            {
                "joint_attention_dim": 12288,
                "num_attention_heads": 32,
                "num_layers": 8,
                "num_single_layers": 24,
            },
        ),
        (("FLUX.2 klein 4B / settings", "FLUX.2 klein 9B / settings"), {"is_distilled": True}),
    ),
    f"{_AT}scripts/convert_hunyuan_video_to_diffusers.py, its default": (
        (("HunyuanVideo / scheduler", "HunyuanVideo I2V* / scheduler"), {"shift": 7.0}),
        ("HunyuanVideo I2V 33ch / transformer", {"guidance_embeds": False, "in_channels": 33}),
    ),
    f"{_AT}scripts/convert_hunyuan_video1_5_to_diffusers.py": (
        ("HunyuanVideo 1.5 480p* / transformer", {"target_size": 640}),
        ("HunyuanVideo 1.5 720p* / transformer", {"target_size": 960}),
        ("HunyuanVideo 1.5 480p* / scheduler", {"shift": 5.0}),
        ("HunyuanVideo 1.5 720p T2V / scheduler", {"shift": 9.0}),
        ("HunyuanVideo 1.5 720p I2V* / scheduler", {"shift": 7.0}),
    ),
    f"{_AT}docs/source/en/api/pipelines/krea2.md": (("Krea 2 Turbo / settings", {"is_distilled": True}),),
    f"{_AT}scripts/convert_ltx_to_diffusers.py": (
        (("LTX-Video 0.9 / scheduler", "LTX-Video 0.9.1 / scheduler"), _LTX_LINE | _LTX_USE),
        (
            "LTX-Video 0.9.[1-9]* / vae",
            {
                "decoder_block_out_channels": (256, 512, 1024),
                "decoder_spatio_temporal_scaling": (True,) * 3,
                "timestep_conditioning": True,
                "upsample_factor": (2, 2, 2),
                "upsample_residual": (True,) * 3,
            },
        ),
        (
            "LTX-Video 0.9.1 / vae",
            {
                "decoder_inject_noise": (True, True, True, False),
                "decoder_layers_per_block": (5, 6, 7, 8),
            },
        ),
        (
            "LTX-Video 0.9.[5-9]* / vae",
            {
                "block_out_channels": (128, 256, 512, 1024, 2048),
                "decoder_inject_noise": (False,) * 4,
                "decoder_layers_per_block": (5, 5, 5, 5),
                "layers_per_block": (4, 6, 6, 2, 2),
                "spatial_compression_ratio": 32,
                "spatio_temporal_scaling": (True,) * 4,
                "temporal_compression_ratio": 8,
            },
        ),
        (
            "LTX-Video 0.9.[7-9]* / transformer",
            {"attention_head_dim": 128, "cross_attention_dim": 4096, "num_layers": 48},
        ),
    ),
    f"{_AT}scripts/convert_ltx2_to_diffusers.py": (
        (("LTX-2 19B / scheduler", "LTX-2.3 22B / scheduler"), _LTX_LINE | _LTX_USE),
        ("LTX-2.5 22B / transformer", {"ff_bias": False, "use_keyframes_abs_pos_embedding": True}),
        ("LTX-2* / connectors", _CONNECTOR),
        (
            "LTX-2.[35] 22B / connectors",
            {"per_modality_projections": True, "proj_bias": True}
            | {
                f"{stream}_{name}": value
                for stream, width in (("video", 128), ("audio", 64))
                for name, value in (
                    *(("connector_attention_head_dim", width), ("connector_num_attention_heads", 32)),
                    *(("connector_num_layers", 8), ("gated_attn", True)),
                )
            },
        ),
        (
            "LTX-2.[35] 22B / transformer",
            dict.fromkeys(("audio_cross_attn_mod", "audio_gated_attn", "cross_attn_mod"), True)
            | {"gated_attn": True, "perturbed_attn": True, "use_prompt_embeddings": False},
        ),
        (
            "LTX-2* / vae",
            {"decoder_causal": False, "spatial_compression_ratio": 32, "temporal_compression_ratio": 8},
        ),
        (
            "LTX-2.[35] 22B / vae",
            {
                "block_out_channels": (256, 512, 1024, 1024),
                "decoder_block_out_channels": (256, 512, 512, 1024),
                "decoder_inject_noise": (False,) * 5,
                "decoder_layers_per_block": (4, 6, 4, 2, 2),
                "decoder_spatio_temporal_scaling": (True,) * 4,
                "layers_per_block": (4, 6, 4, 2, 2),
                "upsample_factor": (2, 2, 1, 2),
                "upsample_residual": (False,) * 4,
            },
        ),
    ),
    f"{_AT}docs/source/en/api/pipelines/ltx2.md": (
        (
            "LTX-2.5 22B / scheduler",
            _LTX_LINE,
        ),
    ),
    f"{_AT}scripts/convert_sana_to_diffusers.py": (
        (
            "Sana 1.0 0.6B / transformer",
            {"cross_attention_dim": 1152, "cross_attention_head_dim": 72, "num_attention_heads": 36}
            | {"num_cross_attention_heads": 16, "num_layers": 28},
        ),
        ("Sana 1.5 4.8B / transformer", {"num_layers": 60}),
        ("Sana* / scheduler", {"flow_shift": 3.0, "use_flow_sigmas": True}),
    ),
    f"{_AT}docs/source/en/api/pipelines/stable_diffusion/sdxl_turbo.md": (
        ("SDXL Turbo / size", size(512, 512)),
    ),
    f"{_AT}scripts/convert_wan_to_diffusers.py": (
        ("Wan * / scheduler", {"use_flow_sigmas": True}),
        ("Wan * FLF2V * / scheduler", {"flow_shift": 16.0}),
        (("Wan * TI2V * / scheduler", "Wan * Animate * / scheduler"), {"flow_shift": 5.0}),
        ("Wan * Animate * / transformer", {"added_kv_proj_dim": 5120}),
        (
            ("Wan * T2V * / scheduler", "Wan * I2V * / scheduler", "Wan * VACE* / scheduler"),
            {"flow_shift": 3.0},
        ),
        (("Wan 2.2 T2V A14B / settings", "Wan 2.2 VACE-Fun A14B / settings"), {"boundary_ratio": 0.875}),
        ("Wan 2.2 I2V A14B / settings", {"boundary_ratio": 0.9}),
        ("Wan 2.2 TI2V 5B / settings", {"expand_timesteps": True}),
        ("Wan 2.1 * 1.3B / transformer", {"ffn_dim": 8960, "num_attention_heads": 12, "num_layers": 30}),
        ("Wan 2.1 VACE 1.3B / transformer", {"vace_layers": tuple(range(0, 30, 2))}),
        (
            "Wan 2.2 TI2V 5B / transformer",
            {"ffn_dim": 14336, "in_channels": 48, "num_attention_heads": 24, "num_layers": 30}
            | {"out_channels": 48},
        ),
        ("Wan 2.1 *[0-9]P / transformer", _SEES),
        ("Wan 2.1 FLF2V * / transformer", {"pos_embed_seq_len": 514}),
        ("Wan 2.2 I2V A14B / transformer*", {"in_channels": 36}),
        (
            "Wan 2.2 TI2V 5B / vae",
            {
                "base_dim": 160,
                "z_dim": 48,
                "is_residual": True,
                "in_channels": 12,
                "out_channels": 12,
                "decoder_base_dim": 256,
                "scale_factor_spatial": 16,
                "patch_size": 2,
                "latents_mean": WAN22_MEANS,
                "latents_std": WAN22_DEVIATIONS,
            },
        ),
    ),
}
