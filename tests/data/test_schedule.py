"""The schedule by its properties: what a pass holds, where each block stands, what changes nothing."""

from collections import Counter
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import diffsynth_lite.data.schedule as schedule_module
from diffsynth_lite.data.item_table import ItemGroup
from diffsynth_lite.data.schedule import BatchLayout, SampleSchedule, micro_batch_sizes
from diffsynth_lite.errors import UserError

PINNED_SINGLE = [2, 1, 0, 0, 1, 3, 2, 3, 1, 2, 0, 3]
PINNED_BUCKETS = [
    (1, [5]),
    (0, [0, 2]),
    (1, [5]),
    (0, [1, 2]),
    (1, [4]),
    (1, [6]),
    (1, [3]),
    (1, [6]),
    (2, [7, 7, 7]),
    (1, [6]),
    (1, [4]),
    (1, [3]),
]
rates = st.fractions(min_value=Fraction(1, 4), max_value=3, max_denominator=5)


@st.composite
def plans(draw, *, passes=rates):
    """Columns of a data set, passes of its sources, sizes of its buckets."""
    num_buckets, num_sources = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    pairs = st.tuples(st.integers(0, num_buckets - 1), st.integers(0, num_sources - 1))
    rows = draw(st.lists(pairs, min_size=1, max_size=25))
    return {
        "bucket_index": [bucket for bucket, _ in rows],
        "source_index": [source for _, source in rows],
        "passes": [draw(passes) for _ in range(num_sources)],
        "sizes": draw(st.lists(st.integers(1, 4), min_size=num_buckets, max_size=num_buckets)),
        "seed": draw(st.integers(0, 2**70)),
    }


def schedule_of(*, bucket_index, source_index, **options):
    """The schedule of items whose groups are found one by one."""
    pairs = list(zip(bucket_index, source_index, strict=True))
    members = {pair: [item for item, other in enumerate(pairs) if other == pair] for pair in sorted(pairs)}
    groups = [
        ItemGroup(bucket=bucket, source=source, count=len(items), members=partial(np.array, items))
        for (bucket, source), items in members.items()
    ]
    return SampleSchedule(groups, **options)


def single(num_items, *, size=1, repeats=1, seed=0):
    none = [0] * num_items
    return schedule_of(
        bucket_index=none, source_index=none, passes=[Fraction(repeats)], sizes=[size], seed=seed
    )


def bucket_of(plan, block):
    [bucket] = {plan["bucket_index"][item] for item in block.values()}
    return bucket


def taken(schedule, blocks):
    return [item for index in blocks for item in schedule.block(index).values()]


@given(plan=plans(passes=st.integers(1, 3).map(Fraction)), number=st.integers(0, 20))
def test_each_pass_of_a_bucket_holds_each_item_exactly_as_often_as_it_is_repeated(plan, number):
    plan["sizes"] = [1] * len(plan["sizes"])  # so that a cycle is a pass
    schedule = schedule_of(**plan)
    length = int(schedule.samples_per_pass)
    seen = Counter(taken(schedule, range(number * length, (number + 1) * length)))
    assert seen == {item: int(plan["passes"][source]) for item, source in enumerate(plan["source_index"])}


@given(plan=plans(), num_blocks=st.integers(1, 150))
def test_over_time_each_item_is_seen_as_often_as_the_others_of_its_source_and_bucket(plan, num_blocks):
    schedule = schedule_of(**plan)
    seen = Counter(taken(schedule, range(num_blocks)))
    samples = Counter()
    for block in map(schedule.block, range(num_blocks)):
        samples[bucket_of(plan, block)] += len(block)
    groups = list(zip(plan["bucket_index"], plan["source_index"], strict=True))
    mean = Counter()
    for bucket, source in groups:
        mean[bucket] += plan["passes"][source]
    for item, (bucket, source) in enumerate(groups):
        # Passes begun, and within the last one any number up to the samples of one more pass.
        passes = samples[bucket] / mean[bucket]
        rate = plan["passes"][source]
        assert (passes - 2) * rate - 2 <= seen[item] <= (passes + 2) * rate + 2


@given(plan=plans(), cycles=st.integers(1, 40))
def test_buckets_have_their_exact_part_of_the_samples_after_any_number_of_cycles(plan, cycles):
    schedule = schedule_of(**plan)
    mean = [Fraction(0)] * len(plan["sizes"])
    for bucket, source in zip(plan["bucket_index"], plan["source_index"], strict=True):
        mean[bucket] += plan["passes"][source]
    expected = [int(cycles * rate / size) for rate, size in zip(mean, plan["sizes"], strict=True)]
    seen = Counter(bucket_of(plan, schedule.block(index)) for index in range(sum(expected)))
    assert [seen[bucket] for bucket in range(len(expected))] == expected


@given(plan=plans())
def test_blocks_are_of_one_bucket_and_their_positions_have_no_gaps(plan):
    schedule = schedule_of(**plan)
    blocks = [schedule.block(index) for index in range(60)]
    assert [len(block) for block in blocks] == [plan["sizes"][bucket_of(plan, block)] for block in blocks]
    positions = [position for block in blocks for position in block]
    assert positions == list(range(len(positions)))


@given(plan=plans(), asked=st.lists(st.integers(0, 10**12), max_size=20))
def test_a_block_depends_on_its_number_and_not_on_what_was_asked_before(plan, asked):
    used = schedule_of(**plan)
    for index in asked:
        fresh = schedule_of(**plan)
        assert list(used.block(index).items()) == list(fresh.block(index).items())


@given(num_items=st.integers(1, 12), repeats=st.integers(1, 3), size=st.integers(1, 7))
def test_one_bucket_gives_the_same_stream_whatever_the_size_of_its_blocks(num_items, repeats, size):
    ones = taken(single(num_items, repeats=repeats), range(12 * size))
    assert taken(single(num_items, repeats=repeats, size=size), range(12)) == ones


def test_a_weight_below_one_takes_turns_through_all_items_of_its_source():
    source_index = [0] * 4 + [1] * 2
    schedule = schedule_of(
        bucket_index=[0] * 6,
        source_index=source_index,
        passes=[Fraction(1, 4), Fraction(1)],
        sizes=[1],
        seed=3,
    )
    passes = [taken(schedule, range(3 * number, 3 * number + 3)) for number in range(8)]
    assert all(sum(source_index[item] == 0 for item in items) == 1 for items in passes)
    assert sorted(item for items in passes[:4] for item in items if item < 4) == [0, 1, 2, 3]


def test_the_order_changes_with_the_pass_and_with_the_seed():
    orders = {
        tuple(taken(single(50, seed=seed), range(first, first + 50))) for seed in (0, 1) for first in (0, 50)
    }
    assert len(orders) == 4


def test_the_order_is_pinned():
    assert taken(single(4, repeats=2), range(12)) == PINNED_SINGLE
    plan = {
        "bucket_index": [0, 0, 0, 1, 1, 1, 1, 2],
        "source_index": [0, 1, 1, 0, 0, 1, 1, 1],
        "passes": [Fraction(1), Fraction(3, 2)],
        "sizes": [2, 1, 3],
        "seed": 0,
    }
    blocks = list(map(schedule_of(**plan).block, range(12)))
    assert [(bucket_of(plan, block), list(block.values())) for block in blocks] == PINNED_BUCKETS


def test_one_permutation_is_drawn_in_a_pass(monkeypatch):
    drawn = []
    original = schedule_module.permutation
    monkeypatch.setattr(
        schedule_module, "permutation", lambda *given: drawn.append(given[1:3]) or original(*given)
    )
    taken(single(10), range(30))
    assert sorted(drawn) == [
        (purpose, number) for purpose in ("bucket-0:group-0", "bucket-0:pass", "cycle") for number in range(3)
    ]


@pytest.mark.parametrize(
    ("num_items", "changes"),
    [(0, {}), (1, {"repeats": 0}), (1, {"size": 0}), (1, {"repeats": Fraction(-1, 2)})],
)
def test_an_empty_schedule_is_refused(num_items, changes):
    with pytest.raises(UserError, match=r"no items|at least 1"):
        single(num_items, **changes)


def test_a_token_budget_gives_each_bucket_as_many_samples_as_fit_and_at_least_one():
    sizes = micro_batch_sizes([100, 250, 300, 999], micro_batch_size=2, micro_batch_tokens=500)
    assert sizes == [5, 2, 1, 1]
    assert micro_batch_sizes([100, 250], micro_batch_size=2, micro_batch_tokens=None) == [2, 2]


def layouts(num_processes, *, micro_batch_size, global_batch_size):
    return [
        BatchLayout(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            num_processes=num_processes,
            process_index=index,
        )
        for index in range(num_processes)
    ]


@given(blocks=st.integers(1, 3), num_processes=st.sampled_from([1, 2, 4]), step=st.integers(0, 1000))
def test_any_number_of_processes_takes_the_same_blocks_in_a_step(blocks, num_processes, step):
    ranks = layouts(num_processes, micro_batch_size=3, global_batch_size=12 * blocks)
    expected = range(step * 4 * blocks, (step + 1) * 4 * blocks)
    assert {rank.blocks_of_step(step) for rank in ranks} == {expected}
    assert ranks[0].num_micro_steps * num_processes == len(expected)


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "num_processes", "advice"),
    [
        (8, 3, 2, "= 6: micro_batch_size 2 would do; with global_batch_size 6 or 12 it would be another run"),
        (2, 4, 1, "= 4: micro_batch_size 2 would do; with global_batch_size 4 it"),
        (9, 2, 4, "= 8: 3 processes with micro_batch_size 1 would do"),
        (4, 1, 8, "= 8: 4 processes would do"),
    ],
)
def test_a_global_batch_that_is_not_whole_says_what_would_do(
    global_batch_size, micro_batch_size, num_processes, advice
):
    with pytest.raises(
        UserError, match=f"global_batch_size {global_batch_size} is not a multiple .*{advice}"
    ):
        layouts(num_processes, micro_batch_size=micro_batch_size, global_batch_size=global_batch_size)


@pytest.mark.parametrize(("global_batch_size", "micro_batch_size"), [(0, 1), (1, 0), (-4, 1)])
def test_batch_sizes_below_one_are_refused(global_batch_size, micro_batch_size):
    with pytest.raises(UserError, match="at least 1"):
        layouts(1, micro_batch_size=micro_batch_size, global_batch_size=global_batch_size)
