"""Which settings make a run the run that it is."""

import math
from pathlib import Path
from typing import get_args

import pytest

from diffsynth_lite.config import AllowedChange, Config, load_config, section_types
from diffsynth_lite.data.items import DataIdentity
from diffsynth_lite.errors import DifferentRunError
from diffsynth_lite.training.checkpoint.resume import (
    data_fingerprint,
    require_same,
    settings_fingerprint,
)


def config(*overrides: str) -> Config:
    return load_config("quickstart.yaml", overrides).config


def fingerprint(*overrides: str) -> dict:
    return settings_fingerprint(config(*overrides), model_fingerprint="weights")


@pytest.mark.parametrize(
    "override",
    [
        *("train.micro_batch_size=4", "train.use_gradient_checkpointing=false", "data.num_workers=2"),
        *(
            "validation.every_steps=7",
            "logging.every_steps=3",
            "output.keep_checkpoints=9",
            "train.steps=600",
        ),
        *("data.cache_dir=elsewhere", "model.path=elsewhere", "train.cpu_threads=2", "memory.min_bytes=5"),
        *("memory.host_gib=2", "memory.resident_blocks=0", "memory.prefetched_blocks=2"),
    ],
)
def test_settings_that_do_not_decide_the_numbers_may_change(override: str) -> None:
    assert fingerprint(override) == fingerprint()


@pytest.mark.parametrize(
    "override",
    [
        *("lora.rank=4", "lora.dropout=0.1", "lora.target_modules=[to_q]", "objective.logit_mean=0.1"),
        *("lora.target_modules=all", "model.quantize=int8"),
        *("train.seed=1", "train.global_batch_size=16", "train.learning_rate=1e-3", "train.warmup_steps=9"),
        *("train.weight_decay=0.1", "train.mixed_precision=bf16", "train.lr_scheduler=cosine"),
        *("data.width=128", "data.repeats=2", "model.dtype=bfloat16", "model.vae_dtype=bfloat16"),
        *(
            "data.weight=0.5",
            "data.trigger=ohwx",
            "data.upscale=true",
            "data.frame_counts=[17]",
            "data.fps=8",
        ),
        *("data.clip=center", "data.crop=random", "data.background=black", "data.caption_dropout=0.1"),
        "data.hold_out=0.2",
        *("data.tag_shuffles=2", "data.keep_tags=1", "train.micro_batch_tokens=4096"),
    ],
)
def test_settings_that_decide_the_numbers_are_named_with_both_values(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(DifferentRunError, match=rf"{key} was .*, is .*another output\.dir"):
        require_same(fingerprint(override), fingerprint(), where="runs/a")


@pytest.mark.parametrize(
    ("condition", "change", "words"),
    [
        ("train.lr_scheduler=cosine", "train.steps=600", r"train\.steps was 300, is 600"),
        ("train.micro_batch_tokens=4096", "train.micro_batch_size=4", r"micro_batch_size was 8, is 4"),
    ],
)
def test_steps_and_micro_batch_are_compared_where_another_setting_makes_them_matter(
    condition: str, change: str, words: str
) -> None:
    with pytest.raises(DifferentRunError, match=words):
        require_same(fingerprint(condition, change), fingerprint(condition), where="runs/a")


def test_a_warm_up_is_compared_as_the_run_has_it() -> None:
    trial, whole = (fingerprint("train.warmup_steps=50", f"train.steps={steps}") for steps in (10, 1000))
    for new, old, words in ((whole, trial, "was 9, is 50"), (trial, whole, "was 50, is 9")):
        with pytest.raises(DifferentRunError, match=rf"train\.warmup_steps {words}.*less than train\.steps"):
            require_same(new, old, where="runs/a")
    assert require_same(whole, trial, where="runs/a", allow=["train.warmup_steps"])
    assert fingerprint("train.warmup_steps=50", "train.steps=51") == whole


FREE = {
    "model": {"path", "revision", "variant", "transformer_file", "transformer_2_file", "training_adapter"},
    "data": {
        *("sources", "path", "dataset", "split", "revision", "metadata", "allow_outside"),
        *("media_column", "caption_columns", "captions", "input_columns"),
        *("first_frame_column", "last_frame_column", "mask_column"),
        *("control_column", "inpaint_mask_column", "random_masks", "layer_columns", "layer_dirs"),
        *("input_dirs", "first_frame_dir", "last_frame_dir", "mask_dir", "control_dir", "inpaint_mask_dir"),
        *("face_column", "face_dir"),
        *("cache", "cache_dir", "sealed", "on_bad_item", "max_bad_ratio", "num_workers"),
    },
    "lora": {"init_from"},
    "objective": set(),
    "train": {
        "context_parallel",
        "context_parallel_kind",
        "use_gradient_checkpointing",
        "use_gradient_checkpointing_offload",
        *("cpu_threads", "deterministic", "step_timeout_minutes", "max_hours", "stop_after"),
        "compile_cache",
    },
}
"""Settings that never decide the numbers of a run; what is read from where is in the data's fingerprint."""

CONDITIONAL = {"train": {"steps", "micro_batch_size"}}
"""Settings that decide them where others make them matter."""


@pytest.mark.parametrize("section", FREE)
def test_every_setting_is_either_in_the_contract_or_known_to_be_free_to_change(section: str) -> None:
    settings = set(section_types()[section].model_fields)
    fixed = {key.partition(".")[2] for key in fingerprint() if key.startswith(f"{section}.")} - {
        "weights",
        "training_adapter.weights",
    }
    free, conditional = FREE[section], CONDITIONAL.get(section, set())
    assert settings == fixed | free | conditional
    assert len(settings) == len(fixed) + len(free) + len(conditional)


def test_a_source_is_in_the_contract_with_what_decides_how_often_it_is_seen(tmp_path: Path) -> None:
    two = "data.sources=[{path: a, repeats: 2}, {path: b, weight: 0.5, trigger: ohwx}]"
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {family: a, path: b}\ndata: {}\noutput: {dir: runs/one}\n")
    found = settings_fingerprint(load_config(path, [two]).config, model_fingerprint="weights")
    assert (found["data.repeats"], found["data.weight"]) == ([2, 1], [1.0, 0.5])
    assert found["data.trigger"] == [None, "ohwx"]
    moved = load_config(path, [two.replace("path: a", "path: c, metadata: d.csv")]).config
    assert settings_fingerprint(moved, model_fingerprint="weights") == found


def test_every_section_is_either_in_the_contract_or_free_to_change() -> None:
    sections = set(Config.model_fields)
    fixed = {key.partition(".")[0] for key in fingerprint()}
    assert fixed == {"model", "lora", "data", "objective", "train"}
    assert sections - fixed == {"memory", "validation", "logging", "output", "resume"}


def data(*, num_buckets: int = 1, micro_batch_size: int = 2, **changes: str) -> dict:
    values = {"items": "2 items, 5e", "decoder": "v1", "media_encoder": "vae 1", "prompt_encoder": "text 1"}
    identity = DataIdentity(num_buckets=num_buckets, **(values | changes))
    return data_fingerprint(identity, micro_batch_size=micro_batch_size)


@pytest.mark.parametrize("part", ["items", "decoder", "media_encoder", "prompt_encoder"])
def test_the_items_and_each_of_what_makes_tensors_of_them_is_named_and_may_be_allowed(part: str) -> None:
    with pytest.raises(DifferentRunError, match=rf"data\.{part} was .*, is 'new'\..*resume\.allow=\[data\]"):
        require_same(data(**{part: "new"}), data(), where="runs")
    (change,) = require_same(data(**{part: "new"}), data(), where="runs", allow=["data"])
    assert change.key == f"data.{part}"


def test_the_micro_batch_decides_the_order_of_several_buckets_and_not_of_one() -> None:
    require_same(data(micro_batch_size=4), data(micro_batch_size=2), where="runs")
    with pytest.raises(DifferentRunError, match=r"train\.micro_batch_size was 2, is 4"):
        require_same(
            data(num_buckets=2, micro_batch_size=4), data(num_buckets=2, micro_batch_size=2), where="runs"
        )


def test_what_may_change_when_it_is_named_is_in_the_contract_or_becomes_so() -> None:
    conditional = {f"train.{name}" for name in CONDITIONAL["train"]}
    assert set(get_args(AllowedChange)) - {"data"} <= fingerprint().keys() | conditional


@pytest.mark.parametrize(
    ("override", "permission"),
    [
        ("train.learning_rate=1e-3", "train.learning_rate"),
        ("data.repeats=2", "data"),
        ("data.crop=random", "data"),
    ],
)
def test_a_change_that_is_allowed_by_name_is_returned_with_both_values(
    override: str, permission: str
) -> None:
    with pytest.raises(DifferentRunError, match=rf"set 'resume\.allow=\[{permission}\]"):
        require_same(fingerprint(override), fingerprint(), where="runs/a")
    with pytest.raises(DifferentRunError, match=rf"set 'resume\.allow=\[train\.steps, {permission}\]"):
        require_same(fingerprint(override), fingerprint(), where="runs/a", allow=["train.steps"])
    (change,) = require_same(fingerprint(override), fingerprint(), where="runs/a", allow=[permission])
    key = override.partition("=")[0]
    assert (change.key, change.old, change.new) == (key, fingerprint()[key], fingerprint(override)[key])


@pytest.mark.parametrize("override", ["train.seed=1", "lora.rank=4", "model.dtype=bfloat16"])
def test_what_makes_another_run_offers_no_permission(override: str) -> None:
    everything = get_args(AllowedChange)
    with pytest.raises(DifferentRunError) as caught:
        require_same(
            fingerprint(override, "train.learning_rate=1e-3"), fingerprint(), where="a", allow=everything
        )
    assert "resume.allow" not in str(caught.value)
    assert "train.learning_rate" not in str(caught.value)


def test_a_setting_that_an_older_run_did_not_know_counts_as_left_at_its_default() -> None:
    older = {key: value for key, value in fingerprint().items() if key != "objective.min_snr_gamma"}
    assert require_same(fingerprint(), older, where="runs/a") == []
    newer = fingerprint("objective.loss_weighting=min_snr", "objective.min_snr_gamma=3")
    with pytest.raises(DifferentRunError, match=r"min_snr_gamma was 5\.0, is 3\.0"):
        require_same(newer, older, where="runs/a")


def test_sources_of_an_older_run_were_learned_and_counted_alike() -> None:
    two = ("data.path=null", "data.sources=[{path: a}, {path: b%s}]")
    added = ("data.preserve", "data.loss_weight")
    older = {key: value for key, value in fingerprint(two[0], two[1] % "").items() if key not in added}
    assert require_same(fingerprint(two[0], two[1] % ""), older, where="runs/a") == []
    newer = fingerprint(two[0], two[1] % ", preserve: true, loss_weight: 2")
    changes = require_same(newer, older, where="runs/a", allow=["data"])
    assert {change.key: (change.old, change.new) for change in changes} == {
        "data.preserve": ([False, False], [False, True]),
        "data.loss_weight": ([1.0, 1.0], [1.0, 2.0]),
    }


def test_a_schedule_that_begins_to_matter_is_allowed_with_what_makes_it_matter() -> None:
    cosine = fingerprint("train.lr_scheduler=cosine", "train.steps=600")
    changes = require_same(cosine, fingerprint(), where="runs/a", allow=["train.lr_scheduler"])
    assert [change.key for change in changes] == ["train.lr_scheduler"]


def of_shift(setting: str, **shifts: float) -> dict:
    value = ["objective.shift_value=3"] if setting == "static" else []
    settings = config(f"objective.shift={setting}", *value)
    return settings_fingerprint(settings, model_fingerprint="weights", shifts=shifts)


def test_a_family_that_gives_another_shift_than_before_is_refused_with_the_ways_to_have_the_old_one() -> None:
    before = of_shift("family", small=2.0, large=7.5)
    with pytest.raises(DifferentRunError) as caught:
        require_same(of_shift("family", small=2.0, large=3.0), before, where="runs/a")
    message = str(caught.value)
    assert "objective.shift at large was 7.5, is 3.0. Restore" in message
    assert "objective.shift: resolution takes the sampler's" in message
    assert "small" not in message
    assert "resume.allow" not in message


def test_another_way_to_the_same_shifts_is_the_same_run() -> None:
    before = of_shift("family", small=3.0, large=3.0)
    for setting in ("family", "static", "resolution"):
        assert require_same(of_shift(setting, small=3.0, large=3.0), before, where="runs/a") == []
    with pytest.raises(DifferentRunError, match=r"objective\.shift was 'family', is 'none'; .* at small was"):
        require_same(of_shift("none", small=1.0, large=1.0), before, where="runs/a")


def test_a_shift_that_another_machine_rounds_otherwise_is_the_same_and_another_way_to_it_is_not() -> None:
    before = of_shift("family", small=7.559744, large=3.0)
    rounded = {"small": math.nextafter(7.559744, 8), "large": 3.0}
    assert require_same(of_shift("family", **rounded), before, where="runs/a") == []
    with pytest.raises(
        DifferentRunError, match=r": objective\.shift was 'family', is 'resolution'\. Restore"
    ):
        require_same(of_shift("resolution", **rounded), before, where="runs/a")
    with pytest.raises(DifferentRunError, match=r"objective\.shift at small was 7\.559744, is 7\.55974\."):
        require_same(of_shift("family", small=7.55974, large=3.0), before, where="runs/a")


def test_sizes_that_are_new_have_no_shift_to_differ_from() -> None:
    before = of_shift("family", small=2.0)
    assert require_same(of_shift("family", large=3.0), before, where="runs/a") == []
    with pytest.raises(DifferentRunError, match=r"objective\.shift was 'family', is 'resolution'"):
        require_same(of_shift("resolution", large=3.0), before, where="runs/a")


def test_a_run_that_did_not_keep_its_shifts_had_those_that_the_family_gave_then() -> None:
    older, earlier = of_shift("family"), {"small": 2.0, "large": 7.5}
    unchanged = of_shift("family", small=2.0, large=7.5)
    assert require_same(unchanged, older, where="runs/a", earlier_shifts=earlier) == []
    corrected = of_shift("family", small=2.0, large=3.0)
    with pytest.raises(DifferentRunError, match=r": objective\.shift at large was 7\.5, is 3\.0\."):
        require_same(corrected, older, where="runs/a", earlier_shifts=earlier)
    restored = of_shift("resolution", small=2.0, large=7.5)
    assert require_same(restored, older, where="runs/a", earlier_shifts=earlier) == []
    # A shift that the config gave is what it was.
    static = of_shift("static", small=3.0, large=3.0)
    assert require_same(static, of_shift("static"), where="runs/a", earlier_shifts=earlier) == []


def test_the_seed_that_draws_held_out_items_counts_only_where_some_are_drawn() -> None:
    assert fingerprint("validation.seed=1") == fingerprint()
    held_out, other = fingerprint("data.hold_out=0.2"), fingerprint("data.hold_out=0.2", "validation.seed=1")
    with pytest.raises(DifferentRunError, match=r"data\.hold_out was '0\.2 by validation\.seed 0', is .* 1'"):
        require_same(other, held_out, where="runs")
    assert require_same(other, held_out, where="runs", allow=["data"])
