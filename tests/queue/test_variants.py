"""Variants of a config: how values are split, and what their runs are called."""

import pytest

from diffsynth_lite.errors import UserError
from diffsynth_lite.queue.variants import Variant, names, variants


def named(*settings: str, base: str = "x") -> list[str]:
    return names(base, variants(settings))


def test_each_combination_is_a_run_that_says_what_differs() -> None:
    settings = ("lora.rank=4,8,16", "train.learning_rate=1e-4,2e-4", "train.steps=5")
    assert named(*settings) == [
        *("x-rank4-lr1e-4", "x-rank4-lr2e-4", "x-rank8-lr1e-4"),
        *("x-rank8-lr2e-4", "x-rank16-lr1e-4", "x-rank16-lr2e-4"),
    ]
    assert variants(settings)[1].settings == ("lora.rank=4", "train.learning_rate=2e-4", "train.steps=5")


def test_settings_without_several_values_are_one_run_as_they_are() -> None:
    settings = ("lora.rank=4", "data.trigger='ohwx'", "nonsense", "a.b=c,d", "data.resolutions=[512, 768]")
    assert variants(settings) == [Variant(settings, {})]
    assert named(*settings) == ["x"]
    assert variants(()) == [Variant((), {})]


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("lora.rank=4, 8,4", ["4", "8"]),
        ("objective.slider.eta=0.5,1", ["0.5", "1"]),
        ("data.resolutions=[512,768],[1024]", ["[512,768]", "[1024]"]),
        ('validation.prompts=["a ], b", c],[]', ['["a ], b", c]', "[]"]),
        ("""data.trigger="a, b",c""", ["a, b", "c"]),
        ("""data.trigger='a, b'""", ["a, b"]),
        ("data.trigger=it's,me", ["it's", "me"]),
        ("data.trigger=a,", ["a", ""]),
        ("train.optimizer_options={a: 1, b: 2}", ["{a: 1, b: 2}"]),
        ("train.lr_scheduler=cosine,linear", ["cosine", "linear"]),
    ],
)
def test_values_are_split_at_commas_outside_of_quotes_and_brackets(setting: str, values: list[str]) -> None:
    key = setting.partition("=")[0]
    assert [variant.settings for variant in variants([setting])] == [(f"{key}={value}",) for value in values]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["data.trigger=a, b"], "put quotes around a text that has one"),
        (["data.trigger='a, b"], "has a quote that is not closed"),
        (["data.resolutions=[1,2"], "has a bracket that is not closed"),
        (["output.dir=runs/a,runs/b"], "output.dir: each run gets a folder by what differs"),
        (
            [f"lora.rank={','.join(map(str, range(1, 26)))}", "train.steps=1,2,3,4,5"],
            "25 x 5 values are 125 runs, and 100 are the most at once",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(settings: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        variants(settings)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["data.resolutions=[512, 768],[1024]"], ["x-resolutions512-768", "x-resolutions1024"]),
        (["data.trigger=,a/../b"], ["x-triggerempty", "x-triggera-..-b"]),
        (["lora.rank=4,8", "train.adam_beta1=0.8,0.9"][1:], ["x-adam_beta1-0.8", "x-adam_beta1-0.9"]),
        (["train.global_batch_size=1,2"], ["x-batch1", "x-batch2"]),
        (
            ["data.path=a,b", "model.path=c,d"],
            [f"x-data-path{one}-model-path{two}" for one in "ab" for two in "cd"],
        ),
    ],
)
def test_names_are_safe_and_keep_the_value_readable(settings: list[str], expected: list[str]) -> None:
    assert named(*settings) == expected


def test_names_are_unique_and_stable_where_values_look_alike() -> None:
    found = named("data.trigger=a!,a?,A,b")
    assert len({name.casefold() for name in found}) == 4
    assert found[3] == "x-triggerb"
    assert found == named("data.trigger=a!,a?,A,b")


def test_names_are_short_enough_for_every_file_system() -> None:
    found = named(f"data.trigger={'a' * 300},{'a' * 301}", "lora.rank=1,2", base="ö" * 100)
    assert all(len(name.encode()) <= 200 for name in found)
    assert len(set(found)) == 4
