"""Overrides of the command line are read by the type of their setting, and wrong ones are named as typed."""

import pytest

from diffsynth_lite.config import load_config, section_types
from diffsynth_lite.config.peers import names_by_setting
from diffsynth_lite.errors import UserError

NUM_KEYS = len(section_types()["train"].model_fields)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=10", 10),
        ("train.max_grad_norm=null", None),
        ("train.use_gradient_checkpointing=no", False),
        ("logging.run_name=a=b: [c] #d", "a=b: [c] #d"),
        ("logging.run_name=[a, b]", "[a, b]"),
        ('logging.run_name="a"', '"a"'),
        ("validation.negative_prompt=", ""),
        ("validation.prompts=[a cat, 'a: dog', \"[x]\"]", ["a cat", "a: dog", "[x]"]),
        ("validation.prompts=[]", []),
        ("output.dir=runs/${data.path}", "runs/pictures"),
    ],
)
def test_an_override_is_read_by_the_type_of_its_setting(write, minimal, override, expected):
    section, key = override.partition("=")[0].split(".")
    config = load_config(write(minimal), [override]).config
    assert getattr(getattr(config, section), key) == expected


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("train.steps=ten", "got 'ten'; must be a whole number"),
        ("train.steps=", 'got ""; must be a whole number'),
        ("train.steps=[1]", "must be a whole number"),
        ("train.steps", "has no value; write section.key=value"),
        ("train=3", "train is a section"),
        ("train.=3", "train is a section"),
        ("=3", "unknown section"),
        ("", "unknown section"),
        ("steps=3", "'steps' belongs under train, as train.steps"),
        ("+train.steps=3", "'+' has no meaning"),
        ("~train.steps", "'~' has no meaning"),
        ("--train.steps=3", "'-' has no meaning"),
        ("trian.steps=3", "'steps' belongs under train, as train.steps"),
        ("trian.stps=3", "did you mean"),
        ("train.stps=3", "did you mean 'steps'?"),
        ("train.steps.x=3", "did you mean 'steps'?"),
        ("train.foo=3", f"unknown key; the {NUM_KEYS} keys of train are in docs/configuration.md"),
        ("logging.foo=3", "unknown key; logging has every_steps, trackers"),
        ("train.lr=1e-4", "is train.learning_rate here"),
        ("network-dim=8", "is lora.rank here"),
        ("train.num_frames=81", "is data.frame_counts here, a list; validation.num_frames is"),
        ("model.quantization=nf4", "is model.quantize here"),
        ("data.resolution=512", "is data.resolutions here"),
        ("train.optimizer_type=adamw8bit", "is train.optimizer here"),
        ("network.linear=16", "is lora.rank here"),
        ("sample.width=512", "sample is the section validation here"),
        ("validation.prompts[0]=a", "set the whole list, as validation.prompts=[...]"),
        ("validation.prompts=a cat", "must be a list of texts"),
        ("validation.prompts=[a, b", "write a list as '[a, b]'"),
        ("validation.prompts=[a] b", "write a list as '[a, b]'"),
        ("validation.prompts=[*a]", "write a list as '[a, b]'"),
        ("data.metadata=None", "write null"),
        ("data.path=\udcff", "half a character"),
        ("memory.policy=auto", "planned"),
        ("lora.dropout=2", "below 1"),
        ("objective.logit_std=2", "has no effect"),
    ],
)
def test_a_wrong_override_is_reported_as_typed(write, minimal, override, reason):
    with pytest.raises(UserError) as caught:
        load_config(write(minimal), [override])
    (line,) = str(caught.value).splitlines()
    shown = override.encode("ascii", "backslashreplace").decode()
    assert line.startswith(f"{shown} (command line): ")
    assert reason in line


def test_a_conflict_with_the_file_is_placed_at_the_first_of_the_two_that_was_set(write, minimal):
    path = write(f"train:\n  micro_batch_size: 3\n{minimal}")
    with pytest.raises(UserError) as caught:
        load_config(path, ["train.global_batch_size=4"])
    assert str(caught.value).startswith(f"{path}:2 train.micro_batch_size: 3 must divide")


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (10, 9), (50, 49), (51, 50)])
def test_a_warm_up_leaves_a_step_at_the_highest_rate_and_says_when_it_is_shortened(
    write, minimal, steps, warmup
):
    path = write(f"train:\n  warmup_steps: 50\n{minimal}")
    loaded = load_config(path, [f"train.steps={steps}"])
    assert (loaded.config.train.warmup_in_run, loaded.config.train.warmup_steps) == (warmup, 50)
    told = f"{path}:2 train.warmup_steps: 50 is shortened to {warmup}, as train.steps is {steps}"
    assert loaded.warnings == ((told,) if warmup < 50 else ())


def test_a_wrong_value_is_reported_though_a_later_one_replaces_it(write, minimal):
    path = write(f"train:\n  steps: wide\n  warmup_steps: ${{train.steps}}\n{minimal}")
    with pytest.raises(UserError) as caught:
        load_config(path, ["train.steps=5", "train.warmup_steps=1", "train.seed=a", "train.seed=1"])
    assert [line.split(";")[0] for line in str(caught.value).splitlines()] == [
        f"{path}:2 train.steps: got 'wide'",
        "train.seed=a (command line): got 'a'",
    ]


def test_the_names_of_other_trainers_stand_for_settings_there_are_and_are_none_themselves():
    keys = {section: set(model.model_fields) for section, model in section_types().items()}
    ours = [setting.split(".") for setting in names_by_setting()]
    assert [key for section, key in ours if key not in keys[section]] == []
    theirs = [name for names in names_by_setting().values() for name in names]
    assert len(theirs) == len(set(theirs))
    assert set(theirs).isdisjoint(set(keys).union(*keys.values()))
