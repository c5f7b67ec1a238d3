"""This file lists tags of images by a model in the layout of the WD taggers.

Source of the layout, the preparation of images and the thresholds: those of SmilingWolf on the hub, such as
``wd-vit-tagger-v3``.
"""

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diffsynth_lite.captioning.captioner import Answer, Question
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.base.folder.hub import HubCommit, fetch_all
from diffsynth_lite.pipelines.base.model_settings import shortened

_FILES = ("model.onnx", "selected_tags.csv")
_THRESHOLDS = {"0": 0.35, "4": 0.85}
"""Of general tags and of characters, by the numbers of their categories; others are left out: ratings."""
_WHITE = (255, 255, 255)


def is_tagger(folder: Path, hub: HubCommit | None) -> bool:
    """Whether a folder holds a tagger, or its repository does; one with the settings of a model is not asked.

    Args:
        hub: where the folder is from; None for one of the user's.
    """
    if _is_there(folder):
        return True
    config = folder / "config.json"
    if hub is None or (config.is_file() and b'"model_type"' in config.read_bytes()):
        return False
    return set(_FILES) <= hub.list_files([""])[""].keys()


class Tagger:
    """A tagger as a :class:`~diffsynth_lite.captioning.captioner.Captioner`, which reads no instruction.

    Its answer names all tags above a threshold, the most probable first; of several images by their mean. The
    images of a batch are computed one after the other, so that a batch changes nothing.

    Args:
        name: of the model.
        hub: where to get files that are not in the folder; None for one of the user's.
        providers: of onnxruntime, by preference; those that it does not have are left out.
    """

    def __init__(
        self, name: str, folder: Path, hub: HubCommit | None, *, providers: Sequence[str], batch_size: int
    ) -> None:
        self.name, self.batch_size = name, batch_size
        self._folder, self._hub = folder, hub
        try:
            import onnxruntime
        except ImportError as error:
            raise UserError(
                f"--model: {name} is a tagger, which needs onnxruntime: pip install 'diffsynth_lite[tagger]'"
            ) from error
        self._runtime = onnxruntime
        self._providers = [one for one in providers if one in onnxruntime.get_available_providers()]
        self._session: Any = None
        self._tags: list[tuple[str, str]] = []

    def __enter__(self) -> "Tagger":
        if self._hub is not None and not _is_there(self._folder):
            with self._hub.lock():
                sizes = self._hub.list_files([""])[""]
                fetch_all({self._hub: {name: sizes[name] for name in _FILES}})
        self._tags = _read_tags(self._folder / "selected_tags.csv")
        file = self._folder / "model.onnx"
        try:
            self._session = self._runtime.InferenceSession(file, providers=self._providers)
        except Exception as error:  # of many classes that have nothing in common
            raise UserError(f"--model: {file} cannot be read: {shortened(error)}; get it again") from error
        taken, made = self._session.get_inputs()[0].shape, self._session.get_outputs()[0].shape
        if len(taken) != 4 or taken[1] != taken[2] or taken[3] != 3 or made[-1] != len(self._tags):
            raise UserError(
                f"--model: {file} makes {made} of {taken}, and not {len(self._tags)} tags, as in "
                "selected_tags.csv, of square images with the colors last; get the folder again"
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._session = None

    def answer(self, questions: Sequence[Question], *, max_tokens: int) -> list[Answer]:
        """As of the protocol; all tags are named, whatever ``max_tokens`` is."""
        return [Answer(text=", ".join(self._tags_of(one.images))) for one in questions]

    def _tags_of(self, images: Sequence[Image.Image]) -> list[str]:
        taken = self._session.get_inputs()[0]
        outputs = [self._session.run(None, {taken.name: _prepared(one, taken.shape[1])})[0] for one in images]
        probabilities = np.concatenate(outputs).mean(axis=0)
        found = [
            (-probability, name)
            for (name, category), probability in zip(self._tags, probabilities.tolist(), strict=True)
            if probability > _THRESHOLDS.get(category, 1)
        ]
        return [name for _, name in sorted(found)]


def _prepared(image: Image.Image, side: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """(1, side, side, 3), BGR in [0, 255]: an image in the middle of a white square."""
    longest = max(image.size)
    square = Image.new("RGB", (longest, longest), _WHITE)
    square.paste(image, ((longest - image.width) // 2, (longest - image.height) // 2))
    resized = square.resize((side, side), Image.Resampling.BICUBIC)
    return np.ascontiguousarray(np.asarray(resized, dtype=np.float32)[None, :, :, ::-1])


def _read_tags(file: Path) -> list[tuple[str, str]]:
    """Name and category of each tag, in the order of the model."""
    try:
        rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
        return [(_spaced(row["name"]), row["category"]) for row in rows]
    except (OSError, ValueError, KeyError, csv.Error) as error:
        problem = f"is not a table with name and category ({shortened(error)})"
        raise UserError(f"--model: {file} {problem}; get it again") from error


def _spaced(tag: str) -> str:
    """A tag in words; faces, such as ``o_o`` and ``(o)_(o)``, are left as they are."""
    return tag.replace("_", " ") if re.search(r"[^\W_]{2}", tag) else tag


def _is_there(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)
