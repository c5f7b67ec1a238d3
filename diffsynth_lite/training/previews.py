"""This file draws previews while a LoRA trains: files by prompt and step, and one grid of all of them."""

import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers.training_utils import free_memory
from PIL import Image

from diffsynth_lite.pipelines import ModelFamily, PreviewRequest
from diffsynth_lite.training.evaluation import evaluation_mode
from diffsynth_lite.training.grid import frame_strip, preview_grid
from diffsynth_lite.training.random_state import random_state_scope

logger = logging.getLogger(__name__)

_FILE_NAME = re.compile(r"step-(\d{8})-prompt-.*\.png")
_MAX_COLUMNS = 12


@dataclass(frozen=True, kw_only=True)
class Previews:
    """The prompts that are drawn at chosen steps, always from the same noise.

    Attributes:
        family: draws through its own diffusers pipeline.
        folder: where the files go.
        prompts: as given, for the grid's labels.
        requests: one a prompt.
        vae_dtype: of the decoder, which is loaded for the preview and freed again.
    """

    family: ModelFamily
    folder: Path
    prompts: Sequence[str]
    requests: Sequence[PreviewRequest]
    vae_dtype: torch.dtype

    def draw(self, transformer: torch.nn.Module, step: int) -> Path | None:
        """Draw all prompts and renew the grid; a failure is logged with its traceback and training goes on.

        The model's mode and the global random state are as before.

        Returns:
            The grid's file, or None when there are no prompts or drawing failed.
        """
        if not self.requests:
            return None
        logger.info("After step %d: drawing %d previews.", step, len(self.requests))
        try:
            with random_state_scope(next(transformer.parameters()).device), evaluation_mode(transformer):
                previews = self.family.sample(transformer, self.vae_dtype, self.requests)
            return self._save(previews, step)
        except Exception:  # a picture is never worth the run: no memory, a full disk, a broken scheduler
            logger.warning("Previews at step %d failed; training goes on.", step, exc_info=True)
            return None
        finally:
            free_memory()

    def _save(self, previews: Sequence[Sequence[Image.Image]], step: int) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        for place, frames in enumerate(previews):
            frame_strip(frames).save(self._file(step, place))
        steps = _spread([drawn for drawn in self._drawn_steps() if drawn <= step], _MAX_COLUMNS)
        rows = [[_open(self._file(drawn, place)) for drawn in steps] for place in range(len(self.prompts))]
        path = self.folder / "grid.png"
        aside = path.with_suffix(".tmp.png")
        preview_grid(rows, self.prompts, steps).save(aside)
        aside.replace(path)
        return path

    def _file(self, step: int, place: int) -> Path:
        """File of one preview; its name changes with the prompt and with how it is drawn."""
        request = self.requests[place]
        drawn_as = (
            *(self.prompts[place], request.width, request.height, request.seed),
            *(request.num_inference_steps, request.guidance_scale),
        )
        mark = hashlib.blake2b(repr(drawn_as).encode(), digest_size=3).hexdigest()
        return self.folder / f"step-{step:08d}-prompt-{place:02d}-{mark}.png"

    def _drawn_steps(self) -> list[int]:
        """Steps of which every prompt's file is there, also from before a resume."""
        matches = [match for path in self.folder.iterdir() if (match := _FILE_NAME.fullmatch(path.name))]
        steps = sorted({int(match[1]) for match in matches})
        return [
            step
            for step in steps
            if all(self._file(step, place).is_file() for place in range(len(self.prompts)))
        ]


def _spread(steps: Sequence[int], count: int) -> list[int]:
    """At most ``count`` of the steps, evenly spread, the first and the last among them."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (count - 1))] for place in range(count)]


def _open(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")
