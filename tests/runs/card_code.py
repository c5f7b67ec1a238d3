"""Runs the code of a model card as its reader does, but on the CPU, and compares what it generates."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from family_sample import pairs_on
from PIL import Image

from diffsynth_lite.lora.updates import pairs_of
from diffsynth_lite.media import Audio, ClipWithAudio, Generated, frames_of
from diffsynth_lite.pipelines.anima import without_torchvision
from diffsynth_lite.pipelines.qwen_image_edit import TextAndImages

LARGEST_DIFFERENCE = 2
"""Of 255, between an image of the code and the preview: prompts that are padded are summed otherwise."""
_LOADING = re.compile(r"pipeline( = |\.(\w+\.)?load_\w+\(|\.to\().*\n")
_SEES_IMAGES = """\
if hasattr(pipeline, "processor") and hasattr(pipeline, "tokenizer"):
    pipeline.processor = TextAndImages(tokenizer=pipeline.tokenizer, image_processor=pipeline.processor)
"""
"""For pipelines whose own processor needs torchvision."""


def code_of(card: Path) -> str:
    """The one program in a card."""
    [code] = re.findall("```python\n(.*?)```", card.read_text(), re.DOTALL)
    assert isinstance(code, str)
    return code


def generated(
    code: str, replaced: Mapping[str, Path] | None = None, *, pipeline: Any = None, sees_images: bool = False
) -> tuple[Generated, Any]:
    """What a program saves, and its pipeline; its files are in the current folder.

    Args:
        replaced: what its folders are.
        pipeline: has the LoRA, so that none is loaded; None loads one.
        sees_images: whether the text encoder does.
    """
    for there, here in {'"cuda"': '"cpu"', **(replaced or {})}.items():
        assert there in code
        code = code.replace(there, str(here))
    if pipeline is not None:
        code = _LOADING.sub("", code)
    elif sees_images:
        code = code.replace("result = ", f"{_SEES_IMAGES}result = ")
    names = {"TextAndImages": TextAndImages, "pipeline": pipeline}
    with _saved_clips() as clips, without_torchvision():
        exec(code, names)
    if clips:
        return clips[0], names["pipeline"]
    files = sorted(Path.cwd().glob("layer-*.png")) or [Path("image.png")]
    return [_opened(file) for file in files], names["pipeline"]


@contextmanager
def _saved_clips() -> Iterator[list[Generated]]:
    """Scope that keeps the clips that a program would write, and reads clips without imageio."""
    clips: list[Generated] = []

    def keep(frames: list[Image.Image], *_path: str, fps: float) -> None:
        clips.append(frames)

    def keep_with_audio(
        frames: list[Image.Image],
        *,
        fps: float,
        audio: torch.Tensor,
        audio_sample_rate: int,
        output_path: str,
    ) -> None:
        clips.append(ClipWithAudio(frames=frames, audio=Audio(waveform=audio, sample_rate=audio_sample_rate)))

    def read(path: str) -> list[Image.Image]:
        with av.open(path) as clip:
            return [frame.to_image() for frame in clip.decode(video=0)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffusers.utils.export_to_video", keep)
        patch.setattr("diffusers.utils.encode_video", keep_with_audio)
        patch.setattr("diffusers.utils.load_video", read)
        yield clips


def _opened(file: Path) -> Image.Image:
    with Image.open(file) as image:
        image.load()
    file.unlink()
    return image


def assert_diffusers_loads(lora: Path, tensors: dict[str, torch.Tensor], model: Path) -> None:
    """The LoRA does to diffusers' pipeline what an adapter with an alpha of 8 does."""
    pipeline = QwenImagePipeline.from_pretrained(model, dtype=torch.float32)
    pipeline.load_lora_weights(lora)
    expected, loaded = pairs_of(tensors, {"lora_alpha": 8}), pairs_on(pipeline.transformer)
    assert loaded.keys() == expected.keys() != set()
    assert all(pair.distance(loaded[layer]) == 0 for layer, pair in expected.items())


def difference(one: Generated, other: Generated) -> int:
    """The largest one of two previews of one size, of 255; with the same audio, or without any."""
    assert isinstance(one, ClipWithAudio) == isinstance(other, ClipWithAudio)
    if isinstance(one, ClipWithAudio) and isinstance(other, ClipWithAudio):
        assert one.audio.sample_rate == other.audio.sample_rate
        torch.testing.assert_close(one.audio.waveform, other.audio.waveform, rtol=0, atol=1e-3)
    pairs = list(zip(frames_of(one), frames_of(other), strict=True))
    assert all((image.mode, image.size) == (like.mode, like.size) for image, like in pairs)
    return max(
        int(np.abs(np.asarray(image, np.int16) - np.asarray(like, np.int16)).max()) for image, like in pairs
    )
