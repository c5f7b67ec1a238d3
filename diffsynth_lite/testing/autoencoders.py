"""Small random autoencoders of the real classes, with the real compression and latent statistics."""

from diffusers import AutoencoderKLQwenImage

from diffsynth_lite.testing.seeding import seeded


def tiny_qwen_vae(*, seed: int = 0) -> AutoencoderKLQwenImage:
    """A random Qwen-Image VAE in eval mode: 16 channels, 8 x 8 pixels (and 4 frames) to a latent.

    Everything that the pipelines read is as in the released model: ``z_dim``, ``latents_mean``,
    ``latents_std`` and ``temperal_downsample`` (diffusers' spelling) are the class's defaults.

    Args:
        seed: of the weights; the global random state is left as it was.
    """
    with seeded(seed):
        return AutoencoderKLQwenImage(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1).eval()
