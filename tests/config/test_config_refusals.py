"""Every wrong setting is one line of a UserError: file and line or argument, key, and remedy."""

import pytest

from diffsynth_lite.config import load_config, section_types
from diffsynth_lite.errors import MAX_LINES, UserError

NUM_KEYS = len(section_types()["train"].model_fields)

# Section and setting, value as written, and what the message must say. The setting is on line 2.
WRONG_VALUES = [
    ("train", "steps", "0", "at least 1"),
    ("train", "steps", "1.5", "a whole number"),
    ("train", "steps", "true", "a whole number"),
    ("train", "steps", "1e3", "a whole number"),
    ("train", "steps", "0x10", "a whole number"),
    ("train", "steps", "010", "a whole number"),
    ("train", "steps", "1:30", "a whole number"),
    ("train", "steps", "'10'", "without quotes"),
    ("train", "steps", "null", "a whole number"),
    ("train", "steps", "", "got nothing"),
    ("train", "steps", "???", "nor be '???'"),
    ("train", "steps", "[10]", "a whole number"),
    ("train", "steps", "9" * 19, "a whole number"),
    ("train", "steps", "9" * 5000, "a whole number"),
    ("train", "seed", "-1", "at least 0"),
    ("train", "learning_rate", ".nan", "a number"),
    ("train", "learning_rate", "1e999", "a number"),
    ("train", "learning_rate", "fast", "a number"),
    ("train", "learning_rate", "0", "above 0"),
    ("train", "learning_rate", "1e-4 # a comment with 'quotes", None),
    ("train", "adam_beta1", "1.0", "below 1"),
    ("train", "seed", "9" * 19, "at most 999999999999999999"),
    ("train", "max_grad_norm", "None", "write null"),
    ("train", "mixed_precision", "fp16", "one of no, bf16"),
    ("train", "lr_scheduler", "Cosine", "one of constant, linear, cosine"),
    ("train", "lr_scheduler", "polinomial", "did you mean 'polynomial'?"),
    ("train", "use_gradient_checkpointing", "1", "true or false"),
    ("train", "use_gradient_checkpointing", "'yes'", "true or false, without quotes"),
    ("train", "use_gradient_checkpointing", "oN", "true or false"),
    ("train", "use_gradient_checkpointing", "null", "true or false"),
    ("train", "use_gradient_checkpointing", "auto", "memory.auto: true chooses it"),
    ("train", "use_gradient_checkpointing_offload", "auto", "memory.auto: true chooses it"),
    ("train", "steps", "1000000001", "at least 1 and at most 1000000000"),
    ("train", "learning_rate", "1e4", "above 0 and at most 1"),
    ("train", "micro_batch_size", "2", "must divide train.global_batch_size 1"),
    ("train", "lr", "1", "is train.learning_rate here"),
    ("train", "learning_rat", "1", "did you mean 'learning_rate'?"),
    ("train", "rank", "8", "'rank' belongs under lora"),
    ("train", "ranks", "8", "did you mean 'lora.rank'?"),
    ("train", "width", "8", "'width' belongs under data or validation"),
    ("train", "<<", "{steps: 5}", "unknown key"),
    ("train", "'no such: key'", "8", "unknown key"),
    ("lora", "rank", "200000000000000000", "at most 8192"),
    ("lora", "target_modules", "[to_q, to_q]", "twice"),
    ("lora", "init_from", "~nosuchuser/lora", "no user of that name"),
    ("lora", "init_from", "x/" * 1501, "at most 3000 bytes"),
    ("lora", "init_from", "C:\\my files\\x", "in WSL it is /mnt/c/my files/x"),
    ("lora", "dropout", "1", "below 1"),
    ("lora", "target_modules", "to_q", "must be attention, all, or a list of texts"),
    ("lora", "target_modules", "atention", "did you mean 'attention'?"),
    ("lora", "target_modules", "All", "did you mean 'all'?"),
    ("lora", "target_modules", "[]", "at least one"),
    ("lora", "target_modules", "[to_q, '']", "not empty"),
    ("lora", "target_modules", "[[to_q]]", "a list of texts"),
    ("lora", "target_modules", "[to_q, null]", "a list of texts"),
    ("objective", "shift", "static", "needs objective.shift_value"),
    ("objective", "shift_value", "3.0", "has no effect with objective.shift family"),
    ("objective", "logit_mean", "0.5", "set timestep_density: logit_normal or stretched_logit_normal"),
    ("objective", "timestep_density", "shifted_logit_normal", "one of uniform, logit_normal, stretched_"),
    ("objective", "audio_noise", "own", "has no effect while data.audio is off"),
    ("objective", "independent_audio_timestep", "true", "objective.audio_noise"),
    ("objective", "logit_std", "0.5", "set timestep_density: logit_normal"),
    ("objective", "mode_scale", "0.5", "set timestep_density: mode"),
    ("objective", "huber_delta", "0.5", "has no effect with objective.loss mse"),
    ("memory", "policy", "auto", "memory.auto: true chooses it"),
    ("memory", "policy", "every_n", "needs memory.policy_n"),
    ("memory", "policy", "only", "needs memory.policy_blocks"),
    ("memory", "stream_blocks", "2", "would all stay in memory.stream_slots 2, and nothing would be saved"),
    ("memory", "stream_blocks", "some", "must be all, auto, or a whole number, at least 0"),
    ("memory", "stream_blocks", "null", "must be all, auto, or a whole number, at least 0"),
    ("memory", "policy_n", "2", "has no effect with memory.policy all"),
    ("memory", "policy_blocks", "[1]", "has no effect with memory.policy all"),
    ("memory", "policy_blocks", "1", "a list of whole numbers"),
    ("memory", "policy_blocks", "[-1]", "at least 0"),
    ("memory", "save_attention", "yes", "one of no, keep, park"),
    ("memory", "budget", "40GB", "is memory.device_gib here, with memory.auto: true"),
    ("validation", "prompts", "a cat", "a list of texts"),
    ("validation", "prompts", "[a: cat]", "text with ': ' needs quotes"),
    ("validation", "prompts", "null", "a list of texts"),
    ("validation", "negative_prompt", "null", "put it in quotes"),
    ("validation", "negative_prompt", '"\\0"', "a zero byte"),
    ("validation", "negative_prompt", '"\\ud800"', "half a character"),
    ("validation", "data", "images/", "nothing is held out"),
    ("validation", "data", "é" * 128, "at most 255 bytes"),
    ("validation", "steps", "50", "or did you mean 'every_steps'"),
    ("logging", "trackers", "[wandb, mlflow]", "wandb, tensorboard"),
    ("logging", "wandb_mode", "off", "one of online, offline"),
    ("logging", "project", "''", "not empty"),
    ("logging", "wandb_token", "abc", "unknown key"),
    ("resume", "source", "~", "not empty"),
]
WRONG_REFERENCES = [
    ("logging", "project", "${oc.env:DIFFSYNTH_LITE_UNSET}", "'DIFFSYNTH_LITE_UNSET' not found"),
    ("logging", "project", "${oc.decode:1}", "must be ${oc.env:NAME}"),
    ("logging", "project", "${oc.env:A,${oc.env:B}}", "must be ${oc.env:NAME}"),
    ("logging", "project", "${train}", "must be ${oc.env:NAME}"),
    ("logging", "project", "${", "must be ${oc.env:NAME}"),
    ("logging", "project", "\\${data.path}", "must be ${oc.env:NAME}"),
    ("logging", "project", "${oc.env:A,a[b}", "must be ${oc.env:NAME}"),
    ("logging", "project", "${logging.project}", "Recursive"),
    ("logging", "project", "${logging.nothing}", "not found"),
    ("logging", "project", "a-${logging.run_name}", "logging.run_name, which is null"),
    ("logging", "project", "${validation.prompts}", "must be text"),
    ("train", "steps", "${oc.env:DIFFSYNTH_LITE_UNSET,many}", "must be a whole number"),
    ("train", "steps", "${oc.env:DIFFSYNTH_LITE_UNSET,0}", "at least 1"),
    ("validation", "prompts", "[a, '${oc.env:DIFFSYNTH_LITE_UNSET}']", "not found"),
]


@pytest.mark.parametrize(("section", "key", "value", "reason"), WRONG_VALUES + WRONG_REFERENCES)
def test_a_wrong_setting_is_reported_with_file_and_key(refusal, write, minimal, section, key, value, reason):
    path = write(f"{section}:\n  {key}: {value}\n{minimal}")
    if reason is None:
        load_config(path)
        return
    (line,) = refusal(path)
    assert line.startswith(f"{path}:2 {section}.{key.strip(chr(39))}: ")
    assert reason in line


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
        ("model.dtype=fp8", "model.quantize: int8 keeps the base in 8 bits"),
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
        ("memory.policy=auto", "memory.auto: true chooses it"),
        ("lora.dropout=2", "below 1"),
        ("objective.logit_std=2", "has no effect"),
        ("output.dir=./images", "is data.path"),
    ],
)
def test_a_wrong_override_is_reported_as_typed(refusal, write, minimal, override, reason):
    (line,) = refusal(write(minimal), [override])
    shown = override.encode("ascii", "backslashreplace").decode()
    assert line.startswith(f"{shown} (command line): ")
    assert reason in line


def test_a_setting_that_the_shell_split_is_reported_once_with_the_quotes_that_it_needs(
    refusal, write, minimal
):
    given = ["lora.target_modules=[to_q,", "to_k]", "train.steps=5", "my", "train.seed"]
    split = "(command line): ends here, as a shell splits at spaces; put quotes around all of it:"
    assert refusal(write(minimal), given) == [
        f"lora.target_modules=[to_q, {split} 'lora.target_modules=[to_q, to_k]'",
        f"train.steps=5 {split} 'train.steps=5 my'",
        "train.seed (command line): has no value; write section.key=value, such as train.steps=10",
    ]


def test_a_conflict_with_the_file_is_placed_at_the_first_of_the_two_that_was_set(refusal, write, minimal):
    path = write(f"train:\n  micro_batch_size: 3\n{minimal}")
    (line,) = refusal(path, ["train.global_batch_size=4"])
    assert line.startswith(f"{path}:2 train.micro_batch_size: 3 must divide")


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
            "0.99: the weights of schedule_free are an average already",
        ),
        (["memory.save_attention=keep", "train.compile=blocks"], "needs to see attention run, which it"),
        (
            ["model.attention=_native_math", "memory.save_attention=keep"],
            "what torch's fused kernels compute",
        ),
        (["model.attention=flash", "train.deterministic=on"], "orders the sums of torch's kernels only"),
        (["model.attention=native", "train.context_parallel=2"], "attention in its own way; set train.conte"),
        (["model.attention=flahs"], "did you mean 'flash'?"),
        (["model.attention=sage"], "sage has no gradients, which training needs"),
        (["model.attention=flash_hub"], "code that is downloaded from the hub, which is never run here"),
        (["model.dtype=float16", "train.mixed_precision=no"], "float16 rounds small gradients to 0"),
        (["memory.policy=skip", "memory.policy_blocks=[1, 1]"], "got ['1', '1']; has an entry twice"),
        (
            ["memory.save_attention=park", "train.use_gradient_checkpointing=off"],
            "park is a way of checkpointing, which",
        ),
        (
            ["memory.policy=last_k", "memory.policy_n=2", "train.use_gradient_checkpointing=off"],
            "last_k is a way of checkpointing, which",
        ),
        (
            ["train.use_gradient_checkpointing=off", "train.use_gradient_checkpointing_offload=on"],
            "turn both on, or the offload off",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(refusal, write, minimal, overrides, message):
    (line,) = refusal(write(minimal), overrides)
    assert message in line


def test_offload_without_checkpointing_is_reported_where_the_last_of_both_is_set(refusal, write, minimal):
    first, last = "train.use_gradient_checkpointing_offload=on", "train.use_gradient_checkpointing=off"
    for overrides in ([first, last], [last, first]):
        (line,) = refusal(write(minimal), overrides)
        assert line.startswith(f"{overrides[1]} (command line)")


def test_a_wrong_value_is_reported_though_a_later_one_replaces_it(refusal, write, minimal):
    path = write(f"train:\n  steps: wide\n  warmup_steps: ${{train.steps}}\n{minimal}")
    overrides = ["train.steps=5", "train.warmup_steps=1", "train.seed=a", "train.seed=1"]
    assert [line.split(";")[0] for line in refusal(path, overrides)] == [
        f"{path}:2 train.steps: got 'wide'",
        "train.seed=a (command line): got 'a'",
    ]


def test_very_many_problems_are_counted_and_the_first_ones_listed(refusal, write, minimal):
    path = write(minimal + "train:\n" + "".join(f"  key{number}: 1\n" for number in range(20_000)))
    *lines, rest = refusal(path)
    assert len(lines) == MAX_LINES
    assert lines[0].startswith(f"{path}:9 train.key0: ")
    assert rest == f"and {20_000 - MAX_LINES} more like these"


def test_every_problem_is_reported_at_once_what_was_written_in_its_order_then_what_is_missing(refusal, write):
    path = write("""\
modle:
  family: x
data:
  path: images
  width: wide
train:
  steps: 0
  learning_rat: 1
  warmup_steps: x
objective:
  shift: static
output: {}
""")
    assert [line.split(": ")[0] for line in refusal(path, ["train.seed=a", "rank=3"])] == [
        f"{path}:1 modle",
        f"{path}:5 data.width",
        f"{path}:7 train.steps",
        f"{path}:8 train.learning_rat",
        f"{path}:9 train.warmup_steps",
        f"{path}:11 objective.shift",
        "train.seed=a (command line)",
        "rank=3 (command line)",
        f"{path}:1 model.family",
        f"{path}:1 model.path",
        f"{path}:12 output.dir",
    ]


@pytest.mark.parametrize(
    "secret", ["swordfish", "swordfish${data.path}", "swordfish${", "${oc.env:swordfish}"]
)
@pytest.mark.parametrize("setting", ["train:\n  steps:", "logging:\n  wandb_mode:"])
def test_what_a_setting_refers_to_is_not_shown(refusal, write, minimal, monkeypatch, setting, secret):
    monkeypatch.setenv("DIFFSYNTH_LITE_SECRET", secret)
    path = write(f"{setting} ${{oc.env:DIFFSYNTH_LITE_SECRET}}\n{minimal}")
    assert "swordfish" not in " ".join(refusal(path))


def test_the_error_about_a_file_that_cannot_be_read_has_the_reason(write, minimal, monkeypatch):
    path = write(minimal)

    def refuse(self, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        load_config(path)
