"""This file holds the doctor's findings, as values that both the console and the page show."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from PIL.Image import Image

from diffsynth_lite.core.noise.densities import LevelShares
from diffsynth_lite.training.encoding.phrases import ConstantPhrase

_KINDS = {
    "image": "image",
    "video": "clip",
    "edit": "edit pair",
    "image_to_video": "first-frame clip",
    "control": "guided item",
    "inpaint": "masked item",
    "layers": "layered image",
}


def counted(number: int, noun: str) -> str:
    """Such as ``1 item``, ``2 items``, ``3 copies``."""
    if number != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFindings:
    """What one source holds.

    Attributes:
        place: its folder or data set.
        num_records: by kind: image, video, edit and so on; the items that are not used, too.
        num_captions: of all records together, with the tags in all their orders.
        num_dropped: items that are not used.
        passes: times that each record is in a pass: repeats x weight.
        is_preserved: whether it is not learned.
    """

    COLUMNS: ClassVar = ("source", "holds", "used", "left out", "captions", "times a pass")

    place: str
    num_records: Mapping[str, int]
    num_captions: int
    num_dropped: int
    passes: float
    is_preserved: bool = False

    @property
    def contents(self) -> str:
        """Its records in words."""
        held = ", ".join(counted(count, _KINDS[kind]) for kind, count in self.num_records.items()) or "none"
        return f"{held}, preserved" if self.is_preserved else held

    @property
    def cells(self) -> list[str]:
        """Its row of a table."""
        num_used = sum(self.num_records.values()) - self.num_dropped
        counts = (num_used, self.num_dropped, self.num_captions, f"{self.passes:g}")
        return [self.place, self.contents, *map(str, counts)]


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketFindings:
    """One row of the bucket table.

    Attributes:
        name: its size in words, such as ``832x480x81``.
        samples_per_pass: with repeats and weights.
        num_tokens: of one sample in the transformer, with its inputs.
    """

    COLUMNS: ClassVar = ("size", "items", "samples a pass", "batch", "batches a pass", "tokens a sample")

    name: str
    num_items: int
    samples_per_pass: float
    micro_batch_size: int
    num_tokens: int

    @property
    def batches_per_pass(self) -> float:
        """Micro-batches that a pass over the data takes from it, on all devices together."""
        return self.samples_per_pass / self.micro_batch_size

    @property
    def cells(self) -> list[str]:
        """Its row of a table."""
        samples, batches = f"{self.samples_per_pass:g}", f"{self.batches_per_pass:.4g}"
        counts = (self.num_items, samples, self.micro_batch_size, batches, self.num_tokens)
        return [self.name, *map(str, counts)]


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseFindings:
    """One row of the table of noise levels.

    Attributes:
        name: its scope: all steps, a size, an expert, or audio with noise levels of its own.
        part: of all steps.
        shift: of their noise levels; None where sizes differ in it.
    """

    COLUMNS: ClassVar = ("", "steps", "shift", "mean", "<0.5", *(f"{tenth / 10}" for tenth in range(10)))
    """What ``cells`` are: percentages but for shift and mean; the last ten of the tenths that begin there."""

    name: str
    part: float
    shift: float | None
    shares: LevelShares

    @property
    def cells(self) -> list[str]:
        """Its name and numbers, rounded."""
        shift = "" if self.shift is None else f"{self.shift:.3g}"
        parts = map(_percent, (self.shares.below_half, *self.shares.tenths))
        return [self.name, _percent(self.part), shift, f"{self.shares.mean:.2f}", *parts]


def _percent(part: float) -> str:
    # Halves are rounded alike whatever the last digits are, which differ between machines.
    return f"{round(100 * part, 6):.0f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Least, middle and greatest of some numbers."""

    least: float
    middle: float
    greatest: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Spread | None":
        """The spread of numbers in any order; None of none."""
        ordered = sorted(numbers)
        if not ordered:
            return None
        return cls(least=ordered[0], middle=ordered[len(ordered) // 2], greatest=ordered[-1])

    def __str__(self) -> str:
        if self.least == self.greatest:
            return f"{self.least:g}"
        return f"{self.least:g} to {self.greatest:g}, median {self.middle:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionFindings:
    """Facts about the captions.

    Attributes:
        tokens: of the captions, uncut; None where there are none.
        limit: tokens that the encoder takes; longer captions are cut.
        remarks: kind of an oddity, to name of an item, to what it is. The kinds are too_long,
            without_trigger, which was put in front, same, misspelt_trigger, one_word, other_script, refusal,
            boilerplate and not_json.
        constant: phrases that most captions of a source have in common.
        same: captions that several items have, with their number; the most frequent first.
    """

    tokens: Spread | None
    limit: int
    remarks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    constant: Sequence[ConstantPhrase] = ()
    same: Sequence[tuple[str, int]] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemCrop:
    """What a run takes of an item.

    Attributes:
        bucket: the size that it is trained at, in words.
        box: left, top, right and bottom of the crop, in pixels of the upright image or frame.
    """

    bucket: str
    box: tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemFindings:
    """All that is found about one item.

    Attributes:
        crops: one for each resolution, crop and clip that it is trained at; none where it cannot be used.
        tokens: of each of its captions, uncut; empty where there is no tokenizer.
        limit: tokens that the model sees.
        remarks: anything unusual about it.
    """

    crops: Sequence[ItemCrop]
    tokens: Sequence[int]
    limit: int
    remarks: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class SheetEntry:
    """One item as the model will see it.

    Attributes:
        bucket: its size in words.
        captions: as encoded, one after the other.
        images: by what they are: input, target, mask, ...
        remarks: anything unusual about it.
    """

    name: str
    bucket: str
    captions: Sequence[str]
    images: Mapping[str, Image]
    remarks: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """All findings of the doctor, or those of the held-out data.

    Attributes:
        facts: numbers in words by name: sizes, durations, passes, sizes of the cache.
        buckets: the largest first.
        noise: how the steps are spread over the noise levels; of all steps, and of parts of them.
        noise_level: what such a level is, in words.
        model: facts by name: its release, components and LoRA.
        problems: errors that stop a run, except bad single files, one a line.
        dropped: name of an item to the reason why it cannot be used.
        remedy: what to do about these where they stop the run; else empty.
        small: images of some of them that can be decoded, by their names.
        equal: groups of names with equal files.
        alike: groups of names that look alike, beyond the equal ones.
        trained: of held-out data, groups of their names with those of training items that are equal.
        like_trained: the same for items that look alike.
        flaws: of the images themselves: blurred and bars, to name of an item, to what it is.
        sizes: of sizes and rates: cropped, enlarged, small and repeated, in the same way.
        items: by name, which is the file below its folder; with several sources after the source's index.
        advice: what to change, the most important first.
        sheet: items as the model sees them.
        num_items: items planned; the sheet may show fewer.
        held_out: findings of the held-out data; None where there are none.
    """

    sources: Sequence[SourceFindings]
    facts: Mapping[str, str]
    buckets: Sequence[BucketFindings]
    captions: CaptionFindings
    machine: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, str] = field(default_factory=dict)
    problems: Sequence[str] = ()
    noise: Sequence[NoiseFindings] = ()
    noise_level: str = ""
    dropped: Mapping[str, str] = field(default_factory=dict)
    remedy: str = ""
    small: Mapping[str, Image] = field(default_factory=dict)
    equal: Sequence[Sequence[str]] = ()
    alike: Sequence[Sequence[str]] = ()
    trained: Sequence[Sequence[str]] = ()
    like_trained: Sequence[Sequence[str]] = ()
    flaws: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    sizes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    items: Mapping[str, ItemFindings] = field(default_factory=dict)
    advice: Sequence[str] = ()
    sheet: Sequence[SheetEntry] = ()
    num_items: int = 0
    held_out: "Findings | None" = None

    def as_json(self) -> dict[str, Any]:
        """All but the images, for json."""
        shown = asdict(replace(self, small={}, sheet=(), held_out=None))
        del shown["small"], shown["sheet"]
        return shown | {"held_out": self.held_out and self.held_out.as_json()}
