"""The transformer of the mini Wan: trained from nothing on clips of the known directions."""

import random

import motions
import torch
from caption_training import train_on_captions
from diffusers import WanPipeline, WanTransformer3DModel
from train_autoencoder import encode
from train_clip_autoencoder import clips_to_pixels, random_moving_scene

from diffsynth_lite.testing import seeded

BATCH_SIZE = 24
EMPTY_CAPTION = ""
# As the released Wan: the model attends to the zeros after a caption too, so their number matters.
NUM_PROMPT_TOKENS = 512


def new_transformer(text_width: int, seed: int) -> WanTransformer3DModel:
    """A transformer of the real class, 6 blocks of 4 heads of 32 channels: 1.8 million weights."""
    with seeded(seed):
        return WanTransformer3DModel(
            num_layers=6,
            num_attention_heads=4,
            attention_head_dim=32,
            ffn_dim=512,
            text_dim=text_width,
            rope_max_seq_len=64,
        )


def train(pipeline: WanPipeline, *, num_steps: int, num_clips: int, seed: int) -> None:
    """Train the pipeline's transformer in place and leave the moving average of its weights in it.

    Args:
        pipeline: complete, with a trained autoencoder.
        num_steps: of 24 clips each.
        num_clips: clips to learn from, drawn once.
        seed: of the clips, of their order and of the noise.
    """
    rng = random.Random(seed)
    scenes = [random_moving_scene(rng) for _ in range(num_clips)]
    pixels = clips_to_pixels([motions.draw_clip(scene, rng) for scene in scenes])
    latents = torch.cat([encode(pipeline.vae, part) for part in pixels.split(4)])
    captions = [EMPTY_CAPTION, *sorted({scene.caption for scene in scenes})]
    with torch.no_grad():
        embeddings, _ = pipeline.encode_prompt(
            captions, do_classifier_free_guidance=False, max_sequence_length=NUM_PROMPT_TOKENS, device="cpu"
        )
    caption_of = torch.tensor([captions.index(scene.caption) for scene in scenes])

    def loss_of(chosen: torch.Tensor, words: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return flow_matching_loss(pipeline.transformer, latents[chosen], embeddings[words], generator)

    train_on_captions(
        pipeline.transformer, loss_of, caption_of, num_steps=num_steps, batch_size=BATCH_SIZE, seed=seed
    )


def flow_matching_loss(
    transformer: WanTransformer3DModel,
    latents: torch.Tensor,
    embeddings: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """Squared error of the predicted velocity, noise minus latents, at logit-normal noise levels.

    Args:
        transformer: the model.
        latents: normalised, (B, 16, F, H, W).
        embeddings: of the captions, (B, 512, text width), zero after a caption.
        generator: of the noise and its levels.
    """
    sigma = torch.sigmoid(0.5 + 1.2 * torch.randn(len(latents), generator=generator))
    noise = torch.randn(latents.shape, generator=generator)
    level = sigma.view(-1, 1, 1, 1, 1)
    velocity = transformer(
        hidden_states=(1 - level) * latents + level * noise,
        timestep=1000 * sigma,
        encoder_hidden_states=embeddings,
    ).sample
    return (velocity - (noise - latents)).square().mean()
