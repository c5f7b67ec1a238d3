"""The autoencoder of the mini model: trained on drawings in all colours, then given the real statistics.

Images are (B, 3, 1, H, W) in [-1, 1], one frame each; latents are (B, 16, 1, H / 8, W / 8).
"""

import random
from collections.abc import Sequence

import numpy as np
import shapes
import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import (
    QwenImageAttentionBlock,
    QwenImageCausalConv3d,
    QwenImageResidualBlock,
)
from PIL import Image
from schedule import Progress, learning_rate

from diffsynth_lite.testing import seeded

PEAK_LEARNING_RATE = 2e-3
NUM_WARMUP_STEPS = 50
KL_WEIGHT = 1e-4
CHROMA_WEIGHT = 2.0
CROP = 32


def to_pixels(images: Sequence[Image.Image]) -> torch.Tensor:
    """Images of one size as (B, 3, 1, H, W) in [-1, 1]."""
    bytes_bhwc = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    return (bytes_bhwc.permute(0, 3, 1, 2).float() / 127.5 - 1).unsqueeze(2)


def random_drawing(rng: random.Random) -> Image.Image:
    """A shape anywhere, mostly in free colours and sometimes outlined: more than the captions can say."""

    def any_colour() -> shapes.RGB:
        return rng.randint(0, 255), rng.randint(0, 255), rng.randint(0, 255)

    return shapes.draw(
        rng.choice(shapes.SHAPES),
        any_colour() if rng.random() < 0.6 else rng.choice(list(shapes.KNOWN_COLOURS.values())),
        any_colour() if rng.random() < 0.5 else rng.choice(list(shapes.GROUNDS.values())),
        centre=(rng.uniform(0.3, 0.7), rng.uniform(0.3, 0.7)),
        radius=rng.uniform(0.15, 0.4),
        outline=any_colour() if rng.random() < 0.25 else None,
    )


def new_autoencoder(seed: int) -> AutoencoderKLQwenImage:
    """An autoencoder of the real class, 1.5 million weights, initialised so that it learns within minutes.

    From the default initialisation it stays gray for thousands of steps (17.8 dB after 1500). With He
    initialisation of the temporal tap that a single frame meets, and every residual branch starting at
    zero, it reaches 21 dB after 300.
    """
    with seeded(seed), torch.no_grad():
        vae = AutoencoderKLQwenImage(base_dim=12, num_res_blocks=1)
        for module in vae.modules():
            if isinstance(module, QwenImageCausalConv3d) and module.kernel_size[0] == 3:
                last_tap = torch.nn.init.kaiming_normal_(module.weight[:, :, -1].clone(), nonlinearity="relu")
                module.weight.zero_()
                module.weight[:, :, -1] = last_tap
                module.bias.zero_()
            elif isinstance(module, torch.nn.Conv2d) and module.kernel_size[0] == 3:
                torch.nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                module.bias.zero_()
        for module in vae.modules():
            if isinstance(module, QwenImageResidualBlock):
                module.conv2.weight.zero_()
            elif isinstance(module, QwenImageAttentionBlock):
                module.proj.weight.zero_()
                module.proj.bias.zero_()
    return vae


def train(vae: AutoencoderKLQwenImage, *, num_steps: int, num_images: int, seed: int) -> None:
    """Train in place: three steps on crops of 32 x 32, then one on whole images, and again.

    Args:
        vae: from `new_autoencoder`.
        num_steps: 4000 give about 26 dB, 6000 about 28 dB.
        num_images: drawings to learn from, drawn once.
        seed: of the drawings, of their order and of the noise.
    """
    rng = random.Random(seed)
    images = to_pixels([random_drawing(rng) for _ in range(num_images)])
    generator = torch.Generator().manual_seed(seed)
    # The temporal convolutions between resolutions never meet a single frame.
    weights = [weight for name, weight in vae.named_parameters() if "time_conv" not in name]
    optimizer = torch.optim.AdamW(weights, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    progress = Progress("autoencoder", num_steps)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(PEAK_LEARNING_RATE, step, num_steps, NUM_WARMUP_STEPS)
        batch = _draw_batch(images, step, generator)
        posterior = vae.encode(batch).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator)
        decoded = vae.decode(posterior.mean + posterior.std * noise).sample
        divergence = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
        loss = reconstruction_loss(decoded - batch) + KL_WEIGHT * divergence
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.step(loss.item())


def _draw_batch(images: torch.Tensor, step: int, generator: torch.Generator) -> torch.Tensor:
    """4 whole images in each fourth step, else 12 crops at one place on the grid of the latents."""
    whole = step % 4 == 3
    chosen = torch.randint(len(images), (4 if whole else 12,), generator=generator)
    if whole:
        return images[chosen]
    num_places = (shapes.SIZE - CROP) // 8 + 1
    top, left = (8 * torch.randint(num_places, (2,), generator=generator)).tolist()
    return images[chosen, :, :, top : top + CROP, left : left + CROP]


def reconstruction_loss(error: torch.Tensor) -> torch.Tensor:
    """Absolute and squared error, with the error in colour counted again: a gray image is the easy way out.

    Args:
        error: decoded minus wanted pixels, (B, 3, 1, H, W).
    """
    chroma = error - error.mean(dim=1, keepdim=True)
    return _distance(error) + CHROMA_WEIGHT * _distance(chroma)


def _distance(error: torch.Tensor) -> torch.Tensor:
    return error.abs().mean() + 2 * error.square().mean()


@torch.no_grad()
def encode(vae: AutoencoderKLQwenImage, pixels: torch.Tensor) -> torch.Tensor:
    """Normalised latents as the pipeline makes them, (B, 16, 1, H / 8, W / 8)."""
    mean, std = _per_channel(vae.config.latents_mean), _per_channel(vae.config.latents_std)
    parts = [vae.encode(part).latent_dist.mode() for part in pixels.split(32)]
    return (torch.cat(parts) - mean) / std


@torch.no_grad()
def adopt_statistics(vae: AutoencoderKLQwenImage, pixels: torch.Tensor) -> None:
    """Rescale the latents in place so that the class's ``latents_mean`` and ``latents_std`` are true of them.

    The real model's statistics are known to every tool by heart. The latents of these images have others,
    so the difference is folded into the two 1 x 1 convolutions around the latents; images are encoded and
    decoded as before.

    Args:
        vae: a trained autoencoder with the class's statistics in its config.
        pixels: images to measure on, (B, 3, 1, H, W).
    """
    latents = torch.cat([vae.encode(part).latent_dist.mode() for part in pixels.split(32)])
    old_mean, old_std = latents.mean(dim=(0, 2, 3, 4)), latents.std(dim=(0, 2, 3, 4))
    new_mean, new_std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    scale = new_std / old_std
    channels = len(scale)
    into, out_of = vae.quant_conv, vae.post_quant_conv
    into.weight[:channels] *= scale.view(-1, 1, 1, 1, 1)
    into.bias[:channels] = scale * (into.bias[:channels] - old_mean) + new_mean
    into.bias[channels:] += 2 * scale.log()  # the second half is the logarithm of the variance
    out_of.bias += out_of.weight[:, :, 0, 0, 0] @ (old_mean - new_mean / scale)
    out_of.weight /= scale.view(1, -1, 1, 1, 1)


def _per_channel(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values).view(1, -1, 1, 1, 1)


@torch.no_grad()
def peak_signal_to_noise(vae: AutoencoderKLQwenImage, pixels: torch.Tensor) -> float:
    """How well images survive encoding and decoding, in dB; the pixel range is 2."""
    decoded = vae.decode(vae.encode(pixels).latent_dist.mode()).sample.clamp(-1, 1)
    return float(10 * torch.log10(4 / (decoded - pixels).square().mean()))
