"""What is kept of a plan: equal inputs have equal counts, and what cannot be read is counted again."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from test_memory_count import config_of

from diffsynth_lite.config import Config
from diffsynth_lite.config.settings import Settings
from diffsynth_lite.core.planning.counts import CountedStep, Segment
from diffsynth_lite.core.planning.meters import Work
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.training.checks import bind_family
from diffsynth_lite.training.planning import kept_counts
from diffsynth_lite.training.planning.inference_count import LoadedBytes
from diffsynth_lite.training.planning.kept_counts import KeptCounts
from diffsynth_lite.training.planning.phases import READ, PhaseCounter
from diffsynth_lite.training.planning.subject import (
    counter_of,
    step_settings,
    with_changes,
)

BEFORE = Segment(change=1, extra=2, host_change=0, work=Work(3, 4, 5))
RELEASE = Segment(change=-1, extra=0, host_change=6, work=Work())
STEP = CountedStep((("before", BEFORE), (("release", None), RELEASE)), lasting=7)
LOADED = LoadedBytes(device=1, calls=2, host=3, passing=4, calls_in_tiles=1)
COUNTED: dict[Any, Any] = {
    CountedStep: STEP,
    LoadedBytes: LOADED,
    int: 5,
}
READ_AS_IT_IS = {*(key for keys in READ.values() for key in keys), "lora.rank", "lora.dropout", "lora.kind"}
READ_FOR_STEPS = {
    *("model.dtype", "model.quantize", "model.quantize_skip", "train.global_batch_size"),
    *("train.micro_batch_size", "train.micro_batch_tokens", "train.mixed_precision", "train.compile"),
    *("train.use_gradient_checkpointing", "train.use_gradient_checkpointing_offload"),
    *("memory.policy", "memory.policy_n", "memory.policy_blocks", "memory.save_attention"),
    *("memory.resident_blocks", "memory.prefetched_blocks", "memory.skip_dead_ops", "objective.slider"),
}
READ_FOR_SHAPES = {
    *("model.family", "model.transformer_file", "model.transformer_2_file", "model.training_adapter"),
    *("model.variant", "model.revision"),
    *(
        "lora.init",
        "lora.components",
        "lora.target_modules",
        "lora.target_blocks",
        "lora.groups",
        "lora.lokr_factor",
    ),
    *("data.width", "data.height", "data.resolutions", "data.sizes", "data.bucket_step"),
    *("data.max_aspect_ratio", "data.frame_counts", "data.fps", "data.audio", "data.sources"),
    *("data.input_columns", "data.input_dirs", "data.layer_columns", "data.layer_dirs"),
    *("train.context_parallel", "train.context_parallel_kind", "objective.audio_noise"),
    *("validation.prompts", "validation.inputs", "validation.last_frames", "validation.control"),
    *("validation.inpaint_masks", "validation.faces", "validation.width", "validation.height"),
    *("validation.num_frames", "validation.num_layers", "validation.model_path"),
}


class Noted(KeptCounts):
    """Counts nothing: it notes the key of each count."""

    def __init__(self, family: ModelFamily) -> None:
        super().__init__(None, family)
        self.keys = set[str]()

    def of(self, name: str, settings: Mapping[str, Any], kind: Any, count: Callable[[], Any]) -> Any:
        self.keys.add(self.key_of(name, settings))
        return COUNTED[kind]


def count_all(config: Config, family: ModelFamily, kept: KeptCounts) -> list[Any]:
    """All phases; steps are one of them."""
    counter = counter_of(config, family, kept)
    settings = step_settings(config, family)
    return [PhaseCounter(config, family, counter).count(settings), counter.count(settings)]


def keys_of(config: Config, family: ModelFamily) -> set[str]:
    noted = Noted(family)
    count_all(config, family, noted)
    return noted.keys


def leaves(config: Config) -> Iterator[tuple[str, Any, Any]]:
    """Key, value and type of each setting."""
    for section in type(config).model_fields:
        settings = getattr(config, section)
        for name, field in type(settings).model_fields.items():
            yield f"{section}.{name}", getattr(settings, name), field.annotation


def another(value: Any, kind: Any) -> Any:
    """Another value of a setting, which may be one that a run would refuse."""
    if get_origin(kind) is Literal:
        return next(one for one in get_args(kind) if one != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list | dict):
        return {"x": 1} if isinstance(value, dict) else [*value, "x"]
    if value is None and get_origin(kind) in (Union, UnionType):
        return 1 if {int, float} & set(get_args(kind)) else "x"
    return "x"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, ModelFamily, set[str]]:
    """A config, its family and the keys of what is counted of them."""
    config = config_of("qwen_image", tmp_path_factory.mktemp("planned") / "tiny")
    family = bind_family(config)
    return config, family, keys_of(config, family)


def test_no_setting_but_those_that_are_named_changes_what_a_plan_counts(
    planned: tuple[Config, ModelFamily, set[str]],
) -> None:
    config, family, before = planned
    named = READ_AS_IT_IS | READ_FOR_STEPS | READ_FOR_SHAPES
    num_accepted, changing = 0, []
    for key, value, kind in leaves(config):
        if key not in named:
            with suppress(ValueError):  # of what no run could have
                keys = keys_of(with_changes(config, {key: another(value, kind)}), family)
                num_accepted += 1
                changing += [key] * (not keys <= before)  # what is streamed is not copied, which is one less
    assert changing == []
    assert num_accepted > 90


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.path", "elsewhere"),
        ("model.dtype", "bfloat16"),
        ("model.vae_dtype", "bfloat16"),
        ("model.vae_tiling", True),
        ("model.text_encoder_dtype", "bfloat16"),
        ("model.text_encoder_quantize", "int8"),
        ("memory.stream_text_encoder", True),
        ("memory.stream_slots", 3),
        ("memory.min_bytes", 5),
        ("memory.save_attention", "keep"),
        ("memory.resident_blocks", 2),
        ("lora.rank", 3),
        ("lora.dropout", 0.5),
        ("lora.kind", "dora"),
        ("lora.target_modules", "all"),
        ("train.micro_batch_size", 2),
        ("train.use_gradient_checkpointing", False),
        ("data.width", 128),
        ("validation.width", 128),
        ("validation.guidance_scale", 1.0),
        ("validation.inputs", ["one.png"]),
    ],
)
def test_what_a_count_reads_is_part_of_its_key(
    key: str, value: Any, planned: tuple[Config, ModelFamily, set[str]]
) -> None:
    config, family, before = planned
    assert keys_of(with_changes(config, {key: value}), family) != before


class Watched(KeptCounts):
    """Notes which settings are read while something is counted."""

    def __init__(self, family: ModelFamily) -> None:
        super().__init__(None, family)
        self.count: str | None = None
        self.read = set[tuple[str, str]]()

    def of(self, name: str, settings: Mapping[str, Any], kind: Any, count: Callable[[], Any]) -> Any:
        self.count = name
        try:
            return count()
        finally:
            self.count = None


@pytest.mark.parametrize("name", ["qwen_image", "wan"])
def test_a_count_reads_no_setting_but_those_of_its_key(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(name, tmp_path / "tiny")
    family = bind_family(config)
    watched = Watched(family)
    sections = {type(getattr(config, section)): section for section in type(config).model_fields}
    read = Settings.__getattribute__

    def noting(settings: Settings, attribute: str) -> Any:
        if watched.count and attribute in type(settings).model_fields and type(settings) in sections:
            watched.read.add((watched.count, f"{sections[type(settings)]}.{attribute}"))
        return read(settings, attribute)

    monkeypatch.setattr(Settings, "__getattribute__", noting)
    count_all(config, family, watched)
    assert ("media", "model.vae_dtype") in watched.read
    # Of a preview its request is in the key: sizes, and how many media it starts from.
    by_request = {key for key in READ_FOR_SHAPES if key.startswith(("validation.", "data."))}
    unread = {"validation.seed", "validation.negative_prompt", "validation.num_inference_steps"}
    assert {
        (count, key)
        for count, key in watched.read
        if key not in READ.get(count, ()) and not (count == "preview" and key in by_request | unread)
    } == set()


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], KeptCounts]:
    config = config_of("qwen_image", tmp_path / "tiny")
    family = bind_family(config)
    return lambda: KeptCounts(tmp_path / "kept", family)


def refuse() -> Any:
    raise AssertionError("counted again")


@pytest.mark.parametrize("kind", COUNTED)
def test_a_count_is_found_as_it_was_made(kept: Callable[[], KeptCounts], kind: Any) -> None:
    made = kept()
    assert made.of("one", {"size": 3}, kind, lambda: COUNTED[kind]) == COUNTED[kind]
    found = kept()
    assert found.of("one", {"size": 3}, kind, refuse) == COUNTED[kind]
    assert (made.num_reused, found.num_reused) == (0, 1)
    for name, settings in (("another", {"size": 3}), ("one", {"size": 4}), ("one", {})):
        with pytest.raises(AssertionError, match="counted again"):
            found.of(name, settings, kind, refuse)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]\n", b"\xff" * 99, b'{"device": 1}\n' + b"0" * 64 + b"\n"]
)
def test_a_damaged_or_foreign_file_is_counted_again_and_replaced(
    kept: Callable[[], KeptCounts], content: bytes, tmp_path: Path
) -> None:
    kept().of("one", {}, LoadedBytes, lambda: LOADED)
    (file,) = (tmp_path / "kept").iterdir()
    whole = file.read_bytes()
    file.write_bytes(content)
    again = kept()
    assert again.of("one", {}, LoadedBytes, lambda: LOADED) == LOADED
    assert again.num_reused == 0
    assert file.read_bytes() == whole
    # Whole, but of another kind.
    assert kept().of("one", {}, int, lambda: 8) == 8


def test_a_folder_that_takes_nothing_stops_no_plan(kept: Callable[[], KeptCounts], tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file")
    assert kept().of("one", {}, int, lambda: 8) == 8
    (tmp_path / "kept").unlink()
    kept().of("one", {}, int, lambda: 8)
    (file,) = (tmp_path / "kept").iterdir()
    file.unlink()
    file.mkdir()
    assert kept().of("one", {}, int, lambda: 8) == 8


def test_the_oldest_files_go(
    kept: Callable[[], KeptCounts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_counts, "_MOST_FILES", 2)
    for size in range(4):
        kept().of("one", {"size": size}, int, lambda: 8)
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_counts_of_a_family_from_elsewhere_or_of_other_code_are_not_reused(
    kept: Callable[[], KeptCounts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = kept()
    one.of("one", {}, int, lambda: 8)
    before = one.key_of("one", {})
    assert {"torch", "diffusers", "peft", "diffsynth_lite"} <= set(kept_counts._versions())
    monkeypatch.setattr(kept_counts, "_versions", lambda: {"torch": "0.1"})
    assert one.key_of("one", {}) != before
    family = one._family
    elsewhere = type("Mine", (type(family),), {"__module__": "my_package.mine"})(family.folder)
    assert KeptCounts(tmp_path / "kept", elsewhere).of("one", {}, int, lambda: 9) == 9
    assert len(list((tmp_path / "kept").iterdir())) == 1
