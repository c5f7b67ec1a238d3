"""This file defines the items and prompts that are encoded, with everything that their tensors depend on.

The identity of a run's data is the content of its items, and not where a cache keeps their tensors.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import ImageOps
from PIL.Image import Image
from torch import Tensor

from diffsynth_lite.core.randomness import counter_generator
from diffsynth_lite.data.audio import DECODER_ID as AUDIO_DECODER_ID
from diffsynth_lite.data.audio import read_audio
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.captions import TagCounts
from diffsynth_lite.data.images import DECODER_ID as IMAGE_DECODER_ID
from diffsynth_lite.data.images import (
    black_or_white,
    cover,
    crop_of,
    load_image,
    load_layer,
    load_mask,
    random_mask,
)
from diffsynth_lite.data.item_table import ItemTable
from diffsynth_lite.data.records import Record, is_video
from diffsynth_lite.data.video import AVI_ID, clip_times, is_avi, read_frames
from diffsynth_lite.data.video import DECODER_ID as VIDEO_DECODER_ID
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Audio, AudioFormat, Crop, Media, Prompt, evenly_spread

_TRANSFORM_ID = "v1 cover mask-area"
"""The version of this file's transforms of decoded media; part of cache keys, so change it with the code."""
_RANDOM_MASK_ID = "random-v1"
"""The version of random masks; part of cache keys, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingItem:
    """One training item: a record at one size, crop and clip.

    Attributes:
        content: sha256 of each of the record's files.
        bucket: its size in pixels and frames, and those of its inputs.
        crop_x: where the surplus width is cut, in [0, 1]: 0 keeps the left end.
        crop_y: where the surplus height is cut, in [0, 1]: 0 keeps the upper end.
        clip_start_s: time of the first frame in the file; None for an image.
        fps: frames per second of the clip; None for an image.
        background: colour that transparent images are laid over.
        random_mask: number of its random mask; None where it has none.
        audio: format of the audio that is trained on with a clip; None where there is none.
    """

    name: str
    record: Record
    content: tuple[str, ...]
    bucket: Bucket
    crop_x: float
    crop_y: float
    clip_start_s: float | None
    fps: float | None
    background: str
    random_mask: int | None = None
    audio: AudioFormat | None = None

    @property
    def where(self) -> str:
        """The file, for messages."""
        return str(self.record.target)

    @property
    def group(self) -> Bucket:
        """Sort key for encoding, so that equal sizes follow each other."""
        return self.bucket

    @property
    def has_media(self) -> bool:
        """Whether there are files to decode."""
        return True

    @property
    def is_clip(self) -> bool:
        """Whether its target is a clip."""
        return self.fps is not None

    def identity(self) -> list[object]:
        """Identity of all that is learned from it, for json: content of files, captions, size, crop,
        times."""
        bucket, record = self.bucket, self.record
        return [
            *(record.source, record.kind, record.captions, list(self._contents())),
            *(bucket.width, bucket.height, bucket.num_frames, bucket.inputs),
            *(self.crop_x, self.crop_y, self.clip_start_s, self.fps),
        ]

    def key(self, cache: TensorCache, encoder_id: str) -> str:
        """Key of the cache entry with its tensors.

        Args:
            encoder_id: name of everything that decides the tensors besides the media: weights, precision.
        """
        return cache.key(
            kind=f"media {self.record.kind}",
            content=" ".join(self._contents()),
            size=f"{self.bucket.width}x{self.bucket.height}x{self.bucket.num_frames}",
            crop=f"{self.crop_x!r} {self.crop_y!r}",
            times=f"{self.fps!r}: {self.times()}",
            transform=f"{_TRANSFORM_ID} {self.background}",
            decoder=_decoders([self]),
            encoder=encoder_id,
        )

    def times(self) -> list[float]:
        """Seconds in the file at which the frames of a clip are taken; none of an image."""
        if self.clip_start_s is None:
            return []
        assert self.fps is not None
        return clip_times(self.clip_start_s, num_frames=self.bucket.num_frames, fps=self.fps)

    def load(self) -> Media:
        """Decode the files strictly, upright and cropped."""
        record = self.record
        frames, crop = self._frames()
        return Media(
            frames=tuple(frames),
            inputs=tuple(load_image(path, background=self.background) for path in record.inputs),
            first_frame=self._frames_of(record.first_frame)[0] if record.first_frame else None,
            last_frame=self._frames_of(record.last_frame)[0] if record.last_frame else None,
            mask=self._mask(),
            control=tuple(self._frames_of(record.control)) if record.control else (),
            inpaint_mask=self._inpaint_mask(len(frames)),
            face=tuple(read_frames(record.face, self.times(), each=small_face)) if record.face else (),
            layers=tuple(self._cropped(load_layer(path)) for path in record.layers),
            fps=self.fps,
            crop=crop,
            audio=self._audio(),
        )

    def few_frames(self, count: int) -> list[Image]:
        """At most ``count`` frames of its target, evenly spread, as :meth:`load` returns them."""
        if not self.is_clip:
            return self._frames()[0]
        times = evenly_spread(self.times(), count)
        return read_frames(self.record.target, times, each=self._cropped)

    def start(self) -> Image:
        """The image that a clip starts from, as :meth:`load` returns it: by default its own first frame."""
        first_frame = self.record.first_frame
        return self.few_frames(1)[0] if first_frame is None else self._frames_of(first_frame)[0]

    def complete(self, tensors: Mapping[str, Tensor], media: Media) -> dict[str, Tensor]:
        """The entry of the cache: the encoder's tensors, and the media's part in the loss.

        That part is the mask at the size of the latents, multiplied by the encoder's own mask if it has one,
        and, where audio is encoded, whether the clip has any.
        """
        entry = dict(tensors)
        if media.mask is not None:
            mask = latents_mask(media.mask, tensors["latents"].shape)
            entry["loss_mask"] = mask * tensors.get("loss_mask", 1)
        if "audio_latents" in tensors:
            entry["has_audio"] = torch.tensor(0.0 if media.audio is None else 1.0)
        return entry

    def _contents(self) -> Iterator[str]:
        """Role and content of each file, as in "mask:<sha256>"."""
        marks = ["target", *(role.mark for role, paths in self.record.by_role.items() for _ in paths)]
        for mark, content in zip(marks, self.content, strict=True):
            yield f"{mark}:{content}"
        if self.random_mask is not None:
            yield f"inpaint:{_RANDOM_MASK_ID}-{self.random_mask}"

    def _frames(self) -> tuple[list[Image], Crop | None]:
        if is_video(self.record.target.name):
            return self._frames_of(self.record.target), None
        image, bucket = load_image(self.record.target, background=self.background), self.bucket
        crop = crop_of(image.size, bucket.width, bucket.height, x=self.crop_x, y=self.crop_y)
        return [self._cropped(image)], crop

    def _audio(self) -> Audio | None:
        if self.audio is None or self.clip_start_s is None or self.fps is None:
            return None
        duration_s = self.bucket.num_frames / self.fps
        return read_audio(self.record.target, self.clip_start_s, duration_s, self.audio)

    def _mask(self) -> Image | None:
        path = self.record.mask
        if path is None:
            return None
        mask = self._cropped(load_mask(path))
        if mask.getbbox() is None:
            raise UserError(f"{path}: its crop is black, so that nothing counts in the loss")
        return mask

    def _inpaint_mask(self, num_frames: int) -> tuple[Image, ...]:
        path = self.record.inpaint_mask
        if self.random_mask is not None:
            draw = counter_generator(0, f"inpaint mask {self.content[0]}", self.random_mask)
            return (random_mask(self.bucket.width, self.bucket.height, draw),) * num_frames
        if path is None:
            return ()
        if is_video(path.name):
            masks = read_frames(path, self.times(), each=self._cropped_mask)
        else:
            masks = [self._cropped_mask(load_mask(path, white="what is regenerated"))] * num_frames
        if not any(mask.getbbox() for mask in masks):
            raise UserError(f"{path}: its crop is black, so that nothing is regenerated")
        return tuple(masks)

    def _cropped_mask(self, image: Image) -> Image:
        return black_or_white(self._cropped(image.convert("L")))

    def _frames_of(self, path: Path) -> list[Image]:
        """The frames of a clip at the times of the item; an image is its own only frame."""
        if is_video(path.name):
            return read_frames(path, self.times(), each=self._cropped)
        return [self._cropped(load_image(path, background=self.background))]

    def _cropped(self, image: Image) -> Image:
        return cover(image, self.bucket.width, self.bucket.height, x=self.crop_x, y=self.crop_y)


def small_face(frame: Image) -> Image:
    """A frame of a face, of at most 1024 pixels on a side: a model sees fewer, whatever the file has."""
    frame.thumbnail((1024, 1024))
    return frame


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptItem:
    """A text to encode, with the images that the text encoder sees.

    Attributes:
        is_negative: whether guidance steers away from it; see `Prompt`.
        content: sha256 of each of ``images``.
        size: width and height that ``images`` are cut to; None leaves them as they are.
        clip: whose start the text encoder sees in place of ``images``; None where there is no clip.
    """

    text: str
    is_negative: bool = False
    images: tuple[Path, ...] = ()
    content: tuple[str, ...] = ()
    background: str = "white"
    size: tuple[int, int] | None = None
    clip: TrainingItem | None = None

    @property
    def where(self) -> str:
        """The prompt, for messages."""
        return f"caption {self.text!r}"

    @property
    def group(self) -> int:
        """Sort key for encoding, so that similar lengths follow each other."""
        return len(self.text)

    @property
    def has_media(self) -> bool:
        """Whether there are files to decode."""
        return bool(self.images) or self.clip is not None

    def key(self, cache: TensorCache, encoder_id: str) -> str:
        """Key of the cache entry with its tensors; see `TrainingItem.key`."""
        kind = "negative" if self.is_negative else "caption"
        if self.clip is not None:
            start = self.clip.key(cache, encoder_id)
            return cache.key(kind=f"{kind} with a start", text=self.text, content=start)
        if not self.images:
            return cache.key(kind=kind, text=self.text, encoder=encoder_id)
        return cache.key(
            kind=f"{kind} with images",
            text=self.text,
            content=" ".join(self.content),
            transform=self.background if self.size is None else f"{self.background} {self.size}",
            decoder=IMAGE_DECODER_ID,
            encoder=encoder_id,
        )

    def load(self) -> Prompt:
        """Decode the images."""
        if self.clip is not None:
            return Prompt(text=self.text, images=(self.clip.start(),), is_negative=self.is_negative)
        images = tuple(load_image(path, background=self.background) for path in self.images)
        if self.size is not None:
            images = tuple(ImageOps.fit(image, self.size) for image in images)
        return Prompt(text=self.text, images=images, is_negative=self.is_negative)

    def complete(self, tensors: Mapping[str, Tensor], prompt: Prompt) -> dict[str, Tensor]:
        """The entry of the cache: the encoder's tensors as they are."""
        return dict(tensors)


def _decoders(items: Sequence[TrainingItem]) -> str:
    """Name of everything that decides the pixels and audio of items besides their files and the settings."""
    ids = [IMAGE_DECODER_ID]
    if any(item.is_clip for item in items):
        ids.append(VIDEO_DECODER_ID)
    if any(is_avi(path) for item in items for path in item.record.files):
        ids.append(AVI_ID)
    if form := next((item.audio for item in items if item.audio is not None), None):
        ids += [AUDIO_DECODER_ID, f"{form.sample_rate} Hz x {form.num_channels}"]
    return " ".join(ids)


def latents_mask(mask: Image, latents_shape: tuple[int, ...]) -> Tensor:
    """How much each latent counts in the loss: the part of its area that the mask covers.

    Args:
        mask: mode "L", 255 counts.
        latents_shape: (C, H, W) or (C, F, H, W).

    Returns:
        (1, H, W) or (1, 1, H, W), fp32, in [0, 1].
    """
    pixels = torch.frombuffer(bytearray(mask.tobytes()), dtype=torch.uint8).view(1, mask.height, mask.width)
    height, width = latents_shape[-2:]
    averaged = torch.nn.functional.adaptive_avg_pool2d(pixels.float() / 255, (height, width))
    return averaged.view(*(1,) * (len(latents_shape) - 2), height, width)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataIdentity:
    """Equal for two runs if and only if they train on the same data, taken in the same way.

    Attributes:
        items: their number, and a hash of the content, crop, times and pairing of each, in order. Names and
            paths are not part of it, as no number depends on them.
        decoder: name of the code that turns files into pixels.
    """

    items: str
    num_buckets: int
    decoder: str
    media_encoder: str
    prompt_encoder: str

    @classmethod
    def of(cls, items: Sequence[TrainingItem], *, media_encoder: str, prompt_encoder: str) -> "DataIdentity":
        """Identity of items; no file is read for it."""
        digest = hashlib.blake2b(digest_size=16)
        for item in items:
            # One line each, so that nothing can move from one item to its neighbour.
            digest.update(f"{json.dumps(item.identity())}\n".encode())
        return cls(
            items=f"{len(items)} items, {digest.hexdigest()}",
            num_buckets=len({item.bucket for item in items}),
            decoder=f"{_TRANSFORM_ID} {_decoders(items)}",
            media_encoder=_short(media_encoder),
            prompt_encoder=_short(prompt_encoder),
        )


@dataclass(frozen=True, kw_only=True)
class UsableData:
    """The items of a data set that are trained on.

    Attributes:
        items: in order, with the keys of their tensors.
        identity: content of these items, independent of where their tensors are stored.
        tag_counts: by the index of a source.
    """

    items: ItemTable
    identity: DataIdentity
    tag_counts: Mapping[int, TagCounts]


def _short(identity: str) -> str:
    """First word of an encoder's identity, for people, and a hash of all of it: it can hold a template."""
    digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    return f"{identity.split(maxsplit=1)[0]} {digest}"
