"""Makers of messy data sets, and of configs for the doctor to look at."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.doctor.examination import examine
from diffsynth_lite.doctor.findings import Findings


def scene(seed: int, size: tuple[int, int] = (96, 64)) -> Image.Image:
    """Soft random shades, as different from each other as photos are."""
    shades = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(shades).resize(size, Image.Resampling.BICUBIC)


def photo(seed: int = 1, size: tuple[int, int] = (512, 384)) -> Image.Image:
    """Soft light with grain, and hard shapes in front."""
    rng = np.random.default_rng(seed)
    shades = Image.fromarray(rng.integers(40, 220, (6, 8, 3), dtype=np.uint8))
    shades = shades.resize(size, Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(shades)
    for _ in range(25):
        (x, y), (width, height) = rng.integers(0, size), rng.integers(20, 120, 2)
        pen.ellipse((x, y, x + width, y + height), fill=tuple(rng.integers(0, 256, 3)))
    grain = rng.normal(0, 4, (size[1], size[0], 1))
    return Image.fromarray((np.asarray(shades) + grain).clip(0, 255).astype(np.uint8))


def blurred(image: Image.Image, pixels: float) -> Image.Image:
    """Out of focus."""
    return image.filter(ImageFilter.GaussianBlur(pixels))


@dataclass(frozen=True)
class Workplace:
    """A folder with the tiny models, and room for data."""

    root: Path
    models: Path

    def add(self, name: str, image: Image.Image, caption: str | None = "a caption") -> Path:
        """An image ``folder/file.png`` with its caption file."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
        if caption is not None:
            path.with_suffix(".txt").write_text(caption)
        return path

    def config(self, *overrides: str, family: str = "qwen_image") -> Config:
        """Settings of a run in a family; resolution 64, no previews."""
        file = self.root / "run.yaml"
        file.write_text(
            f"model: {{family: {family}, path: {self.models / family}, text_encoder_dtype: float32}}\n"
            f"data: {{resolutions: [64], bucket_step: 16, cache_dir: {self.root}/cache}}\n"
            "train: {steps: 100, global_batch_size: 4, micro_batch_size: 2, mixed_precision: 'no'}\n"
            f"output: {{dir: {self.root}/run}}\n"
        )
        return load_config(file, list(overrides)).config


def add_images(workplace: Workplace, folder: str, count: int, size: tuple[int, int] = (96, 64)) -> str:
    """Images of one folder with captions; returns its path."""
    for number in range(count):
        workplace.add(f"{folder}/{number}.png", scene(len(folder) * 100 + number, size), f"{folder} {number}")
    return f"{workplace.root}/{folder}"


def findings(config: Config, sheet_size: int = 50) -> Findings:
    """What the doctor finds."""
    return examine(config, sheet_size=sheet_size).findings


def advice_with(found: Findings, words: str) -> str:
    """The one line of advice with these words."""
    [line] = [line for line in found.advice if words in line]
    return line
