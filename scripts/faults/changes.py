"""What the tensors in a cache depend on: each input, a change of it, and what must be encoded anew."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image
from test_bad_input import copied_model
from tiny_run import TinyRun, tiny_picture

from diffsynth_lite.data.video import write_video
from faults.bench import PLAIN, Bench

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of one input.

    Attributes:
        items: pictures or clips that must then be encoded.
        captions: likewise.
        settings: that make it.
        file: below the run's folder that is changed,
        edit: and how.
        patch: of the package, for what another version of it would bring.
    """

    items: int = 0
    captions: int = 0
    settings: tuple[str, ...] = ()
    file: str | None = None
    edit: Callable[[Path], object] = Path.touch
    patch: Patch = lambda _: None


def _patched(name: str, value: object) -> Patch:
    return lambda patch: patch.setattr(f"diffsynth_lite.{name}", value)


def _with_note(path: Path) -> None:
    """Other bytes, of the same meaning."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"note": "changed"}))


def _with_other_weight(path: Path) -> None:
    """The last number of a file of weights differs in its last bit."""
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)


def _with_other_frames(path: Path) -> None:
    write_video(path, [tiny_picture(32, 48, 40 + frame) for frame in range(12)], fps=16)


NUM_PICTURES, NUM_CAPTIONS, NUM_CLIPS = 5, 2, 3
_ALL_ITEMS = {"items": NUM_PICTURES}
_ALL_CAPTIONS = {"captions": NUM_CAPTIONS}
_ALL_CLIPS = {"items": NUM_CLIPS}

PICTURES = {
    "a picture": Change(items=1, file="data/1.png", edit=lambda path: tiny_picture(80, 48, 77).save(path)),
    "a caption": Change(captions=1, file="data/1.txt", edit=lambda path: path.write_text("a green square")),
    "a mask": Change(
        items=1, file="masks/1.png", edit=lambda path: Image.linear_gradient("L").resize((81, 48)).save(path)
    ),
    "no masks": Change(**_ALL_ITEMS, settings=("data.mask_dir=null",)),
    "the width": Change(**_ALL_ITEMS, settings=("data.width=48",)),
    "the height": Change(**_ALL_ITEMS, settings=("data.height=48",)),
    "the crop": Change(**_ALL_ITEMS, settings=("data.crop=random",)),
    "the background": Change(**_ALL_ITEMS, settings=("data.background=black",)),
    "the trigger": Change(**_ALL_CAPTIONS, settings=("data.trigger=ohwx",)),
    "captions left out": Change(captions=1, settings=("data.caption_dropout=0.5",)),
    "the VAE's type": Change(**_ALL_ITEMS, settings=("model.vae_dtype=bfloat16",)),
    "the text encoder's type": Change(**_ALL_CAPTIONS, settings=("model.text_encoder_dtype=bfloat16",)),
    "the text encoder's format": Change(**_ALL_CAPTIONS, settings=("model.text_encoder_quantize=int8",)),
    "one weight of the VAE": Change(
        **_ALL_ITEMS, file="model/vae/diffusion_pytorch_model.safetensors", edit=_with_other_weight
    ),
    "the VAE's config": Change(**_ALL_ITEMS, file="model/vae/config.json", edit=_with_note),
    "one weight of the text encoder": Change(
        **_ALL_CAPTIONS, file="model/text_encoder/model.safetensors", edit=_with_other_weight
    ),
    "the tokenizer": Change(**_ALL_CAPTIONS, file="model/tokenizer/tokenizer_config.json", edit=_with_note),
    "the longest prompt": Change(
        **_ALL_CAPTIONS, patch=_patched("pipelines.qwen_image.QwenImage.max_prompt_tokens", 77)
    ),
    "Pillow": Change(**_ALL_ITEMS, patch=_patched("data.items.IMAGE_DECODER_ID", "v1 Pillow 99")),
    "the code of crops and masks": Change(**_ALL_ITEMS, patch=_patched("data.items._TRANSFORM_ID", "v2")),
    "the layout of the cache": Change(
        **_ALL_ITEMS, **_ALL_CAPTIONS, patch=_patched("data.cache._SCHEMA", 99)
    ),
}

CLIPS = {
    "a clip": Change(items=1, file="clips/upright.mp4", edit=_with_other_frames),
    "the rate": Change(**_ALL_CLIPS, settings=("data.fps=8",)),
    "the number of frames": Change(**_ALL_CLIPS, settings=("data.frame_counts=[9]",)),
    "the place in the clip": Change(**_ALL_CLIPS, settings=("data.clip=center",)),
    "more clips of a file": Change(**_ALL_CLIPS, settings=("data.clip=uniform", "data.clips_per_video=2")),
    "the resolution": Change(**_ALL_CLIPS, settings=("data.resolutions=[24]",)),
    "FFmpeg": Change(**_ALL_CLIPS, patch=_patched("data.items.VIDEO_DECODER_ID", "libavcodec 99")),
}

NOTHING = {
    "a moved run": Change(settings=("train.seed=7", "lora.rank=8")),
    "the times of the files": Change(file="data/2.png", edit=Path.touch),
    "the transformer": Change(
        file="model/transformer/diffusion_pytorch_model.safetensors", edit=_with_other_weight
    ),
}
"""What no entry depends on."""


def changing_pictures(bench: Bench) -> TinyRun:
    """Five pictures with masks and two captions, and a copy of the pipeline."""
    run = bench.pictures("changing")
    (run.root / "masks").mkdir()
    for place in range(NUM_PICTURES):
        Image.radial_gradient("L").resize((80 + place, 48)).save(run.root / "masks" / f"{place}.png")
    copied_model(run)
    return _short(run, f"data.mask_dir={run.root / 'masks'}")


def changing_clips(bench: Bench) -> TinyRun:
    """Three clips that are long enough for all that is changed."""
    run = bench.clips("changing clips")
    for path in (run.root / "clips").iterdir():
        if path.stem not in ("long", "fast", "upright"):
            path.unlink()
    plain = ("data.frame_counts=[5]", "data.clip=start", "data.clips_per_video=1", "data.crop=center")
    return _short(run, *plain, "data.caption_dropout=0")


def _short(run: TinyRun, *settings: str) -> TinyRun:
    return TinyRun(run.root, run.config, (*run.settings, *PLAIN, "train.steps=1", *settings))
