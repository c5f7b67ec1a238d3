"""This file turns images into features by DINOv2, and compares them with prompts by SigLIP, on the CPU.

Sources: the class token of DINOv2 (https://arxiv.org/abs/2304.07193) for likeness of images, and the cosine
of image and text of SigLIP (https://arxiv.org/abs/2303.15343), as its loss compares them.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from PIL.Image import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

from diffsynth_lite.errors import UserError, join_names

logger = logging.getLogger(__name__)

_SETTING = "validation.score_models"
_FILES = ("*.json", "*.txt", "*.model", "*.safetensors")
_NEEDED = ("config.json", "preprocessor_config.json", "model.safetensors")
_HASHED_BYTES = 1 << 20
_MAX_TOKENS = 64
"""That SigLIP was trained with, padded to all of them."""

Floats = npt.NDArray[np.float64]


class FeatureModels:
    """The model for images and the one for prompts, of which weights are in memory only while they are used.

    Attributes:
        names: of both, of a folder its last part.
        identity: equal for the same files, wherever they are.
    """

    def __init__(self, names: Sequence[str], folders: Sequence[Path]) -> None:
        self.names = tuple(Path(name).name if Path(name).expanduser().is_dir() else name for name in names)
        self._images, self._prompts = folders
        self.identity = _identity(folders)

    @classmethod
    def find(cls, locations: Sequence[str]) -> "FeatureModels":
        """The models that folders or hub ids name; what is missing of the hub's is downloaded.

        Args:
            locations: of the model for images, and of the one for prompts.

        Raises:
            UserError: one is missing, cannot be downloaded, or is not of the kind.
        """
        folders = [_find(location) for location in locations]
        for location, folder, reads_text in zip(locations, folders, (False, True), strict=True):
            _check(location, folder, reads_text=reads_text)
        return cls(locations, folders)

    def features(self, clips: Sequence[Sequence[Image]]) -> Floats:
        """What clips show, (N, D), unit vectors: of each clip the mean over its frames.

        Args:
            clips: RGB frames; an image is one frame.
        """
        with _loaded(self._images) as (model, processor):
            found = [model(**processor(list(frames), return_tensors="pt")).pooler_output for frames in clips]
        return np.stack([_unit(_unit(of_frames).mean(0)).numpy() for of_frames in found])

    def similarity(self, clips: Sequence[Sequence[Image]], prompts: Sequence[str]) -> Floats:
        """How well each clip fits its prompt, (N,), in [-1, 1]: the mean over its frames."""
        tokenizer = AutoTokenizer.from_pretrained(self._prompts, trust_remote_code=False)
        found = []
        with _loaded(self._prompts) as (model, processor):
            for frames, prompt in zip(clips, prompts, strict=True):
                # Both versions of SigLIP have learned from small letters.
                settings = {"padding": "max_length", "max_length": _MAX_TOKENS, "truncation": True}
                tokens = tokenizer([prompt.lower()], return_tensors="pt", **settings)
                seen = model(**processor(list(frames), return_tensors="pt"), input_ids=tokens["input_ids"])
                found.append(_unit(seen.image_embeds) @ _unit(seen.text_embeds)[0])
        return np.array([float(of_frames.mean()) for of_frames in found])


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    # In float64, so that equal images have a distance of 0, however close others are to them.
    return torch.nn.functional.normalize(vectors.double(), dim=-1)


@contextmanager
def _loaded(folder: Path) -> Iterator[tuple[Any, Any]]:
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
    settings: dict[str, Any] = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
    shows_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # of loading, below the progress of a run
    try:
        model = AutoModel.from_pretrained(folder, local_files_only=True, **settings)
    finally:
        if shows_bar:
            transformers_logging.enable_progress_bar()
    with torch.no_grad():
        yield model.eval(), processor


def _find(location: str) -> Path:
    folder = Path(location).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(location, allow_patterns=[*_FILES]))
    except HFValidationError:
        reason = "is neither a folder nor a hub id"
    except LocalEntryNotFoundError:
        reason = "is not in the hub's cache, and the hub cannot be reached"
    except (HfHubHTTPError, OSError) as error:
        reason = f"cannot be downloaded ({' '.join(str(error).split())})"
    raise UserError(
        f"{_SETTING}: {location} {reason}; give a folder with the model's files, download it where there is "
        f"a network (hf download {location}), or set validation.scores: false"
    )


def _check(location: str, folder: Path, *, reads_text: bool) -> None:
    """Check that a folder has the files of a model of the kind; no weights are read."""
    if missing := [name for name in _NEEDED if not (folder / name).is_file()]:
        raise UserError(f"{_SETTING}: {location} has no {join_names(missing)}; give a folder that has them")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise UserError(f"{_SETTING}: {location} is not a model of transformers: {error}") from error
    if hasattr(config, "text_config") != reads_text:
        kinds = "one for images (DINOv2) and one for images and prompts (SigLIP), in this order"
        raise UserError(f"{_SETTING}: {location} is a {config.model_type}; give {kinds}")


def _identity(folders: Sequence[Path]) -> str:
    """Of settings, and of size and beginning of weights: all of them are a gigabyte."""
    digest = hashlib.blake2b(digest_size=16)
    for path in (folder / name for folder in folders for name in _NEEDED):
        with path.open("rb") as file:
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(_HASHED_BYTES))
    return digest.hexdigest()
