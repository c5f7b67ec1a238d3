"""Small random autoencoders of the real classes, in eval mode, with the real compression and statistics.

``seed`` is that of the weights, and leaves the global random state as it was.
"""

from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLCogVideoX,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    AutoencoderKLWan,
)

from diffsynth_lite.testing import seeded


def tiny_qwen_vae(*, input_channels: int = 3, seed: int = 0) -> AutoencoderKLQwenImage:
    """A random Qwen-Image VAE: 16 channels, 8 x 8 pixels (and 4 frames) to a latent.

    Everything that the pipelines read is as in the released model: ``z_dim``, ``latents_mean``,
    ``latents_std`` and ``temperal_downsample`` (diffusers' spelling) are the class's defaults.

    Args:
        input_channels: of pixels; that of Qwen-Image-Layered takes 4, the last one of transparency.
    """
    layout: dict[str, Any] = {"base_dim": 4, "dim_mult": [1, 1, 1, 1], "input_channels": input_channels}
    with seeded(seed):
        return AutoencoderKLQwenImage(num_res_blocks=1, **layout).eval()


def tiny_qwen21_vae(*, seed: int = 0) -> AutoencoderKLQwenImage21:
    """A random Qwen-Image 2.1 VAE: 64 channels, 16 x 16 pixels to a latent, and transparency.

    Everything that the pipeline reads is as in the released model: ``z_dim``, ``latents_mean`` and
    ``latents_std`` are the class's defaults.
    """
    layout: dict[str, Any] = {"base_dim": 4, "decoder_base_dim": 4, "dim_mult": [1, 1, 1, 1, 1]}
    with seeded(seed):
        return AutoencoderKLQwenImage21(num_res_blocks=1, **layout).eval()


def tiny_wan_vae(*, residual: bool = False, seed: int = 0) -> AutoencoderKLWan:
    """A random Wan VAE: 16 channels, 8 x 8 pixels and 4 frames to a latent.

    Args:
        residual: the layout of Wan 2.2 TI2V-5B instead: 48 channels, 16 x 16 pixels to a latent.
    """
    layout: dict[str, Any] = {}
    if residual:
        layout = {
            "is_residual": True,
            "z_dim": 48,
            "latents_mean": [0.01 * channel for channel in range(48)],
            "latents_std": [1 + 0.01 * channel for channel in range(48)],
            "patch_size": 2,
            "in_channels": 12,
            "out_channels": 12,
            "scale_factor_spatial": 16,
        }
    with seeded(seed):
        return AutoencoderKLWan(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **layout).eval()


def tiny_flux_vae(*, seed: int = 0) -> AutoencoderKL:
    """A random VAE of FLUX.1: 16 channels, 8 x 8 pixels to a latent, the real shift and scale."""
    return tiny_kl(
        seed=seed,
        latent_channels=16,
        shift_factor=0.1159,
        scaling_factor=0.3611,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def tiny_sdxl_vae(*, seed: int = 0) -> AutoencoderKL:
    """A random VAE of SDXL: 4 channels, 8 x 8 pixels to a latent, the real scale, not for fp16."""
    return tiny_kl(seed=seed, latent_channels=4, scaling_factor=0.13025, force_upcast=True)


def tiny_kl(*, seed: int = 0, **settings: Any) -> AutoencoderKL:
    """A random VAE of Stable Diffusion's kind, as most models of images have: 8 x 8 pixels to a latent.

    Args:
        settings: those of the released model's ``config.json`` that a pipeline reads, such as
            ``latent_channels``, ``scaling_factor``, ``shift_factor`` and ``force_upcast``.
    """
    with seeded(seed):
        return AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(4, 4, 4, 4),
            norm_num_groups=2,
            layers_per_block=1,
            **settings,
        ).eval()


def tiny_flux2_vae(*, seed: int = 0) -> AutoencoderKLFlux2:
    """A random VAE of FLUX.2: 32 channels, 8 x 8 pixels to a latent.

    Its statistics are not those of a released model, nor the defaults of the class, which change nothing.
    """
    with seeded(seed):
        vae = AutoencoderKLFlux2(block_out_channels=(4, 4, 4, 4), norm_num_groups=2, layers_per_block=1)
    vae.bn.running_mean.copy_(torch.linspace(-0.5, 0.5, 128))
    vae.bn.running_var.copy_(torch.linspace(0.5, 1.5, 128))
    return vae.eval()


def tiny_cogvideox_vae(*, seed: int = 0) -> AutoencoderKLCogVideoX:
    """A random VAE of CogVideoX: 16 channels, 8 x 8 pixels and 4 frames to a latent, the scale of 5B."""
    with seeded(seed):
        return AutoencoderKLCogVideoX(
            block_out_channels=(4, 4, 4, 4), norm_num_groups=2, layers_per_block=1, scaling_factor=0.7
        ).eval()


def tiny_ltx_vae(*, seed: int = 0) -> AutoencoderKLLTXVideo:
    """A random LTX-Video VAE: 128 channels, 32 x 32 pixels and 8 frames to a latent.

    Its statistics are not those of a released model, nor the defaults of the class, which change nothing.
    """
    with seeded(seed):
        vae = AutoencoderKLLTXVideo(
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
        )
    vae.latents_mean.copy_(torch.linspace(-0.5, 0.5, 128))
    vae.latents_std.copy_(torch.linspace(0.5, 1.5, 128))
    return vae.eval()


def tiny_hunyuan_video_vae(*, seed: int = 0) -> AutoencoderKLHunyuanVideo:
    """A random VAE of HunyuanVideo: 4 channels, 8 x 8 pixels and 4 frames to a latent, the real scale.

    The released one has 16 channels.
    """
    with seeded(seed):
        return AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(4, 4, 4, 4), norm_num_groups=2, layers_per_block=1
        ).eval()


def tiny_ltx2_vae(*, seed: int = 0) -> AutoencoderKLLTX2Video:
    """A random LTX-2 VAE of clips: 16 channels, 32 x 32 pixels and 8 frames to a latent, the real scale.

    The released one has 128, and so have its first layers. The statistics are not those of a released model,
    nor the defaults of the class, which change nothing. It decodes clips of any size, as that of LTX-2.3;
    that of LTX-2 mirrors their edges, and needs 64 pixels.
    """
    with seeded(seed):
        vae = AutoencoderKLLTX2Video(
            latent_channels=16,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 16, 32),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1),
            decoder_causal=False,
            decoder_spatial_padding_mode="zeros",
            spatial_compression_ratio=32,
            temporal_compression_ratio=8,
        )
    vae.latents_mean.copy_(torch.linspace(-0.5, 0.5, 16))
    vae.latents_std.copy_(torch.linspace(0.5, 1.5, 16))
    return vae.eval()


def tiny_ltx2_audio_vae(*, seed: int = 0) -> AutoencoderKLLTX2Audio:
    """A random LTX-2 VAE of audio: 4 channels of 4 mel bins, the real rates, 25 latents a second.

    The released one has 8 channels of 16. The statistics are not its own, too.
    """
    with seeded(seed):
        vae = AutoencoderKLLTX2Audio(
            base_channels=16, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=4, mel_bins=16
        )
    vae.latents_mean.copy_(torch.linspace(-0.5, 0.5, 16))
    vae.latents_std.copy_(torch.linspace(0.5, 1.5, 16))
    return vae.eval()


def tiny_hunyuan_video_15_vae(*, seed: int = 0) -> AutoencoderKLHunyuanVideo15:
    """A random VAE of HunyuanVideo 1.5: 4 channels, 16 x 16 pixels and 4 frames to a latent, the real scale.

    The released one has 32 channels, of which the width of its layers is a multiple.
    """
    with seeded(seed):
        return AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1
        ).eval()


def tiny_dc_vae(*, seed: int = 0) -> AutoencoderDC:
    """A random VAE of Sana: 32 channels, 32 x 32 pixels to a latent, the real scale."""
    widths = (4, 4, 4, 4, 8, 32)
    layers = (1, 1, 1, 1, 1, 1)
    block_types = ("ResBlock",) * 4 + ("EfficientViTBlock",) * 2
    scales: tuple[tuple[int, ...], ...] = ((), (), (), (), (5,), (5,))
    with seeded(seed):
        return AutoencoderDC(
            attention_head_dim=4,
            encoder_block_types=block_types,
            decoder_block_types=block_types,
            encoder_block_out_channels=widths,
            decoder_block_out_channels=widths,
            encoder_layers_per_block=layers,
            decoder_layers_per_block=layers,
            encoder_qkv_multiscales=scales,
            decoder_qkv_multiscales=scales,
            upsample_block_type="interpolate",
            downsample_block_type="conv",
            scaling_factor=0.41407,
        ).eval()


def tiny_minimax_h3_vae(*, seed: int = 0) -> AutoencoderKLMiniMaxH3:
    """A random MiniMax-H3 VAE of clips: 4 channels, 16 x 16 pixels, and 5 k + 2 latents of 17 k + 5 frames.

    The released one has 24. Its statistics are not the defaults of the class, which change nothing.
    """
    with seeded(seed):
        return AutoencoderKLMiniMaxH3(
            latent_channels=4,
            block_out_channels=(4, 4, 4, 8),
            layers_per_block=1,
            spatial_downsample_factors=(2, 2, 2, 2),
            temporal_downsample_factors=(1, 2, 2, 1),
            norm_num_groups=2,
            decoder_num_layers=1,
            decoder_num_attention_heads=2,
            decoder_attention_head_dim=16,
            decoder_ffn_mult=1,
            latents_mean=(-0.5, -0.2, 0.2, 0.5),
            latents_std=(0.5, 0.8, 1.2, 1.5),
        ).eval()


def tiny_minimax_h3_audio_vae(*, seed: int = 0) -> AutoencoderKLMiniMaxH3Audio:
    """A random MiniMax-H3 VAE of audio: 32 channels, 40 latents a second of 32 kHz, as the released one."""
    with seeded(seed):
        return AutoencoderKLMiniMaxH3Audio(
            encoder_dim=4,
            encoder_rates=(4, 8, 25),
            latent_dim=32,
            num_attention_heads=2,
            decoder_dim=16,
            decoder_rates=(25, 8, 4),
            decoder_kernel_sizes=(25, 8, 4),
            resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1, 3, 5),),
            latents_mean=torch.linspace(-0.5, 0.5, 32).tolist(),
            latents_std=torch.linspace(0.5, 1.5, 32).tolist(),
        ).eval()
