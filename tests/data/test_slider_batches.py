"""The triples and anchors of a slider are functions of the seed and the position of a sample."""

from fractions import Fraction
from itertools import islice

import pytest
import torch

from diffsynth_lite.data.batches import Anchor, Batch, BatchStream
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.item_table import ItemRow, ItemTable
from diffsynth_lite.data.schedule import BatchLayout, SampleSchedule


def key(number: int) -> str:
    return f"{number:02}" + "0" * 62


@pytest.fixture
def cache(tmp_path) -> TensorCache:
    """Entries 0 to 3 are latents, 10 to 21 prompts; each holds its number."""
    cache = TensorCache(tmp_path)
    for number in (*range(4), *range(10, 22)):
        shape = (2, 3, 3) if number < 10 else (1, 4)
        cache.write(key(number), {"latents" if number < 10 else "embeds": torch.full(shape, float(number))})
    return cache


def batches(cache: TensorCache, micro_batch_size: int = 4, **changes) -> list[Batch]:
    """Those of two steps of 8, of two images with two triples each."""
    rows = [
        ItemRow(
            name=str(place),
            bucket=Bucket(width=24, height=24),
            source=0,
            media_key=key(place),
            caption_keys=tuple(map(key, range(10, 16))),
        )
        for place in range(2)
    ]
    items = ItemTable.build(rows)
    layout = BatchLayout(
        global_batch_size=8, micro_batch_size=micro_batch_size, num_processes=1, process_index=0
    )
    schedule = SampleSchedule(items.groups, passes=[Fraction(1)], sizes=[micro_batch_size], seed=5)
    given = {"anchors": [Anchor(caption_key=key(20), media_keys=(key(2), key(3)))], "seed": 5} | changes
    stream = BatchStream(items, cache, schedule, layout, num_workers=0, start_step=0, **given)
    return [batch for step in islice(stream, 2) for batch in step]


def numbers(conditioning: list[dict[str, torch.Tensor]]) -> list[float]:
    return [one["embeds"][0, 0].item() for one in conditioning]


def test_the_prompts_of_a_sample_are_those_of_one_triple(cache: TensorCache) -> None:
    seen = set()
    for batch in batches(cache):
        prompts = (batch.conditioning, batch.slider.positive, batch.slider.negative)
        triples = set(zip(*map(numbers, prompts), strict=True))
        assert triples <= {(10, 11, 12), (13, 14, 15)}
        seen |= triples
    assert len(seen) == 2


@pytest.mark.parametrize(("media", "shown"), [((key(2), key(3)), {2.0, 3.0}), ((), {0.0, 1.0})])
def test_every_second_sample_brings_an_anchor_on_an_image_of_its_own_where_there_are_some(
    cache: TensorCache, media: tuple[str, ...], shown: set[float]
) -> None:
    seen = set()
    for batch in batches(cache, anchors=[Anchor(caption_key=key(20), media_keys=media)]):
        assert numbers(batch.slider.kept) == [20, 20]
        seen |= set(batch.slider.latents[:, 0, 0, 0].tolist())
        assert not torch.equal(batch.slider.noise, batch.noise[::2])
    assert seen == shown


def test_nothing_depends_on_how_a_step_is_split(cache: TensorCache) -> None:
    found = []
    for size in (4, 1):
        made = [batch.slider for batch in batches(cache, size)]
        kept = [torch.cat([getattr(one, name) for one in made]) for name in ("latents", "noise", "uniform")]
        found.append((kept, [number for one in made for number in numbers(one.positive)]))
    assert all(torch.equal(*pair) for pair in zip(found[0][0], found[1][0], strict=True))
    assert found[0][1] == found[1][1]
    assert not batches(cache, anchors=[])[0].slider.kept
