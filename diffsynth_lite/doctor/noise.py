"""This file tells which noise levels the steps of a run train, from what the run draws them with."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from diffsynth_lite.core.noise import LevelShares, mixed_shares
from diffsynth_lite.data import Bucket
from diffsynth_lite.doctor.findings import NoiseFindings
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.training.objective import NoiseLevels


@dataclass(frozen=True, kw_only=True, slots=True)
class _Size:
    """The steps of one size.

    Attributes:
        part: of all steps.
        ranges: as :meth:`NoiseLevels.shares` gives them.
    """

    name: str
    part: float
    shift: float
    ranges: Sequence[tuple[float, LevelShares]]


def noise_table(
    levels: NoiseLevels,
    family: ModelFamily,
    samples: Mapping[Bucket, float],
    audio_shape: Callable[[int], Sequence[int] | None] = lambda _num_frames: None,
) -> list[NoiseFindings]:
    """All steps, each size where they differ in their shift, each expert, and audio with levels of its own.

    Args:
        levels: of the run.
        samples: of each bucket in a pass over the data, at least one above 0.
        audio_shape: of the latents of the audio of so many frames, where it has levels of its own.
    """

    def shape_of(bucket: Bucket) -> Sequence[int]:
        return family.latents_shape(bucket.width, bucket.height, bucket.num_pictures)

    total = sum(samples.values())
    sizes = _sizes(levels, shape_of, samples, total)
    rows = [_all_of("all steps", 1.0, sizes)]
    shift = rows[0].shift
    if shift is None:
        rows += [
            NoiseFindings(name=size.name, part=size.part, shift=size.shift, shares=mixed_shares(size.ranges))
            for size in sizes
        ]
    if len(levels.ranges) > 1:
        rows += [_of_expert(place, name, sizes, shift) for place, name in enumerate(family.trained)]
    heard = {bucket: number for bucket, number in samples.items() if audio_shape(bucket.num_frames)}
    if heard:
        of_audio = _sizes(levels, lambda bucket: audio_shape(bucket.num_frames) or (), heard, total)
        rows.append(_all_of("audio", sum(heard.values()) / total, of_audio))
    return rows


def _all_of(name: str, part: float, sizes: Sequence[_Size]) -> NoiseFindings:
    return NoiseFindings(
        name=name,
        part=part,
        shift=sizes[0].shift if len({size.shift for size in sizes}) == 1 else None,
        shares=mixed_shares([(size.part * part, shares) for size in sizes for part, shares in size.ranges]),
    )


def _sizes(
    levels: NoiseLevels,
    shape_of: Callable[[Bucket], Sequence[int]],
    samples: Mapping[Bucket, float],
    total: float,
) -> list[_Size]:
    """The sizes, the one with most steps first; ``total`` are the samples that make all steps."""
    counts: dict[Bucket, float] = defaultdict(float)
    for bucket, number in samples.items():
        counts[replace(bucket, inputs=())] += number
    known: dict[float, list[tuple[float, LevelShares]]] = {}
    sizes = []
    for bucket, number in sorted(counts.items(), key=lambda entry: -entry[1]):
        shape = shape_of(bucket)
        shift = levels.shift(shape)
        if shift not in known:
            known[shift] = levels.shares(shape)
        sizes.append(_Size(name=bucket.name, part=number / total, shift=shift, ranges=known[shift]))
    return sizes


def _of_expert(place: int, name: str, sizes: Sequence[_Size], shift: float | None) -> NoiseFindings:
    parts = [(size.part * size.ranges[place][0], size.ranges[place][1]) for size in sizes]
    return NoiseFindings(
        name=name, part=sum(part for part, _ in parts), shift=shift, shares=mixed_shares(parts)
    )
