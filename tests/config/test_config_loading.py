"""What a right config becomes: values by the type of their setting, precedence, references, documents."""

import copy
import math
import pickle
import subprocess
import sys

import pytest
import yaml
from pydantic import ValidationError

from diffsynth_lite.config import dump_config, load_config, section_types
from diffsynth_lite.errors import UserError

HEAVY_LIBRARIES = {
    *("torch", "transformers", "diffusers", "accelerate", "peft", "datasets", "numpy", "PIL", "wandb"),
}


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("train.steps", "+7", 7),
        ("train.seed", "0", 0),
        ("train.seed", "9" * 18, 10**18 - 1),
        ("train.learning_rate", "1e-4", 1e-4),
        ("train.learning_rate", ".5", 0.5),
        ("train.learning_rate", "1.", 1.0),
        ("train.weight_decay", "3", 3.0),
        ("train.max_grad_norm", "null", None),
        ("train.max_grad_norm", "~", None),
        ("train.max_grad_norm", "", None),
        ("train.use_gradient_checkpointing", "off", False),
        ("train.use_gradient_checkpointing", "FALSE", False),
        ("train.use_gradient_checkpointing_offload", "Yes", True),
        ("train.mixed_precision", "no", "no"),
        ("objective.loss_weighting", "none", "none"),
        ("logging.run_name", "yes", "yes"),
        ("logging.run_name", "1:30", "1:30"),
        ("logging.run_name", "0123", "0123"),
        ("logging.run_name", "1e3", "1e3"),
        ("logging.run_name", "2024-01-31", "2024-01-31"),
        ("logging.run_name", "nan", "nan"),
        ("logging.run_name", "'null'", "null"),
        ("logging.run_name", "'None'", "None"),
        ("logging.run_name", "null", None),
        ("logging.project", "None", "None"),
        ("validation.negative_prompt", "''", ""),
        ("validation.negative_prompt", "|\n    two\n    lines", "two\nlines\n"),
        ("validation.prompts", "[yes, 0123, 'a: b', \"\"]", ["yes", "0123", "a: b", ""]),
        ("validation.prompts", "\n  - a, b\n  - 'no'", ["a, b", "no"]),
        ("lora.target_modules", "null", None),
        ("lora.target_modules", "all", "all"),
        ("lora.target_modules", "[all]", ["all"]),
        ("logging.trackers", "[tensorboard]", ["tensorboard"]),
    ],
)
def test_a_value_is_read_by_the_type_of_its_setting(write, minimal, setting, value, expected):
    section, key = setting.split(".")
    path = write(f"{minimal}{section}:\n  {key}: {value}\n")
    read = getattr(getattr(load_config(path).config, section), key)
    assert read == expected
    assert type(read) is type(expected)


def test_what_is_not_set_has_its_default(write, minimal):
    config = load_config(write(minimal)).config
    assert config.model.family == "qwen_image"
    assert config.train.learning_rate == 1e-4
    assert config.train.use_gradient_checkpointing is True
    assert config.lora.alpha is None
    assert config.validation.negative_prompt == " "


def test_an_empty_section_is_its_defaults(write, minimal):
    assert load_config(write(f"{minimal}lora:\n  # rank: 8\ntrain: {{}}\n")).config.lora.rank == 32


def test_a_flag_wins_over_an_override_over_the_file_over_the_default(write, minimal):
    path = write(f"{minimal}train:\n  steps: 1\n  seed: 1\n  global_batch_size: 2\n")
    config = load_config(
        path,
        ["train.steps=2", "train.seed=2", "train.steps=3"],
        {"train.steps": 4, "train.global_batch_size": None},
    ).config
    assert (config.train.steps, config.train.seed) == (4, 2)
    assert (config.train.global_batch_size, config.train.micro_batch_size) == (2, 1)


@pytest.mark.parametrize("value", [True, False])
def test_a_flag_is_a_python_value(write, minimal, value):
    flags = {"train.use_gradient_checkpointing": value, "resume.source": "must"}
    config = load_config(write(minimal), flags=flags).config
    assert config.train.use_gradient_checkpointing is value
    assert config.resume.source == "must"


def test_windows_line_ends_and_a_byte_order_mark_make_no_difference(write, minimal):
    text = minimal + "train:\n  steps: 5\n"
    plain = load_config(write(text)).config
    assert load_config(write(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())).config == plain


def test_references_are_resolved_by_the_type_of_their_setting(write, minimal, monkeypatch):
    monkeypatch.setenv("DIFFSYNTH_LITE_NAME", "0123")
    monkeypatch.setenv("DIFFSYNTH_LITE_STEPS", "55")
    path = write(f"""{minimal}
train:
  steps: ${{oc.env:DIFFSYNTH_LITE_STEPS}}
  warmup_steps: ${{train.steps}}
  use_gradient_checkpointing_offload: ${{train.use_gradient_checkpointing}}
  cpu_threads: ${{oc.env:DIFFSYNTH_LITE_UNSET,null}}
lora:
  alpha: ${{oc.env:DIFFSYNTH_LITE_UNSET,16}}
logging:
  run_name: ${{oc.env:DIFFSYNTH_LITE_NAME}}
  project: run-${{oc.env:DIFFSYNTH_LITE_NAME}}-rank${{lora.rank}}
validation:
  prompts: ["null", "in ${{data.path}}"]
  width: ${{data.width}}
  loss_items: ${{lora.rank}}
""")
    config = load_config(path).config
    assert (config.train.steps, config.train.warmup_steps) == (55, 55)
    assert config.train.use_gradient_checkpointing_offload is True
    assert config.train.cpu_threads is None
    assert config.lora.alpha == 16.0
    assert config.logging.run_name == "0123"
    assert config.logging.project == "run-0123-rank32"
    assert config.validation.prompts == ["null", "in pictures"]
    assert config.validation.width is None
    assert config.validation.loss_items == 32


def test_the_documents_of_a_run_keep_references_as_written(write, minimal, monkeypatch):
    monkeypatch.setenv("DIFFSYNTH_LITE_SECRET", "swordfish")
    text = minimal + "logging:\n  project: ${oc.env:DIFFSYNTH_LITE_SECRET}\n"
    path = write(text)
    loaded = load_config(path, ["train.steps=7", "validation.prompts=['${oc.env:DIFFSYNTH_LITE_SECRET}']"])
    assert loaded.config.logging.project == "swordfish"
    assert (loaded.path, loaded.source_text) == (path, text)
    assert "swordfish" not in loaded.resolved_yaml
    assert "${oc.env:DIFFSYNTH_LITE_SECRET}" in loaded.resolved_yaml
    assert load_config(write(loaded.resolved_yaml)).config == loaded.config


def test_dump_config_holds_every_setting(write, minimal):
    config = load_config(write(minimal), ["train.learning_rate=1e-5", "logging.run_name='x'"]).config
    assert load_config(write(dump_config(config))).config == config
    assert {name: list(section) for name, section in yaml.safe_load(dump_config(config)).items()} == {
        name: list(section.model_fields) for name, section in section_types().items()
    }


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("memory: {min_bytes: 4096}", ["memory.min_bytes"]),
        ("memory: {min_bytes: 4096, stream_blocks: all}", []),
        ("memory: {stream_slots: 1}", ["memory.stream_slots"]),
        ("memory: {stream_slots: 1, min_bytes: 9, stream_text_encoder: on}", []),
        ("memory: {host_gib: 2, stream_text_encoder: on}", ["memory.host_gib"]),
        ("memory: {host_gib: 2, resident_blocks: 0}", ["memory.host_gib", "memory.resident_blocks"]),
        ("memory: {min_bytes: 4096}\ntrain: {use_gradient_checkpointing_offload: on}", []),
        ("memory: {host_gib: 2, save_attention: park}", []),
        ("memory: {host_gib: 2, save_attention: keep}", ["memory.host_gib"]),
        ("memory: {skip_dead_ops: off}\ntrain: {use_gradient_checkpointing: off}", ["memory.skip_dead_ops"]),
        ("memory: {skip_dead_ops: off}", []),
        ("memory: {skip_dead_ops: off}\ntrain: {compile: blocks}", ["memory.skip_dead_ops"]),
        ("memory: {skip_dead_ops: off}\ntrain: {compile: off}", []),
        ("validation: {guidance_scale: 2, width: 8}", ["validation.guidance_scale", "validation.width"]),
        ("validation: {guidance_scale: 2, prompts: [a]}", []),
        ("validation: {loss_items: 0, data: other}", ["validation.data"]),
        ("validation: {loss_items: 0, item_losses: 0, every_steps: 5}", ["validation.every_steps"]),
        ("validation: {every_steps: 5}", []),
        ("validation: {inputs: [a.png], num_frames: 9}", ["validation.inputs", "validation.num_frames"]),
        ("validation: {prompts: [a], guidance_scale: 1, negative_prompt: b}", ["validation.negative_prompt"]),
        ("logging: {run_name: a, project: b, wandb_mode: online}", ["logging.project"]),
        ("logging: {trackers: [tensorboard], run_name: a, wandb_mode: offline}", ["logging.wandb_mode"]),
    ],
)
def test_a_setting_of_a_part_that_is_off_is_warned_of(write, minimal, text, settings):
    path = write(f"{text}\n{minimal}")
    warnings = load_config(path).warnings
    assert [warning.split(": ")[0] for warning in warnings] == [f"{path}:1 {name}" for name in settings]
    assert all("has no effect" in warning for warning in warnings)


def test_offload_alone_implies_checkpointing_and_against_it_is_an_error(write, minimal):
    offload = "train.use_gradient_checkpointing_offload"
    train = load_config(write(minimal), [f"{offload}=true"]).config.train
    assert train.use_gradient_checkpointing is True
    path = write(f"{minimal}train:\n  use_gradient_checkpointing: off\n")
    with pytest.raises(UserError, match=rf"^{offload}=True \(command line\): .* turn both on"):
        load_config(path, flags={offload: True})


def test_attention_is_not_saved_in_compiled_blocks(write, minimal):
    path = write(f"{minimal}train: {{compile: blocks}}\n")
    with pytest.raises(
        UserError, match=r"memory.save_attention=keep .*needs to see attention run, .* compiles"
    ):
        load_config(path, ["memory.save_attention=keep"])


@pytest.mark.parametrize(
    ("setting", "needed"), [("save_attention=park", []), ("policy=last_k", ["memory.policy_n=2"])]
)
def test_a_way_of_checkpointing_with_checkpointing_off_is_an_error(write, minimal, setting, needed):
    path = write(f"{minimal}train:\n  use_gradient_checkpointing: off\n")
    key = setting.split("=")[0]
    with pytest.raises(UserError, match=rf"^memory.{setting} .* is a way of checkpointing, which"):
        load_config(path, [f"memory.{setting}", *needed])
    loaded = load_config(write(minimal), [f"memory.{setting}", *needed])
    assert getattr(loaded.config.memory, key) == setting.split("=")[1]
    assert loaded.warnings == ()


def test_float16_without_autocast_is_an_error(write, minimal):
    with pytest.raises(UserError, match=r"^model.dtype=float16 .*rounds small gradients to 0"):
        load_config(write(minimal), ["model.dtype=float16", "train.mixed_precision=no"])
    for setting in ("model.dtype=float16", "train.mixed_precision=no"):
        assert load_config(write(minimal), [setting]).warnings == ()


def test_a_block_named_twice_is_an_error(write, minimal):
    with pytest.raises(UserError, match=r"^memory.policy_blocks=\[1, 1\] .*has an entry twice"):
        load_config(write(minimal), ["memory.policy=skip", "memory.policy_blocks=[1, 1]"])


def test_output_in_the_folder_of_the_images_is_an_error(write, minimal):
    with pytest.raises(UserError, match=r"output.dir=./pictures \(command line\): is data.path"):
        load_config(write(minimal), ["output.dir=./pictures"])


def test_a_config_cannot_be_changed(write, minimal):
    config = load_config(write(minimal)).config
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 5
    with pytest.raises(ValidationError, match="frozen"):
        config.train = None


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, True, "1e-4"])
def test_settings_made_in_python_are_checked_too(value):
    with pytest.raises(ValidationError, match="learning_rate"):
        section_types()["train"](learning_rate=value)


@pytest.mark.parametrize("text", ["${data.path}", "???", "a\0b"])
def test_text_that_would_be_read_back_as_something_else_is_refused(text):
    with pytest.raises(ValidationError, match="must not contain"):
        section_types()["logging"](project=text)


def test_a_config_survives_being_copied_and_sent_to_another_process(write, minimal):
    config = load_config(write(minimal)).config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config


def test_loading_a_config_imports_no_heavy_library():
    code = (
        "import sys, diffsynth_lite.config as config, diffsynth_lite.config.reference\n"
        "config.load_config('quickstart.yaml', ['train.steps=20'])\n"
        "print(*sorted(name for name in sys.modules if '.' not in name))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "omegaconf" in loaded
    assert not loaded & HEAVY_LIBRARIES
