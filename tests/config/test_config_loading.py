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
from diffsynth_lite.config.peers import names_by_setting
from diffsynth_lite.redaction import Redactor, in_force

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


def test_an_empty_section_is_its_defaults(write, minimal):
    assert load_config(write(f"{minimal}lora:\n  # rank: 8\ntrain: {{}}\n")).config.lora.rank == 32


def test_the_last_override_wins_over_the_others_over_the_file_over_the_default(write, minimal):
    path = write(f"{minimal}train:\n  steps: 1\n  seed: 1\n  global_batch_size: 2\n")
    config = load_config(path, ["train.steps=2", "train.seed=2", "train.steps=4"]).config
    assert (config.train.steps, config.train.seed) == (4, 2)
    assert (config.train.global_batch_size, config.train.micro_batch_size) == (2, 1)


@pytest.mark.parametrize("line_break", ["\r\n", "\r", "\x85"])
def test_line_breaks_of_other_systems_and_a_byte_order_mark_make_no_difference(write, minimal, line_break):
    text = minimal + "train:\n  steps: 5\n"
    plain = load_config(write(text)).config
    assert load_config(write("\ufeff" + text.replace("\n", line_break))).config == plain


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
    assert config.validation.prompts == ["null", "in images"]
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
        ("memory: {policy: last_k, policy_n: 2}", []),
        ("train: {mixed_precision: no}", []),
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


TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


def test_a_setting_that_holds_a_secret_is_named_and_masked(write, minimal) -> None:
    path = write(f"{minimal}logging:\n  trackers: [tensorboard]\n  run_name: a {TOKEN}\n# {TOKEN}\n")
    loaded = load_config(path)
    (warning,) = loaded.warnings
    assert warning.startswith(f"{path}:10 logging.run_name: holds a secret")
    assert "${oc.env:NAME}" in warning
    assert loaded.config.logging.run_name == f"a {TOKEN}"
    assert yaml.safe_load(loaded.resolved_yaml)["logging"]["run_name"] == "a REDACTED"
    assert TOKEN not in loaded.source_text
    assert loaded.source_text.count("REDACTED") == 2


def test_a_secret_on_the_command_line_is_named_and_masked(write, minimal) -> None:
    loaded = load_config(write(minimal), [f"validation.prompts=[a cat, {TOKEN}]"])
    (warning,) = loaded.warnings
    assert warning.startswith("validation.prompts=[a cat, REDACTED] (command line): holds a secret")
    assert yaml.safe_load(loaded.resolved_yaml)["validation"]["prompts"] == ["a cat", "REDACTED"]


def test_a_secret_in_an_entry_of_a_list_is_masked(write, minimal) -> None:
    sources = f"[{{path: a, trigger: {TOKEN}}}, {{path: b}}]"
    loaded = load_config(write(minimal.replace("  path: images", f"  sources: {sources}")))
    assert len(loaded.warnings) == 1
    assert "data.sources: holds a secret" in loaded.warnings[0]
    assert TOKEN not in loaded.resolved_yaml + loaded.source_text


def test_a_reference_to_a_secret_is_kept_as_it_is_written(write, minimal, monkeypatch) -> None:
    monkeypatch.setenv("MY_SECRET", 'swordfish\'s "name"')
    path = write(minimal.replace("qwen_image", "${oc.env:MY_SECRET}"))
    with in_force(Redactor({"MY_SECRET": 'swordfish\'s "name"'})):
        loaded = load_config(path)
    assert loaded.warnings == ()
    assert loaded.config.model.family == 'swordfish\'s "name"'
    assert "family: ${oc.env:MY_SECRET}" in loaded.resolved_yaml
    assert loaded.source_text == path.read_text()


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
        ("output.dir=runs/${data.path}", "runs/images"),
    ],
)
def test_an_override_is_read_by_the_type_of_its_setting(write, minimal, override, expected):
    section, key = override.partition("=")[0].split(".")
    config = load_config(write(minimal), [override]).config
    assert getattr(getattr(config, section), key) == expected


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (10, 9), (50, 49), (51, 50)])
def test_a_warm_up_leaves_a_step_at_the_highest_rate_and_is_warned_of_when_it_is_shortened(
    write, minimal, steps, warmup
):
    path = write(f"train:\n  warmup_steps: 50\n{minimal}")
    loaded = load_config(path, [f"train.steps={steps}"])
    assert (loaded.config.train.warmup_in_run, loaded.config.train.warmup_steps) == (warmup, 50)
    warning = f"{path}:2 train.warmup_steps: 50 is shortened to {warmup}, as train.steps is {steps}"
    assert loaded.warnings == ((warning,) if warmup < 50 else ())


def test_the_names_of_other_trainers_lead_to_settings_there_are_and_are_none_themselves():
    keys = {section: set(model.model_fields) for section, model in section_types().items()}
    ours = [setting.split(".") for setting in names_by_setting()]
    assert [key for section, key in ours if key not in keys[section]] == []
    theirs = [name for names in names_by_setting().values() for name in names]
    assert len(theirs) == len(set(theirs))
    assert set(theirs).isdisjoint(set(keys).union(*keys.values()))


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


def test_settings_of_adam_have_no_effect_on_others(write, minimal):
    path = write(minimal + "train: {adam_beta1: 0.8, optimizer: muon}\n")
    (warning,) = load_config(path).warnings
    assert "train.adam_beta1: has no effect with train.optimizer muon" in warning
    assert load_config(path, ["train.optimizer=adamw8bit"]).warnings == ()
