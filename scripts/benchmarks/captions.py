"""Time and memory of captions by image, one by one and in batches: of tiny models of several classes.

The tiny ones show what is around the model: how images are prepared, and how a batch is asked. ``--model``
measures a real one, also on a GPU.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from meters import meter_for, print_table, seconds_of
from PIL import Image

from diffsynth_lite.captioning.captioner import Question
from diffsynth_lite.captioning.model import CaptionModel, open_captioner
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.testing import captioners

_TINY = {
    "Qwen3-VL": captioners.save_tiny_qwen3_vl,
    "Gemma 3": captioners.save_tiny_gemma3,
    "SmolVLM": captioners.save_tiny_smolvlm,
    "LLaVA": captioners.save_tiny_joycaption,
    "Florence-2": captioners.save_tiny_florence2,
}
_BATCH_SIZES = (1, 8)


def main() -> None:
    """Measure all models and print a table."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        models = {arguments.model: arguments.model} if arguments.model else save_tiny(Path(folder))
        rows = [row for name, model in models.items() for row in measure(name, model, arguments)]
    clock = "time" if arguments.device != "cpu" else "CPU time"
    print_table(f"{clock} and memory next to the weights, by image of {arguments.side} pixels", rows)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", help="folder or hub id, in place of the tiny ones")
    parser.add_argument("--device", default="cpu", help="(default: %(default)s)")
    parser.add_argument("--quantize", default="none", choices=("none", "int8", "nf4"))
    parser.add_argument("--side", type=int, default=512, help="of an image, in pixels (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=16, help="of a caption (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="measured of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    return parser.parse_args()


def save_tiny(folder: Path) -> dict[str, str]:
    """Folders of tiny models, by the names of their classes."""
    return {name: str(save(folder / name)) for name, save in _TINY.items()}


def measure(name: str, model: str, arguments: argparse.Namespace) -> list[dict[str, str]]:
    """A row for each size of a batch."""
    rows = []
    captioner = open_captioner(model, device=arguments.device, quantize=arguments.quantize)
    assert isinstance(captioner, CaptionModel)
    with captioner:
        for batch_size in _BATCH_SIZES:
            captioner.batch_size = batch_size
            rows.append(
                {"model": name, "batch": str(batch_size), **figures(captioner, batch_size, arguments)}
            )
    return rows


def figures(captioner: CaptionModel, batch_size: int, arguments: argparse.Namespace) -> dict[str, str]:
    """The cells of one row."""
    questions = make_questions(batch_size, arguments.side)
    clock = time.process_time if arguments.device == "cpu" else time.perf_counter

    def ask() -> None:
        captioner.answer(questions, max_tokens=arguments.max_tokens)

    ask()
    seconds = statistics.median(seconds_of(ask, clock) for _ in range(arguments.rounds))
    meter = meter_for(torch.device(arguments.device))
    with meter:
        meter.start()
        answers = captioner.answer(questions, max_tokens=arguments.max_tokens)
        peak = meter.peak_bytes
    num_tokens = sum(one.num_tokens or 0 for one in answers)
    return {
        "ms": f"{seconds / batch_size * 1000:.1f}",
        "tokens": f"{num_tokens / batch_size:.1f}",
        "memory": format_bytes(peak / batch_size),
    }


def make_questions(num: int, side: int) -> Sequence[Question]:
    """About images of noise, of the same size."""
    noise = np.random.default_rng(0)
    return [
        Question(
            images=[Image.fromarray(noise.integers(0, 256, (side, side, 3), dtype=np.uint8))],
            instruction="Describe the image.",
        )
        for _ in range(num)
    ]


if __name__ == "__main__":
    main()
