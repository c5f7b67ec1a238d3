"""Items are held out by the content of their files: a fixed share of each source, and never all of one."""

from pathlib import Path

import pytest

from diffsynth_lite.data.records import Record, Source
from diffsynth_lite.data.sources import FoundRecords
from diffsynth_lite.files import file_fingerprint
from diffsynth_lite.training.encoding.hold_out import hold_out


def records_of(folder: Path, contents: dict[str, str], **settings: object) -> FoundRecords:
    """Records of files that hold these texts; a folder in front of a name is the index of its source."""
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    records = [
        Record(
            name=name,
            source=int(name.partition("/")[0]),
            target=folder / name,
            captions=(name, "another"),
            random_masks=3,
        )
        for name in contents
    ]
    sources = [Source(path="a", repeats=3), Source(path="b"), Source(path="c", preserve=True)]
    return FoundRecords(sources=sources, records=records)


def divided(found: FoundRecords, ratio: float = 0.1, seed: int = 0) -> tuple[list[str], list[str]]:
    """Names of the training and of the held-out records."""
    trained, held_out = hold_out(found, ratio=ratio, seed=seed, content=file_fingerprint)
    return trained.names, held_out.names


def numbered(count: int, source: int = 0) -> dict[str, str]:
    return {f"{source}/{number}": f"{source} {number}" for number in range(count)}


def test_a_fixed_share_is_held_out_in_an_order_that_only_seed_and_content_decide(tmp_path: Path) -> None:
    found = records_of(tmp_path, numbered(30))
    trained, held_out = divided(found)
    assert held_out == ["0/13", "0/15", "0/27"]
    assert trained == [name for name in numbered(30) if name not in held_out]
    assert divided(found, seed=1)[1] == ["0/1", "0/20", "0/7"]
    moved = {f"0/z{99 - number}": f"0 {number}" for number in range(30)}
    assert divided(records_of(tmp_path, moved))[1] == ["0/z86", "0/z84", "0/z72"]
    # What is added takes the place of at most as many others.
    assert divided(records_of(tmp_path, numbered(40)))[1] == [*held_out, "0/24"]
    sixty = divided(records_of(tmp_path, numbered(60)))[1]
    assert sixty == ["0/54", "0/13", "0/15", "0/59", "0/27", "0/24"]


def test_a_held_out_item_has_one_caption_and_one_mask_and_occurs_once(tmp_path: Path) -> None:
    _, held_out = hold_out(records_of(tmp_path, numbered(4)), ratio=0.25, seed=0, content=file_fingerprint)
    assert [(one.captions, one.random_masks) for one in held_out.records] == [((held_out.names[0],), 1)]
    assert {source.passes for source in held_out.sources} == {1}


@pytest.mark.parametrize(
    ("contents", "num_held_out", "num_trained"),
    [
        # At least one of each source, and their items spread evenly over the list.
        (numbered(20) | numbered(3, source=1), 3, 20),
        (numbered(20) | numbered(20, source=2), 2, 38),
        # Those that another source has given count.
        ({f"{source}/{number}": str(number) for source in (0, 1) for number in range(20)}, 4, 36),
        # Never all of one, in whatever source the same file is.
        (numbered(1) | numbered(10, source=1), 1, 10),
        ({"0/a": "same", "0/b": "same", "0/c": "same"}, 0, 3),
        ({"0/a": "one", "0/b": "two", "1/a": "one"}, 1, 2),
        ({"0/a": "one", "0/b": "two", "1/a": "two"}, 1, 2),
        ({"0/a": "one", "0/b": "two", "2/a": "one", "2/b": "two"}, 1, 2),
        # Equal files stay together: both are held out, or both are trained on.
        (
            {
                f"{source}/{copy}{number}": f"{number}"
                for source in (0, 1)
                for copy in "ab"
                for number in (1, 2)
            },
            4,
            4,
        ),
    ],
)
def test_each_source_gives_some_and_keeps_some_and_equal_files_stay_together(
    tmp_path: Path, contents: dict[str, str], num_held_out: int, num_trained: int
) -> None:
    trained, held_out = divided(records_of(tmp_path, contents))
    assert (len(held_out), len(trained)) == (num_held_out, num_trained)
    assert {contents[name] for name in trained}.isdisjoint(contents[name] for name in held_out)
    assert not any(name.startswith("2/") for name in held_out)
    assert {name[0] for name in trained} == {name[0] for name in contents}


def test_the_items_of_each_source_are_spread_evenly_over_the_list(tmp_path: Path) -> None:
    _, held_out = divided(records_of(tmp_path, numbered(40) | numbered(20, source=1)))
    assert [name[0] for name in held_out] == ["0", "1", "0", "0", "1", "0"]


def test_what_cannot_be_read_is_not_held_out(tmp_path: Path) -> None:
    found = records_of(tmp_path, numbered(10))
    _, expected = divided(found)
    unread = {tmp_path / expected[0]}
    trained, held_out = hold_out(
        found, ratio=0.1, seed=0, content=lambda path: None if path in unread else file_fingerprint(path)
    )
    assert expected[0] in trained.names
    assert len(held_out.names) == 1
