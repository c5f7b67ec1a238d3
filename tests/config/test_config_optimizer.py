"""The optimizer and its options: how they are read, and what does not go together."""

import pytest

from diffsynth_lite.config import load_config
from diffsynth_lite.errors import UserError


def train_of(write, minimal, *overrides):
    return load_config(write(minimal), overrides).config.train


def test_options_are_what_they_look_like(write, minimal):
    options = (
        "{betas: [0.9, 0.99], eps: 1e-6, steps: 3, amsgrad: true, foreach: null, rule: original, 'y': 'no'}"
    )
    expected = {
        "betas": [0.9, 0.99],
        "eps": 1e-6,
        "steps": 3,
        "amsgrad": True,
        "foreach": None,
        "rule": "original",
        "y": "no",
    }
    text = minimal + f"train: {{optimizer: torch.optim.RAdam, optimizer_options: {options}}}\n"
    assert load_config(write(text)).config.train.optimizer_options == expected
    given = train_of(write, minimal, "train.optimizer=muon", f"train.optimizer_options={options}")
    assert given.optimizer_options == expected
    assert train_of(write, minimal).optimizer_options == {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.optimizer=AdamW8bit"], "did you mean 'adamw8bit'?"),
        (["train.optimizer=my optimizer"], "must be adamw, adamw8bit, muon"),
        (
            ["train.optimizer_options=fast"],
            "got 'fast'; must be names and their values, written {name: value",
        ),
        (["train.optimizer_options={a: {b: 1}}"], "got a 'key: value' block; must be names and their values"),
        (["train.optimizer_options={a: 1, a: 2}"], "has a twice; keep one of them"),
        (["train.optimizer_options={a: '${train.steps}'}"], "no value can be a reference"),
        (["train.optimizer_options={lr: 1}"], "lr is train.learning_rate here; set that"),
        (["train.optimizer_options={betas: [0.9]}"], "betas is train.adam_beta1 and train.adam_beta2 here"),
        (
            ["train.optimizer=prodigy"],
            "learning_rate 0.0001: prodigy multiplies the learning rate",
        ),
        (
            ["train.optimizer=schedule_free", "train.lr_scheduler=cosine"],
            "cosine: schedule_free averages weights in place of a schedule",
        ),
        (
            ["train.optimizer=schedule_free", "train.ema_decay=0.99"],
            "0.99: what schedule_free trains is an average already",
        ),
    ],
)
def test_what_an_optimizer_cannot_do_is_refused(write, minimal, overrides, message):
    with pytest.raises(UserError) as caught:
        load_config(write(minimal), overrides)
    (line,) = str(caught.value).splitlines()
    assert message in line


def test_settings_of_adam_have_no_effect_on_others(write, minimal):
    path = write(minimal + "train: {adam_beta1: 0.8, optimizer: muon}\n")
    (warning,) = load_config(path).warnings
    assert "train.adam_beta1: has no effect with train.optimizer muon" in warning
    assert load_config(path, ["train.optimizer=adamw8bit"]).warnings == ()
