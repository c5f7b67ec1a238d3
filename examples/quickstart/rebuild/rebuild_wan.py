"""Rebuilds the mini Wan pipeline from nothing but the autoencoder of the mini Qwen-Image, and compares.

The classes and the folder are those of the real Wan 2.1; only the sizes are small. Stages: a tokenizer and
a random text encoder, the image autoencoder taught to follow motion, a transformer trained on captioned
clips.
"""

import random
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import motions
import score
import score_clips
import shapes
import torch
import train_clip_autoencoder
import train_clip_transformer
from comparison import silence_loading_bars
from diffusers import UniPCMultistepScheduler, WanPipeline
from measure_motion import MotionScore, read_clips, summarise_motion
from rebuild import SHIPPED as IMAGE_PIPELINE
from rebuild import parse_arguments, save
from train_autoencoder import peak_signal_to_noise

from diffsynth_lite.testing.text_encoders import tiny_umt5
from diffsynth_lite.testing.tokenizers import t5_tokenizer

SHIPPED = Path(__file__).resolve().parents[1] / "mini_wan"
TEXT_WIDTH = 64
MODEL_SEED, AUTOENCODER_SEED, TRANSFORMER_SEED, CHECK_SEED = range(4)


@dataclass(frozen=True)
class Budget:
    """How much to train: optimizer steps, and clips to learn from."""

    autoencoder_steps: int
    transformer_steps: int
    num_clips: int


FULL = Budget(autoencoder_steps=1200, transformer_steps=2800, num_clips=700)
SMOKE = Budget(autoencoder_steps=2, transformer_steps=2, num_clips=8)


@dataclass(frozen=True)
class Quality:
    """What the two trained parts are worth, on clips and prompts that are the same for every pipeline."""

    psnr: float
    motion: MotionScore

    def __str__(self) -> str:
        return (
            f"autoencoder {self.psnr:.1f} dB; 8 known prompts: {self.motion.accuracy:.0%} right, "
            f"{self.motion.pixels:.1f} pixels moved"
        )


def main() -> None:
    """Rebuild, save, reload, compare."""
    arguments = parse_arguments("Rebuild the mini Wan pipeline.")
    torch.set_num_threads(1)
    silence_loading_bars()
    pipeline = build(SMOKE if arguments.smoke else FULL)
    save(pipeline, arguments.output)
    rebuilt, shipped = measure_quality(arguments.output), measure_quality(SHIPPED)
    print(f"rebuilt: {rebuilt}\nshipped: {shipped}")
    as_good = (
        rebuilt.psnr > shipped.psnr - 1
        and rebuilt.motion.accuracy >= shipped.motion.accuracy
        and rebuilt.motion.pixels > shipped.motion.pixels - 2
    )
    print(f"{arguments.output} is {'as good as' if as_good else 'not as good as'} the shipped pipeline")


def build(budget: Budget) -> WanPipeline:
    """The complete pipeline in float32, trained as far as the budget goes."""
    tokenizer = t5_tokenizer(caption_words())
    text_encoder = tiny_umt5(tokenizer, hidden_size=TEXT_WIDTH, seed=MODEL_SEED)
    vae = train_clip_autoencoder.inflate(score.load_pipeline(IMAGE_PIPELINE).vae, MODEL_SEED)
    train_clip_autoencoder.train(
        vae, num_steps=budget.autoencoder_steps, num_clips=budget.num_clips, seed=AUTOENCODER_SEED
    )
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=vae.eval(),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=train_clip_transformer.new_transformer(TEXT_WIDTH, MODEL_SEED),
    )
    train_clip_transformer.train(
        pipeline, num_steps=budget.transformer_steps, num_clips=budget.num_clips, seed=TRANSFORMER_SEED
    )
    return pipeline


def caption_words() -> list[str]:
    """Every word of the captions, and the new colours for those who want to teach them."""
    return [
        "a",
        "moving",
        "on",
        "background",
        *motions.DIRECTIONS,
        *shapes.COLOURS,
        *shapes.SHAPES,
        *shapes.GROUNDS,
    ]


def measure_quality(folder: Path) -> Quality:
    """Load a saved pipeline in float32 and measure it."""
    pipeline = score_clips.load_pipeline(folder)
    rng = random.Random(CHECK_SEED)
    clips = [motions.draw_clip(train_clip_autoencoder.random_moving_scene(rng), rng) for _ in range(8)]
    psnr = peak_signal_to_noise(pipeline.vae, train_clip_autoencoder.clips_to_pixels(clips))
    scenes = motions.known_scenes()
    motion = summarise_motion(read_clips(score_clips.generate_prompts(pipeline, scenes), scenes))
    return Quality(psnr, motion)


if __name__ == "__main__":
    main()
