"""The section ``objective.slider``: what it needs, what does not go with it, and what it warns of."""

import pytest

from diffsynth_lite.config import load_config
from diffsynth_lite.errors import UserError

TRIPLE = "{neutral: a cat, positive: an old cat, negative: a kitten}"
TWO = f"[{TRIPLE}, {{neutral: a dog, positive: an old dog, negative: a puppy}}]"
SLIDER = f"objective.slider={{triples: {TWO}, anchors: [a car]}}"


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "slider.yaml"
    file.write_text("model: {family: qwen_image, path: model}\noutput: {dir: run}\n")
    return file


def slider_of(values):
    return f"objective.slider={{triples: {TWO}, anchors: [a car], {values}}}"


def test_a_slider_needs_no_data_and_all_else_does(config):
    loaded = load_config(config, [SLIDER]).config
    assert loaded.generates_data
    assert loaded.data.sources_by_key == {}
    assert loaded.objective.slider.kept == ("", "a car")
    assert not load_config(config, [SLIDER, "data.path=images"]).config.generates_data
    with pytest.raises(UserError, match=r"data\.path: is required; name a folder \(data\.path\)"):
        load_config(config)
    with pytest.raises(
        UserError, match=r"^--preset style: is for training data, and objective\.slider learns"
    ):
        load_config(config, [SLIDER], presets=["style"])
    with pytest.raises(UserError, match=r"data\.path: is required"):
        load_config(config, ["objective.slider=null"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["objective.slider={triples: []}"],
            r"triples: got \[\]; must be a list of sections, written .*, at least one",
        ),
        (["objective.slider={}"], r"objective\.slider\.triples: is required"),
        (["objective.slider=old"], "got 'old'; must be a section of its own"),
        (
            ["objective.slider={triples: [{neutral: a, positive: b}]}"],
            r"objective\.slider\.triples\[0\]\.negative: is required; must be text, not empty",
        ),
        (
            ["objective.slider={triples: [{neutral: a, positive: b, negative: ' '}]}"],
            r"triples\[0\]\.negative: got \" \"; must be text, not empty",
        ),
        (
            ["objective.slider={triples: [{neutral: a b, positive: 'a  b', negative: c}]}"],
            "'a b': neutral, positive and negative must be three different prompts",
        ),
        ([slider_of("anchor_weight: 0")], "anchors: have no effect with anchor_weight 0"),
        ([slider_of("etas: 1")], "etas: unknown key; did you mean .eta.?"),
        (
            [SLIDER, "objective.slider.etas=1"],
            r"^objective\.slider\.etas=1 \(.*: unknown key; did you mean 'eta'",
        ),
        (["objective.slider.eta=1"], r"slider\.triples: is required; must be a list of sections"),
        (
            [SLIDER, "objective.slider.triples[0].neutral=x"],
            r"set the whole list, as objective\.slider\.triples=",
        ),
        ([SLIDER, "objective.guidance_target=3"], r"guidance_target=.*: does not go with objective"),
        ([SLIDER, "validation.data=held"], r"validation\.data=.*: does not go with objective"),
        ([SLIDER, "data.path=a", "data.mask_dir=b"], r"data\.mask_dir=.*: does not go with objective"),
        (
            [SLIDER, "data.sources=[{path: a}, {path: b, preserve: true}]"],
            r"data\.sources=.*: does not go with objective",
        ),
        ([SLIDER, "data.input_dirs=[a]"], r"data\.input_dirs=.*: does not go with objective"),
        ([SLIDER, "data.cache=false"], r"data\.cache=.*: does not go with objective"),
        ([SLIDER, "memory.shard_base=all"], r"memory\.shard_base=.*: does not go with objective"),
    ],
)
def test_what_makes_no_sense_is_refused(config, overrides, message):
    with pytest.raises(UserError, match=message):
        load_config(config, overrides)


def test_settings_come_on_top_of_those_of_the_section(config):
    (config.parent / "mine.yaml").write_text(
        f"extends: slider.yaml\nobjective: {{slider: {{triples: {TWO}}}}}\n"
    )
    config.write_text(
        f"{config.read_text()}objective: {{slider: {{triples: [{TRIPLE}], anchors: [a car], eta: 0.5}}}}\n"
    )
    slider = load_config(config.parent / "mine.yaml", ["objective.slider.eta=0.7"]).config.objective.slider
    assert (len(slider.triples), slider.anchors, slider.eta) == (2, ["a car"], 0.7)
    config.write_text(config.read_text().replace("anchors: [a car], ", ""))
    (line,) = load_config(config, [f"objective.slider.triples={TWO}", "validation.guidance_scale=2"]).warnings
    assert line.startswith(
        f"{config}:{len(config.read_text().splitlines())} objective.slider.anchors: is empty"
    )


@pytest.mark.parametrize(
    ("override", "warned"),
    [
        (SLIDER, []),
        (f"objective.slider={{triples: [{TRIPLE}], anchors: [a car]}}", ["triples: is one"]),
        ("objective.slider.anchors=[]", ["is empty, so that more"]),
        (slider_of("eta: 1"), []),
        ("objective.slider.eta=2", ["2 breaks images"]),
    ],
)
def test_what_makes_a_slider_worse_is_warned_of(config, override, warned):
    warnings = load_config(config, [SLIDER, override, "validation.guidance_scale=2"]).warnings
    assert [words for words in warned for line in warnings if words in line] == warned
    assert len(warnings) == len(warned)
