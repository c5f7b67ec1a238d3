"""The autoencoder of the mini Wan: that of the mini Qwen-Image, taught to follow motion.

The two classes have the same weights by name. Images use the last temporal tap of a convolution only, so
the image autoencoder treats each frame only until the other taps have learned from clips.
Clips are (B, 3, 9, H, W) in [-1, 1]; latents are (B, 16, 3, H / 8, W / 8).
"""

import random
from collections.abc import Sequence

import motions
import shapes
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan
from PIL import Image
from schedule import Progress, learning_rate
from train_autoencoder import CROP, reconstruction_loss, to_pixels

from diffsynth_lite.testing import seeded

PEAK_LEARNING_RATE = 1e-3
NUM_WARMUP_STEPS = 20
BATCH_SIZE = 3


def clips_to_pixels(clips: Sequence[Sequence[Image.Image]]) -> torch.Tensor:
    """Clips of one size and length as (B, 3, F, H, W) in [-1, 1]."""
    return torch.stack([to_pixels(frames).squeeze(2).transpose(0, 1) for frames in clips])


def random_moving_scene(rng: random.Random) -> motions.MovingScene:
    """Any of the 384 scenes of the known directions, all equally likely."""
    return motions.MovingScene(
        rng.choice(list(shapes.KNOWN_COLOURS)),
        rng.choice(motions.SHAPES),
        rng.choice(list(motions.KNOWN_DIRECTIONS)),
        rng.choice(list(shapes.GROUNDS)),
    )


def inflate(image_vae: AutoencoderKLQwenImage, seed: int) -> AutoencoderKLWan:
    """A video autoencoder with the weights of one for images; between resolutions frames are copied."""
    sizes = ("base_dim", "z_dim", "dim_mult", "num_res_blocks", "temperal_downsample")
    with seeded(seed), torch.no_grad():
        vae = AutoencoderKLWan(**{name: image_vae.config[name] for name in sizes})
        vae.load_state_dict(image_vae.state_dict())
        for name, module in vae.named_modules():
            if name.endswith("time_conv"):
                num_out, num_in = module.weight.shape[:2]
                module.weight.normal_(0.0, 1e-3)
                module.bias.zero_()
                # Upsampling makes two frames of one: each is a copy.
                module.weight[:, :, -1, 0, 0] += torch.eye(num_in).repeat(num_out // num_in, 1)
    return vae


def train(vae: AutoencoderKLWan, *, num_steps: int, num_clips: int, seed: int) -> None:
    """Train in place on crops of 32 x 32 of 9 frames, then note the mean and deviation of the latents.

    Args:
        vae: from `inflate`.
        num_steps: of 3 clips each.
        num_clips: clips to learn from, drawn once.
        seed: of the clips, of their order and of the noise.
    """
    rng = random.Random(seed)
    clips = clips_to_pixels([motions.draw_clip(random_moving_scene(rng), rng) for _ in range(num_clips)])
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        vae.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0
    )
    progress = Progress("autoencoder", num_steps)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(PEAK_LEARNING_RATE, step, num_steps, NUM_WARMUP_STEPS)
        chosen = torch.randint(num_clips, (BATCH_SIZE,), generator=generator)
        num_places = (shapes.SIZE - CROP) // 8 + 1
        top, left = (8 * torch.randint(num_places, (2,), generator=generator)).tolist()
        batch = clips[chosen, :, :, top : top + CROP, left : left + CROP]
        posterior = vae.encode(batch).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator)
        loss = reconstruction_loss(vae.decode(posterior.mean + posterior.std * noise).sample - batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.step(loss.item())
    note_statistics(vae, clips[:64])


@torch.no_grad()
def note_statistics(vae: AutoencoderKLWan, clips: torch.Tensor) -> None:
    """Write the mean and standard deviation of the latents of these clips into the config."""
    latents = torch.cat([vae.encode(part).latent_dist.mode() for part in clips.split(4)])
    mean, std = latents.mean(dim=(0, 2, 3, 4)), latents.std(dim=(0, 2, 3, 4))
    rounded = {"latents_mean": mean, "latents_std": std}
    vae.register_to_config(**{name: [round(v, 5) for v in row.tolist()] for name, row in rounded.items()})
