from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import diffsynth_lite.data.schedule as schedule_module
from diffsynth_lite.data.schedule import BatchLayout, SampleSchedule
from diffsynth_lite.errors import UserError

sizes = st.integers(1, 20)


@given(num_items=sizes, repeats=st.integers(1, 4), seed=st.integers(0, 2**70), epoch=st.integers(0, 1000))
def test_each_pass_holds_each_item_exactly_as_often_as_it_is_repeated(num_items, repeats, seed, epoch):
    schedule = SampleSchedule(num_items, repeats, seed)
    length = num_items * repeats
    positions = range(epoch * length, (epoch + 1) * length)
    assert {schedule.epoch(position) for position in positions} == {epoch}
    assert Counter(schedule.item(position) for position in positions) == dict.fromkeys(
        range(num_items), repeats
    )


@given(num_items=sizes, repeats=st.integers(1, 4), positions=st.lists(st.integers(0, 500), max_size=20))
def test_an_item_depends_on_the_position_and_not_on_what_was_asked_before(num_items, repeats, positions):
    used = SampleSchedule(num_items, repeats, seed=1)
    for position in positions:
        assert used.item(position) == SampleSchedule(num_items, repeats, seed=1).item(position)


def test_the_order_changes_with_the_pass_and_with_the_seed():
    def order(seed, epoch):
        schedule = SampleSchedule(50, 1, seed)
        return [schedule.item(position) for position in range(epoch * 50, (epoch + 1) * 50)]

    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1, 2)}) == 6


def test_the_order_is_pinned():
    schedule = SampleSchedule(4, 2, seed=0)
    assert [schedule.item(position) for position in range(12)] == [1, 0, 1, 3, 2, 3, 0, 2, 3, 3, 1, 2]


def test_one_permutation_is_drawn_in_a_pass(monkeypatch):
    drawn = []

    def count(*arguments):
        drawn.append(arguments)
        return original(*arguments)

    original = schedule_module.permutation
    monkeypatch.setattr(schedule_module, "permutation", count)
    schedule = SampleSchedule(10, 2, seed=0)
    for position in range(60):
        schedule.item(position)
    assert [epoch for _, _, epoch, _ in drawn] == [0, 1, 2]


@pytest.mark.parametrize(("num_items", "repeats"), [(0, 1), (1, 0)])
def test_an_empty_schedule_is_refused(num_items, repeats):
    with pytest.raises(UserError, match="at least 1"):
        SampleSchedule(num_items, repeats, seed=0)


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


@given(
    micro_batch_size=st.integers(1, 4),
    num_blocks=st.integers(1, 3).map(lambda factor: 4 * factor),
    num_processes=st.sampled_from([1, 2, 4]),
    step=st.integers(0, 1000),
)
def test_any_number_of_processes_shares_out_the_same_blocks_of_a_step(
    micro_batch_size, num_blocks, num_processes, step
):
    global_batch_size = micro_batch_size * num_blocks
    ranks = layouts(num_processes, micro_batch_size=micro_batch_size, global_batch_size=global_batch_size)
    blocks = [
        list(rank.micro_batch(step, micro_step))
        for micro_step in range(ranks[0].num_micro_steps)
        for rank in ranks
    ]
    assert all(len(block) == micro_batch_size for block in blocks)
    # In this order, micro-step by micro-step over the ranks, the blocks are those of one process.
    taken = [position for block in blocks for position in block]
    assert taken == list(range(step * global_batch_size, (step + 1) * global_batch_size))
    assert taken == list(ranks[0].positions_of_step(step))


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "num_processes", "advice"),
    [(8, 3, 2, "6 or 12 would do"), (2, 4, 1, "= 4: 4 would do"), (9, 2, 4, "8 or 16 would do")],
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
