"""The sections ``train`` and ``memory``: how the LoRA is trained, and how memory is saved."""

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from diffsynth_lite.config.settings import (
    Blocks,
    BlocksAtLeastOne,
    Count,
    CountOrNone,
    Distinct,
    Gib,
    OptionName,
    OptionValue,
    Problem,
    Samples,
    Seed,
    Settings,
)

OptimizerName: TypeAlias = Literal["adamw", "adamw8bit", "muon", "adafactor", "prodigy", "schedule_free"]
_DottedName: TypeAlias = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+$", examples=["torch.optim.RAdam"])
]
ADAM_SETTINGS = ("adam_beta1", "adam_beta2", "adam_epsilon")
_SETTING_OF_OPTION = {
    "lr": "train.learning_rate",
    "weight_decay": "train.weight_decay",
    "params": "lora.target_modules",
}
_SETTING_OF_ADAM_OPTION = {"betas": "train.adam_beta1 and train.adam_beta2", "eps": "train.adam_epsilon"}


class TrainSettings(Settings):
    """The optimization. A step is always an optimizer step, however many micro-batches it takes."""

    steps: Count = 1000
    """Optimizer steps of the whole run. Samples seen = steps x `global_batch_size`."""

    seed: Seed = 0
    """Decides the LoRA's first weights, the order of the data, noise, noise levels and dropout. The same
    seed and config is the same run, on any number of devices and after any resume."""

    global_batch_size: Samples = 1
    """Samples per optimizer step, over all devices together. Must be a multiple of `micro_batch_size` x
    devices; what does not fit at once is accumulated."""

    micro_batch_size: Samples = 1
    """Samples per device in one forward. Raise it while memory allows: steps get faster. Where all items have
    one size the result is the same but for rounding (with LoRA dropout: but for other dropout masks); where
    there are several buckets, the samples come in another order."""

    micro_batch_tokens: Count | None = None
    """Most tokens in one forward, for data of several sizes: of small images or short clips as many samples
    go through at once as fit, of large ones fewer, but at least one. A token is a position that the
    transformer sees, in most families 16 x 16 pixels of an image; those of input images count too. A step
    then has `global_batch_size` / `micro_batch_size` forwards of as many samples as each holds. Null puts
    `micro_batch_size` in each."""

    optimizer: _DottedName | OptimizerName = "adamw"
    """The optimizer: one by its short name, or any other optimizer class for torch by its dotted name.
    [methods.md](methods.md) lists the settings and the package that each needs. A class whose state does not
    survive being saved and loaded, bit for bit, is refused at the start."""

    optimizer_options: dict[OptionName, OptionValue] = Field(default={})
    """Further arguments of the optimizer's class, by their names there, such as `{d_coef: 2.0}` for Prodigy
    or `{betas: [0.9, 0.99]}`."""

    learning_rate: float = Field(default=1e-4, gt=0, le=1)
    """Highest learning rate, after the warm-up. Lower it when previews fall apart, raise it when nothing is
    learned. `lora.groups` gives some of the layers another one. Prodigy finds its own and takes 1 here."""

    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"] = "constant"
    """How the learning rate goes from its highest value, after the warm-up, to the last step."""

    warmup_steps: CountOrNone = 0
    """Optimizer steps over which the learning rate rises to its highest value. In a run that is not longer it
    is shortened to all steps but the last, which is logged."""

    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """`adamw` and `adamw8bit`: how slowly the average of gradients moves."""

    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """`adamw` and `adamw8bit`: how slowly the average of squared gradients moves."""

    adam_epsilon: float = Field(default=1e-8, ge=1e-30, le=1)
    """`adamw` and `adamw8bit`: added to the denominator of the update."""

    weight_decay: float = Field(default=0.01, ge=0, le=100)
    """Pulls LoRA weights towards 0, by this share of the learning rate at each step."""

    max_grad_norm: float | None = Field(default=1.0, ge=1e-6, le=1e6)
    """Gradients with a larger norm, over all LoRA weights, are scaled down to it; null never does."""

    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Also keep a moving average of the LoRA's weights, of which each step leaves this part: 0.99 averages
    over some 100 steps, 0.999 over 1000. It smooths out the noise of single steps, most at a high learning
    rate, and is written to `lora_ema/`. In the first steps it decays faster: (1 + n) / (10 + n) after step n.
    Null keeps none."""

    mixed_precision: Literal["no", "bf16"] = "bf16"
    """Precision of the transformer's computation: `bf16` autocast, or the weights' own with `no`. The loss
    and the LoRA's weights are float32 either way. It wins over the launcher's setting."""

    use_gradient_checkpointing: bool = True
    """Keep only the inputs of the transformer's blocks, and run each block again in the backward pass: much
    less memory for the time of one more forward. The result is the same."""

    use_gradient_checkpointing_offload: bool = False
    """Keep these inputs in the memory of the host rather than of the device. For images so large that
    checkpointing is not enough. The result is the same."""

    context_parallel: int = Field(default=1, ge=1, le=1024)
    """Devices that share each sample: each computes a part of its tokens, and attention sees all of them. For
    clips so long, or images so large, that one device does not hold a step. `global_batch_size` counts as
    before, with a group of devices in place of one. The result is the same but for rounding. It must divide
    the processes of each machine, the tokens of every size, and with `ulysses` the heads of attention.
    Families whose model diffusers cannot split are refused, and so is `lora.dropout`. See
    [scaling.md](scaling.md)."""

    context_parallel_kind: Literal["ulysses", "ring"] = "ulysses"
    """How attention sees all tokens. `ulysses`: each device gets some heads of all tokens; prefer this one.
    `ring`: each attends to the keys and values of all devices in turn; for models with too few heads. Only on
    CUDA, not with prompts that are padded (Qwen-Image), and its outputs stay in memory despite gradient
    checkpointing."""

    compile: Literal["off", "blocks"] = "off"
    """Have torch compile the transformer's blocks (`blocks`): the first step takes longer, and kernels are
    fewer and larger from then on. Numbers differ from those of `off` in their last digits. Needs a compiler:
    g++ on the CPU, triton on CUDA. Off by default: no GPU has shown a gain yet. See
    [compile.md](compile.md)."""

    compile_cache: bool = False
    """Keep what `compile` made in `~/.cache/diffsynth_lite`, for later runs of the same model, LoRA and sizes
    with the same torch and device, which then start faster. torch runs what it finds there as code, so a file
    that another user of the machine may have written is refused:
    [compile.md](compile.md#is-compiled-code-kept)."""

    deterministic: bool = False
    """Take only kernels that give the same bits each time. On a GPU a resumed run's weights are then the same
    bit for bit, and so are those with other checkpointing and offload; set it in all parts of a run. Slower
    there, mostly in attention. The CPU is repeatable without."""

    step_timeout_minutes: float = Field(default=60.0, ge=0.01, le=43_200)
    """Longest that one optimizer step may take. After most of that time each process writes its stack to the
    standard error; then processes that wait for another one give up, and the run ends with an error instead
    of hanging. Caching, previews and checkpoints do not count."""

    max_hours: float | None = Field(default=None, gt=0, le=87_600)
    """Hours after which a run stops as on Ctrl+C: it finishes the step, saves, and exits with code 75. They
    count from the start of the program, with caching and previews, and are looked at after each step. Each
    start has its own, so the same command continues the run for as long again."""

    stop_after: Count | None = None
    """Stop a run, as `max_hours` does, after so many evaluations (`validation.every_steps`) whose loss on
    held-out items is not shown to be lower than that of the last one where it was: by Student's t over the
    differences of the single items, at 95 %. With `validation.scores` the scores of the steps that have some
    decide in place of the loss, by prompt. A larger number continues the run. Few items show little: hold out
    eight or more."""

    cpu_threads: int | None = Field(default=None, ge=1, le=1024)
    """Threads that torch may use on the CPU; null leaves it to torch. Very small models are fastest with
    1."""

    @property
    def warmup_in_run(self) -> int:
        """Optimizer steps of the warm-up as the run has it: at least one step is left at the highest rate."""
        return min(self.warmup_steps, self.steps - 1)

    @property
    def is_adam(self) -> bool:
        """Whether the optimizer is AdamW, in 32 bits or 8, which has settings of its own."""
        return self.optimizer in ("adamw", "adamw8bit")

    @property
    def rate_setting(self) -> str:
        """The setting, or value in one, that scales all updates of the weights."""
        return "d_coef of train.optimizer_options" if self.optimizer == "prodigy" else "train.learning_rate"

    def conflicts(self) -> Iterator[Problem]:
        yield from self._optimizer_conflicts()
        if self.global_batch_size % self.micro_batch_size:
            yield Problem(
                ("micro_batch_size", "global_batch_size"),
                f"train.micro_batch_size {self.micro_batch_size} must divide "
                f"train.global_batch_size {self.global_batch_size}",
            )
        if self.context_parallel_kind != "ulysses" and self.context_parallel == 1:
            yield Problem(
                ("context_parallel_kind", "context_parallel"),
                f"{self.context_parallel_kind} has no effect with train.context_parallel 1",
            )
        if self.use_gradient_checkpointing_offload and not self.use_gradient_checkpointing:
            yield Problem(
                ("use_gradient_checkpointing_offload", "use_gradient_checkpointing"),
                "the offload is a kind of checkpointing, which train.use_gradient_checkpointing turns off; "
                "turn both on, or the offload off",
                blames_last=True,
            )

    def _optimizer_conflicts(self) -> Iterator[Problem]:
        settings = _SETTING_OF_OPTION | (_SETTING_OF_ADAM_OPTION if self.is_adam else {})
        for option in sorted(self.optimizer_options.keys() & settings.keys()):
            message = f"train.optimizer_options: {option} is {settings[option]} here; set that"
            yield Problem(("optimizer_options",), message)
        if self.optimizer == "prodigy" and self.learning_rate != 1:
            message = (
                f"train.learning_rate {self.learning_rate:g}: prodigy multiplies the learning rate that it "
                "finds by it; set it to 1, and, where that turns out too small or too large, "
                "train.optimizer_options: {d_coef: 2.0} or {d_coef: 0.5}"
            )
            yield Problem(("learning_rate", "optimizer"), message)
        if self.optimizer == "schedule_free":
            yield from self._schedule_free_conflicts()

    def _schedule_free_conflicts(self) -> Iterator[Problem]:
        if self.lr_scheduler != "constant":
            message = (
                f"train.lr_scheduler {self.lr_scheduler}: schedule_free averages weights in place of a "
                "schedule; set it to constant (a warm-up is of use)"
            )
            yield Problem(("lr_scheduler", "optimizer"), message)
        if self.ema_decay is not None:
            message = (
                f"train.ema_decay {self.ema_decay:g}: the weights of schedule_free are an average already; "
                "set it to null"
            )
            yield Problem(("ema_decay", "optimizer"), message)


class MemorySettings(Settings):
    """Details of `train.use_gradient_checkpointing` and `train.use_gradient_checkpointing_offload`, and where
    the frozen weights are. None of them changes the result, so all may change when a run is resumed; the
    exceptions are the settings that `may_change` allows, which change it and stay as chosen."""

    auto: bool = False
    """When the run starts, choose the settings that change no result, whatever the config sets them to: both
    settings of gradient checkpointing, `policy`, `save_attention` and `stream_blocks`. The choice is the
    fastest, as estimated by `diffsynth-lite plan`, that fits the device (`device_gib`) and the host
    (`host_gib`). The choice, its reason, and how a step compares with the estimate are logged."""

    may_change: Distinct[Literal["quantize", "micro_batch_size"]] = Field(default=[])
    """Further settings that `auto` may choose for a new run although results change: `model.quantize`, only
    where nothing fits without it, and `train.micro_batch_size`, as it is or 1, 2, 4 or 8, whichever takes the
    least time per sample; `train.global_batch_size` stays. A resumed run keeps what its first start chose."""

    min_bytes: int | None = Field(default=None, ge=0, le=2**50)
    """Size in bytes of the smallest tensor that the offload and streaming move: small ones cost more time
    than they save memory. Null is 65536 on accelerators, and 0 on the CPU."""

    host_gib: Gib | None = None
    """Most host memory in GiB for each device: for its share of the weights that `stream_blocks` keeps there,
    which must fit, and for the offload, which takes what they leave. Inputs that do not fit stay on the
    device; it must be enough for one block. Null bounds only the offload, by half of the memory that is
    available when training starts, divided by the devices."""

    resident_blocks: Blocks = 1
    """Blocks whose inputs are still on the device: those that ran last. 0 saves the memory of one more, but
    computation may have to wait for the copies."""

    prefetched_blocks: Blocks = 1
    """Blocks whose inputs are fetched ahead in the backward pass. With 0 it waits for every one of them."""

    policy: Literal["all", "every_n", "skip", "only", "first_k", "last_k"] = "all"
    """Which blocks are checkpointed; the others keep their activations, which costs memory and saves time.
    `every_n`: blocks 0, n, 2n and so on; `first_k` and `last_k`: n blocks at one end; `only` those listed;
    `skip`: all but those listed. Where some memory is left, `first_k` makes the best use of it."""

    policy_n: BlocksAtLeastOne | None = None
    """The n of `every_n`, `first_k` and `last_k`, which need it."""

    policy_blocks: Distinct[Blocks] = Field(default=[])
    """The blocks of `skip` and `only`, which need them: their places in the model, from 0."""

    save_attention: Literal["no", "keep", "park"] = "no"
    """Save what attention computes in the checkpointed blocks, so that it is not computed twice: on the
    device (`keep`), or in the memory of the host (`park`). It pays most where images are large."""

    stream_blocks: Blocks | Literal["all", "auto"] = 0
    """Blocks of the transformer whose frozen weights live in host memory, and visit the device when the block
    runs: a number of them, evenly spread, `all`, or as few as let the steps fit the device (`auto`). For
    models that are too large for the device; the copies overlap with the computation. The result is the same.
    With two experts, as in Wan 2.2, that many of each. The processes of a machine share one copy in host
    memory."""

    stream_slots: BlocksAtLeastOne = 2
    """Blocks whose streamed weights are on the device at once: one computes, the others are fetched ahead.
    With 1 the computation waits for every copy. Must be less than `stream_blocks`. Of layers of a text
    encoder that is streamed, that many."""

    shard_base: Literal["no", "node", "all"] = "no"
    """Shard the frozen weights over the processes of a run, so that each device holds its share of them and,
    whole, the block that runs: over those of each machine (`node`), whose devices exchange them faster, or
    over all (`all`). The LoRA stays whole on each. For models that are too large for one device, where there
    are several. The result is the same. Not together with `stream_blocks`. See [scaling.md](scaling.md)."""

    device_gib: Gib | None = None
    """Most device memory in GiB that training steps may take, by estimate, for `auto` and
    `stream_blocks: auto`. Null is nine tenths of the memory that is free when training starts; on the CPU
    there is no limit."""

    stream_text_encoder: bool = False
    """Keep the weights of the text encoder's transformer layers in host memory while prompts are encoded, and
    bring each layer to the device when it runs, `stream_slots` at once. For text encoders that are too large
    for the device. The encoded prompts are the same, bit for bit."""

    skip_dead_ops: bool = True
    """Leave out of the second run of a block the matrix products whose results no gradient needs: in LoRA
    training the last one of a feed-forward part or block, where the model family names it and the block's
    modulation has no LoRA."""

    def conflicts(self) -> Iterator[Problem]:
        for key, is_set, policies in (
            ("policy_n", self.policy_n is not None, ("every_n", "first_k", "last_k")),
            ("policy_blocks", bool(self.policy_blocks), ("skip", "only")),
        ):
            if self.policy in policies and not is_set:
                yield Problem(("policy", key), f"{self.policy} needs memory.{key}")
            elif is_set and self.policy not in policies:
                yield Problem((key, "policy"), f"has no effect with memory.policy {self.policy}")
        if self.shard_base != "no" and self.stream_blocks != 0:
            message = (
                f"memory.shard_base {self.shard_base} keeps each device's share of the weights there, and "
                f"memory.stream_blocks {self.stream_blocks} keeps all of them on the host; set one of the two"
            )
            yield Problem(("shard_base", "stream_blocks"), message)
        if self.may_change and not self.auto:
            yield Problem(("may_change", "auto"), "has no effect without memory.auto: true")
        if isinstance(self.stream_blocks, int) and 0 < self.stream_blocks <= self.stream_slots:
            message = (
                f"memory.stream_blocks {self.stream_blocks} would all stay in memory.stream_slots "
                f"{self.stream_slots}, and nothing would be saved; stream more blocks, or take fewer slots"
            )
            yield Problem(("stream_blocks", "stream_slots"), message)
