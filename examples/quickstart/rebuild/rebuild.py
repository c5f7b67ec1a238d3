"""Rebuilds the mini Qwen-Image pipeline from nothing, and compares it with the one that is shipped.

About 25 minutes on one core. The classes and the folder are those of the real Qwen-Image; only the sizes
are small. Stages: a tokenizer and a random text encoder, an autoencoder trained on drawings, a transformer
trained on captioned drawings of the known colours.
"""

import argparse
import random
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import shapes
import torch
import train_autoencoder
import train_transformer
from comparison import silence_loading_bars
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, QwenImagePipeline
from measure import read_images, summarise
from one_frame import one_frame_convolutions
from score import generate_prompts, load_pipeline
from transformers import PreTrainedModel, Qwen2Tokenizer

from diffsynth_lite.testing.text_encoders import tiny_qwen2_5_vl
from diffsynth_lite.testing.tokenizers import qwen2_tokenizer

SHIPPED = Path(__file__).resolve().parents[1] / "mini_qwen_image"
TEXT_WIDTH = 64
MODEL_SEED, AUTOENCODER_SEED, TRANSFORMER_SEED, CHECK_SEED = range(4)


@dataclass(frozen=True)
class Budget:
    """How much to train: optimizer steps, and drawings to learn from."""

    autoencoder_steps: int
    transformer_steps: int
    num_images: int


FULL = Budget(autoencoder_steps=6000, transformer_steps=4000, num_images=3000)
SMOKE = Budget(autoencoder_steps=4, transformer_steps=2, num_images=16)


@dataclass(frozen=True)
class Quality:
    """What the two trained parts are worth, on drawings and prompts that are the same for every pipeline."""

    psnr: float
    accuracy: float
    distance: float

    def __str__(self) -> str:
        return (
            f"autoencoder {self.psnr:.1f} dB; 16 known prompts: {self.accuracy:.0%} right, "
            f"colour distance {self.distance:.1f} of 441"
        )


def main() -> None:
    """Rebuild, save, reload, compare."""
    arguments = parse_arguments("Rebuild the mini Qwen-Image pipeline.")
    torch.set_num_threads(1)
    silence_loading_bars()
    with one_frame_convolutions():
        pipeline = build(SMOKE if arguments.smoke else FULL)
        save(pipeline, arguments.output)
        rebuilt = measure_quality(arguments.output)
        shipped = measure_quality(SHIPPED)
    print(f"rebuilt: {rebuilt}\nshipped: {shipped}")
    as_good = (
        rebuilt.psnr > shipped.psnr - 1
        and rebuilt.accuracy >= shipped.accuracy
        and rebuilt.distance < shipped.distance + 10
    )
    print(f"{arguments.output} is {'as good as' if as_good else 'not as good as'} the shipped pipeline")


def parse_arguments(description: str) -> argparse.Namespace:
    """Read the command line; the output folder has to be new."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, required=True, help="new folder for the pipeline")
    parser.add_argument("--smoke", action="store_true", help="a few steps of every stage, to see them run")
    arguments = parser.parse_args()
    if arguments.output.exists():
        parser.error(f"--output {arguments.output} exists; name a new folder")
    return arguments


def build(budget: Budget) -> QwenImagePipeline:
    """The complete pipeline in float32, trained as far as the budget goes."""
    tokenizer = qwen2_tokenizer(caption_words())
    vae = train_autoencoder.new_autoencoder(MODEL_SEED)
    train_autoencoder.train(
        vae, num_steps=budget.autoencoder_steps, num_images=budget.num_images, seed=AUTOENCODER_SEED
    )
    rng = random.Random(CHECK_SEED)
    images = [train_autoencoder.random_drawing(rng) for _ in range(min(budget.num_images, 1024))]
    train_autoencoder.adopt_statistics(vae, train_autoencoder.to_pixels(images))
    pipeline = QwenImagePipeline(
        scheduler=real_scheduler(),
        vae=vae.eval(),
        text_encoder=word_codes(tokenizer),
        tokenizer=tokenizer,
        transformer=train_transformer.new_transformer(TEXT_WIDTH, MODEL_SEED),
    )
    train_transformer.train(
        pipeline, num_steps=budget.transformer_steps, num_images=budget.num_images, seed=TRANSFORMER_SEED
    )
    return pipeline


def caption_words() -> list[str]:
    """Every word of the captions, those of the new colours included."""
    return ["a", "on", "background", *shapes.COLOURS, *shapes.SHAPES, *shapes.GROUNDS]


def word_codes(tokenizer: Qwen2Tokenizer) -> PreTrainedModel:
    """A random text encoder that stays as it is: a fixed code for each word is all that the captions need."""
    text_encoder = tiny_qwen2_5_vl(tokenizer, hidden_size=TEXT_WIDTH, seed=MODEL_SEED)
    with torch.no_grad():
        # From a standard deviation of 0.02 to 1, so that the words, not the layers' biases, decide.
        text_encoder.get_input_embeddings().weight.mul_(50.0)
    return text_encoder


def real_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The scheduler with the settings of the released Qwen-Image."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


def save(pipeline: DiffusionPipeline, folder: Path) -> None:
    """Write the pipeline in bfloat16, which halves the files and costs no quality that could be measured."""
    for model in (pipeline.vae, pipeline.text_encoder, pipeline.transformer):
        model.bfloat16()  # `to` of diffusers warns about modules to keep in float32, of which there are none
    pipeline.save_pretrained(folder)


def measure_quality(folder: Path) -> Quality:
    """Load a saved pipeline in float32 and measure it."""
    pipeline = load_pipeline(folder)
    rng = random.Random(CHECK_SEED)
    drawings = [shapes.draw_scene(shapes.random_known_scene(rng), rng) for _ in range(64)]
    psnr = train_autoencoder.peak_signal_to_noise(pipeline.vae, train_autoencoder.to_pixels(drawings))
    scenes = shapes.known_scenes(16)
    score = summarise(read_images(generate_prompts(pipeline, scenes), scenes))
    return Quality(psnr, score.accuracy, score.distance)


if __name__ == "__main__":
    main()
