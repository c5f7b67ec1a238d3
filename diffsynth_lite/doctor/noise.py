"""This file tells which noise levels the steps of a run train, from what the run draws them with."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
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
    levels: NoiseLevels, family: ModelFamily, samples: Mapping[Bucket, float]
) -> list[NoiseFindings]:
    """All steps, then those of each size where sizes differ in their shift, then those of each expert.

    Args:
        levels: of the run.
        samples: of each bucket in a pass over the data, at least one above 0.

    Raises:
        UserError: as :meth:`NoiseLevels.shares` does.
    """
    sizes = _sizes(levels, family, samples)
    shift = sizes[0].shift if len({size.shift for size in sizes}) == 1 else None
    of_all = mixed_shares([(size.part * part, shares) for size in sizes for part, shares in size.ranges])
    rows = [NoiseFindings(name="all steps", part=1.0, shift=shift, shares=of_all)]
    if shift is None:
        rows += [
            NoiseFindings(name=size.name, part=size.part, shift=size.shift, shares=mixed_shares(size.ranges))
            for size in sizes
        ]
    if len(levels.ranges) > 1:
        rows += [_of_expert(place, name, sizes, shift) for place, name in enumerate(family.trained)]
    return rows


def _sizes(levels: NoiseLevels, family: ModelFamily, samples: Mapping[Bucket, float]) -> list[_Size]:
    """The sizes, the one with most steps first."""
    counts: dict[Bucket, float] = defaultdict(float)
    for bucket, number in samples.items():
        counts[replace(bucket, inputs=())] += number
    total = sum(counts.values())
    known: dict[float, list[tuple[float, LevelShares]]] = {}
    sizes = []
    for bucket, number in sorted(counts.items(), key=lambda entry: -entry[1]):
        shape = family.latents_shape(bucket.width, bucket.height, bucket.num_pictures)
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
