"""The transformer of the mini model: trained from nothing on drawings in the known colours.

Latents are packed as the pipeline packs them: (B, 16 tokens, 64), each token 2 x 2 latents of 16 channels.
"""

import random

import shapes
import torch
from caption_training import train_on_captions
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from train_autoencoder import encode, to_pixels

from diffsynth_lite.testing import seeded

BATCH_SIZE = 32
EMPTY_CAPTION = " "  # what the pipeline is asked for as the negative prompt


def new_transformer(text_width: int, seed: int) -> QwenImageTransformer2DModel:
    """A transformer of the real class, 6 blocks of 4 heads of 32 channels: 3.7 million weights."""
    with seeded(seed):
        return QwenImageTransformer2DModel(
            num_layers=6,
            num_attention_heads=4,
            attention_head_dim=32,
            axes_dims_rope=(8, 12, 12),
            joint_attention_dim=text_width,
        )


def train(pipeline: QwenImagePipeline, *, num_steps: int, num_images: int, seed: int) -> None:
    """Train the pipeline's transformer in place and leave the moving average of its weights in it.

    Args:
        pipeline: complete, with a trained autoencoder.
        num_steps: of 32 images each; 4000 give crisp shapes.
        num_images: drawings to learn from, drawn once.
        seed: of the drawings, of their order and of the noise.
    """
    rng = random.Random(seed)
    scenes = [shapes.random_known_scene(rng) for _ in range(num_images)]
    latents = pack(encode(pipeline.vae, to_pixels([shapes.draw_scene(scene, rng) for scene in scenes])))
    captions = [EMPTY_CAPTION, *sorted({scene.caption for scene in scenes})]
    with torch.no_grad():
        embeddings, masks = pipeline.encode_prompt(captions)
    caption_of = torch.tensor([captions.index(scene.caption) for scene in scenes])

    def loss_of(chosen: torch.Tensor, words: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return flow_matching_loss(
            pipeline.transformer, latents[chosen], embeddings[words], masks[words], generator
        )

    train_on_captions(
        pipeline.transformer, loss_of, caption_of, num_steps=num_steps, batch_size=BATCH_SIZE, seed=seed
    )


def pack(latents: torch.Tensor) -> torch.Tensor:
    """(B, C, 1, H, W) latents as (B, H / 2 * W / 2, 4 C) tokens, row by row."""
    batch, channels, _, height, width = latents.shape
    patches = latents.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, 4 * channels)


def flow_matching_loss(
    transformer: QwenImageTransformer2DModel,
    latents: torch.Tensor,
    embeddings: torch.Tensor,
    masks: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """Squared error of the predicted velocity, noise minus latents, at logit-normal noise levels.

    Args:
        transformer: the model.
        latents: packed, (B, T, 64), the T tokens of a square image.
        embeddings: of the captions, (B, L, text width).
        masks: true where an embedding counts, (B, L).
        generator: of the noise and its levels.
    """
    batch, num_tokens, _ = latents.shape
    side = int(num_tokens**0.5)
    sigma = torch.sigmoid(0.3 + 1.2 * torch.randn(batch, generator=generator))
    noise = torch.randn(latents.shape, generator=generator)
    level = sigma.view(-1, 1, 1)
    velocity = transformer(
        hidden_states=(1 - level) * latents + level * noise,
        timestep=sigma,
        encoder_hidden_states=embeddings,
        encoder_hidden_states_mask=masks,
        img_shapes=[[(1, side, side)]] * batch,
    ).sample
    return (velocity - (noise - latents)).square().mean()
