"""The section data: one source or a list of them, the ways to give sizes, and what is wrong with either."""

import pytest
from pydantic import ValidationError

from diffsynth_lite.config import SourceSettings, dump_config, load_config
from diffsynth_lite.errors import UserError

REST = "model: {family: qwen_image, path: some/model}\noutput: {dir: runs/one}\n"

TWO_SOURCES = """\
data:
  sources:
    - path: photos
      caption_columns: [short, long]
    - dataset: some/drawings
      split: train[:100]
      repeats: 3
      weight: 0.5
"""


def load_data(write, text, *overrides):
    return load_config(write(text + REST), overrides).config.data


@pytest.fixture
def error_lines(refusal, write):
    return lambda text, *overrides: refusal(write(text + REST), overrides)


def test_a_list_of_sources_is_typed_and_each_has_the_defaults(write):
    data = load_data(write, TWO_SOURCES)
    photos = SourceSettings(path="photos", caption_columns=["short", "long"])
    drawings = SourceSettings(dataset="some/drawings", split="train[:100]", repeats=3, weight=0.5)
    assert data.sources == [photos, drawings]
    assert data.sources_by_key == {"data.sources[0]": photos, "data.sources[1]": drawings}


def test_one_source_may_be_directly_under_data(write):
    data = load_data(write, "data: {path: photos, repeats: 2, trigger: ohwx, width: 64, height: 32}\n")
    assert data.sources_by_key == {"data": SourceSettings(path="photos", repeats=2, trigger="ohwx")}
    assert type(data.sources_by_key["data"]) is SourceSettings


# What stands below `data:`, from line 2 on, and each line of the error.
WRONG_SOURCES = {
    "unknown key": (
        ["sources:", "- path: a", "- path: b", "  repets: 2"],
        [":5 data.sources[1].repets: unknown key; did you mean 'repeats'?"],
    ),
    "key of data": (
        ["sources: [{path: a, width: 64}]"],
        [":2 data.sources[0].width: 'width' belongs under data or validation"],
    ),
    "nothing but what is preserved": (
        ["sources:", "- path: a", "  preserve: true", "- path: b", "  preserve: true"],
        [":4 data.sources[0].preserve: leaves nothing to learn; list a source to learn next to it"],
    ),
    "a folder that is preserved by itself": (
        ["path: a", "preserve: true"],
        [":3 data.preserve: leaves nothing to learn"],
    ),
    "one weight for all losses": (
        ["sources:", "- path: a", "  loss_weight: 2", "- path: b", "  loss_weight: 2"],
        [":4 data.sources[0].loss_weight: 2 for all that is learned has no effect on what counts more"],
    ),
    "a source twice with other weights": (
        ["sources:", "- path: a", "- {path: a, loss_weight: 2, weight: 3}"],
        [":4 data.sources[1].path: is data.sources[0] again"],
    ),
    "captions without a trigger": (
        ["sources:", "- path: a", "  captions: none"],
        [":4 data.sources[0].captions: none needs a trigger, which is then the caption of all items"],
    ),
    "wrong type": (
        ["sources:", "- path: a", "  repeats: many"],
        [":4 data.sources[0].repeats: got 'many'; must be a whole number, at least 1"],
    ),
    "out of range": (
        ["sources:", "- path: a", "- weight: 0", "  path: b"],
        [":4 data.sources[1].weight: got '0'; must be a number, at least 1e-06"],
    ),
    "written twice": (
        ["sources:", "- path: a", "  path: b"],
        [":4 data.sources[0].path: is there already, on line 3; keep one of them"],
    ),
    "several at once": (
        ["width: wide", "sources:", "- path:", "  repeats: 0", "- {path: b, caption_columns: text}", "- {}"],
        [
            ":2 data.width: got 'wide'",
            ":5 data.sources[0].repeats: got '0'; must be a whole number, at least 1",
            ":6 data.sources[1].caption_columns: got 'text'; must be a list of texts",
            ":7 data.sources[2].path: is required; name the folder of the data, or a dataset",
        ],
    ),
    "both kinds": (
        ["sources:", "- path: a", "  dataset: b"],
        [":4 data.sources[0].dataset: a source is either a folder (path) or a dataset; keep one"],
    ),
    "no list": (
        ["sources: {path: a}"],
        [":2 data.sources: got a 'key: value' block; must be a list of sections, written [{path: a}, {path"],
    ),
    "a list of texts": (["sources: [a, b]"], [":2 data.sources: got ['a', 'b']; must be a list of sections"]),
    "nothing": (["sources:"], [":2 data.sources: got nothing; must be a list of sections"]),
    "a reference": (
        ["sources: ${data.path}"],
        [":2 data.sources: got '${data.path}'; must be a list of sections"],
    ),
    "occurs too often": (
        ["sources: [{path: a, repeats: 200, weight: 100}]"],
        [":2 data.sources[0].weight: 100 times the repeats, 200, is more often than the 10000 times"],
    ),
    "next to one": (
        ["path: a", "sources: [{path: b}]", "repeats: 2"],
        [
            ":2 data.path: has no effect with data.sources; move it into the entries it is for, or, where "
            "an extended file sets it, undo that: data: {path: null}",
            ":4 data.repeats: has no effect with data.sources; move it into the entries it is for, or, "
            "where an extended file sets it, undo that: data: {repeats: 1}",
        ],
    ),
    "neither": (["width: 64", "height: 64"], [":1 data.path: is required; name a folder (data.path)"]),
    "an empty list": (["sources: []"], [":1 data.path: is required; name a folder (data.path)"]),
    "folder with a dataset's settings": (
        ["path: a", "split: test"],
        [":3 data.split: has no effect without dataset; remove it"],
    ),
    "dataset with a folder's settings": (
        ["dataset: a", "metadata: b.csv", "mask_dir: c"],
        [":3 data.metadata: has no effect without path", ":4 data.mask_dir: has no effect without path"],
    ),
    "columns and folders": (
        ["path: a", "mask_dir: b", "mask_column: c", "input_columns: [d]", "input_dirs: [e]"],
        [":3 data.mask_dir: mask_column sets the same; keep one", ":6 data.input_dirs: input_columns sets"],
    ),
    "a column twice": (
        ["path: a", "caption_columns: [b, b]"],
        [":3 data.caption_columns: got ['b', 'b']; has an entry twice"],
    ),
    "an old name": (
        ["path: a", "image_column: b", "caption_column: c"],
        [
            ":3 data.image_column: is data.media_column here",
            ":4 data.caption_column: is data.caption_columns here",
        ],
    ),
    "a variable that is not set": (
        ["sources:", "- path: ${oc.env:DIFFSYNTH_LITE_UNSET}"],
        [":3 data.sources[0].path: ${oc.env:DIFFSYNTH_LITE_UNSET}: Environment variable"],
    ),
    "part of a size": (["path: a", "width: 64"], [":3 data.width: needs data.height next to it"]),
    "two ways to give sizes": (
        ["path: a", "width: 64", "height: 64", "resolutions: [512]"],
        [":5 data.resolutions: data.width x height and data.resolutions exclude each other; keep one"],
    ),
    "three ways to give sizes": (
        ["path: a", "sizes: [64x64]", "height: 64", "width: 64", "resolutions: [512]"],
        [":6 data.resolutions: data.width x height and data.sizes and data.resolutions exclude each other"],
    ),
    "a size that is none": (
        ["path: a", "sizes: [64x]"],
        [":3 data.sizes: got ['64x']; must be a list of texts"],
    ),
    "buckets of one size": (
        ["path: a", "sizes: [64x64]", "bucket_step: 32"],
        [":4 data.bucket_step: has no effect with data.sizes, which gives the sizes; remove it"],
    ),
    "crops of one place": (
        ["path: a", "crops_per_item: 2"],
        [":3 data.crops_per_item: 2 crops would all be the same; set data.crop: random"],
    ),
    "clips of one place": (
        ["path: a", "clips_per_video: 3", "clip: center"],
        [":3 data.clips_per_video: 3 clips would all be the same; set data.clip: random or uniform"],
    ),
    "a colour that is none": (
        ["path: a", "background: '#fff'"],
        [':3 data.background: got "#fff"; must be text, such as "white" or "#c0c0c0"'],
    ),
}


@pytest.mark.parametrize("case", WRONG_SOURCES)
def test_wrong_data_are_reported_with_file_line_and_key(error_lines, write, case):
    lines, expected = WRONG_SOURCES[case]
    found = error_lines("data:\n" + "".join(f"  {line}\n" for line in lines))
    path = write("")
    assert len(found) == len(expected)
    for line, start in zip(found, expected, strict=True):
        assert line.startswith(f"{path}{start}")


def test_an_override_replaces_the_whole_list(write):
    data = load_data(write, TWO_SOURCES, "data.sources=[{path: a}, {path: b, repeats: 2}, {path: '[c]'}]")
    assert data.sources == [
        SourceSettings(path="a"),
        SourceSettings(path="b", repeats=2),
        SourceSettings(path="[c]"),
    ]
    assert load_data(write, TWO_SOURCES, "data.sources=[]", "data.path=a").path == "a"


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (
            "data.sources=[{path: a, repets: 2}]",
            " data.sources[0].repets: unknown key; did you mean 'repeats'?",
        ),
        ("data.sources=[{path: a, repeats: x}]", " data.sources[0].repeats: got 'x'; must be a whole number"),
        ("data.sources=[{repeats: 2}]", " data.sources[0].path: is required"),
        (
            "data.sources=[{path: a}, {path: a/, repeats: 2}]",
            " data.sources[1].path: is data.sources[0] again; keep one, and set its repeats or weight",
        ),
        ("data.sources=photos", ": got 'photos'; must be a list of sections"),
        ("data.sources=[{path: a]", ": not valid yaml"),
        ("data.sources[0].repeats=2", ": an entry cannot be set by itself; set the whole list"),
        ("data.path=photos", ": has no effect with data.sources"),
    ],
)
def test_a_wrong_override_of_a_list_of_sources_is_reported_as_typed(error_lines, override, reason):
    (line,) = error_lines(TWO_SOURCES, override)
    assert line.startswith(f"{override} (command line){reason}")


def test_references_in_a_source_are_resolved_and_kept_as_written(write, monkeypatch):
    monkeypatch.setenv("DIFFSYNTH_LITE_FOLDER", "swordfish")
    text = f"""\
data:
  num_workers: 3
  sources:
    - path: ${{oc.env:DIFFSYNTH_LITE_FOLDER}}/photos
      repeats: ${{data.num_workers}}
      caption_columns: ['${{oc.env:DIFFSYNTH_LITE_FOLDER}}', text]
{REST}"""
    loaded = load_config(write(text))
    (source,) = loaded.config.data.sources
    assert source == SourceSettings(path="swordfish/photos", repeats=3, caption_columns=["swordfish", "text"])
    assert "swordfish" not in loaded.resolved_yaml
    assert load_config(write(loaded.resolved_yaml)).config == loaded.config
    assert load_config(write(dump_config(loaded.config))).config == loaded.config


def test_a_value_that_a_source_refers_to_is_checked_and_not_shown(error_lines, monkeypatch):
    monkeypatch.setenv("DIFFSYNTH_LITE_SECRET", "swordfish")
    (line,) = error_lines("data:\n  sources:\n  - path: a\n    repeats: ${oc.env:DIFFSYNTH_LITE_SECRET}\n")
    assert ":4 data.sources[0].repeats: got the value of ${oc.env:DIFFSYNTH_LITE_SECRET}; must be" in line
    assert "swordfish" not in line


def test_a_reference_to_a_list_of_sections_is_refused(error_lines):
    (line,) = error_lines(f"{TWO_SOURCES}validation:\n  prompts: ${{data.sources}}\n")
    assert ":10 validation.prompts: ${data.sources}: is a list of sections; refer to" in line


@pytest.mark.parametrize("setting", ["validation: {data: b/}", "output: {dir: b/}"])
def test_no_source_may_be_the_folder_of_something_else(write, setting):
    text = f"model: {{family: a, path: b}}\ndata: {{sources: [{{path: a}}, {{path: b}}]}}\n{setting}\n"
    path = write(text if setting.startswith("output") else text + "output: {dir: runs/one}\n")
    with pytest.raises(UserError, match=rf":3 {setting.split(':')[0]}.* is data\.sources\[1\]\.path"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "given", "first"),
    [
        ("{path: a}", [], (1024, 1024)),
        ("{path: a, resolutions: [512, 768]}", [], (512, 512)),
        ("{path: a, width: 64, height: 32}", [(64, 32)], (64, 32)),
        ("{path: a, sizes: [96x64, 64x96]}", [(96, 64), (64, 96)], (96, 64)),
    ],
)
def test_sizes_are_given_in_one_of_three_ways(write, text, given, first):
    data = load_data(write, f"data: {text}\n")
    assert (data.given_sizes, data.first_size) == (given, first)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("tag_separator: ;, keep_tags: 1", ["data.tag_separator", "data.keep_tags"]),
        ("tag_separator: ;, keep_tags: 1, tag_shuffles: 2", []),
        ("max_bad_ratio: 0.5", ["data.max_bad_ratio"]),
        ("max_bad_ratio: 0.5, on_bad_item: skip", []),
    ],
)
def test_a_setting_of_the_data_without_effect_is_warned_of(write, text, settings):
    path = write(f"data: {{path: a, {text}}}\n{REST}")
    assert [warning.split(": ")[0] for warning in load_config(path).warnings] == [
        f"{path}:1 {name}" for name in settings
    ]


def test_previews_have_one_input_for_each_prompt(error_lines, write):
    text = "data: {path: a}\nvalidation:\n  prompts: [a, b]\n  inputs: [a.png]\n"
    (line,) = error_lines(text)
    assert ":4 validation.inputs: 1 for 2 validation.prompts; give one for each prompt" in line
    load_data(write, text, "validation.inputs=[a.png, a.png]")


def test_previews_lead_to_one_last_frame_for_each_prompt_and_start_from_an_image_then(error_lines, write):
    text = "data: {path: a}\nvalidation:\n  prompts: [a, b]\n  last_frames: [z.png]\n"
    count, start = error_lines(text)
    assert ":4 validation.last_frames: 1 for 2 validation.prompts; give one for each prompt" in count
    assert ":4 validation.last_frames: needs inputs" in start
    given = ("validation.inputs=[a.png, a.png]", "validation.last_frames=[z.png, z.png]")
    load_data(write, text, *given)


def test_data_made_in_python_are_checked_too():
    with pytest.raises(ValidationError, match="is required; name the folder"):
        SourceSettings()
