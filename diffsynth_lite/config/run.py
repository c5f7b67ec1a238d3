"""The sections ``validation``, ``logging``, ``output`` and ``resume``: previews, metrics and files."""

from collections.abc import Iterator
from typing import Literal, TypeAlias

from pydantic import Field

from diffsynth_lite.config.model import Precision
from diffsynth_lite.config.settings import (
    Count,
    CountOrNone,
    Distinct,
    FilePath,
    Frames,
    Layers,
    Minutes,
    NonEmptyStr,
    Pixels,
    Problem,
    Seed,
    Settings,
)

AllowedChange: TypeAlias = Literal[
    "data",
    "train.learning_rate",
    "train.lr_scheduler",
    "train.warmup_steps",
    "train.steps",
    "train.max_grad_norm",
    "train.weight_decay",
    "train.adam_beta1",
    "train.adam_beta2",
    "train.adam_epsilon",
    "train.optimizer_options",
    "train.ema_decay",
    "train.micro_batch_size",
    "train.compile",
    "model.attention",
]


class ValidationSettings(Settings):
    """Previews and measurements before training, every so many steps, and at the end."""

    prompts: list[str] = Field(default=[])
    """Prompts sampled as previews; none turns previews off. Include some that the model knew before, to see
    that it keeps them."""

    model_path: FilePath | None = None
    """The pipeline that previews are generated with, as `model.path` is given, where that is not the trained
    one: train on a base model, and see the LoRA on the model that was distilled from it, with that model's
    steps and guidance. It must be of `model.family` and have the LoRA's layers. Its prompts are encoded by
    its own text encoder; its transformer is read only for previews, in the formats of `model`, and waits in
    host memory. `diffsynth-lite sample` uses `model.path`."""

    inputs: list[FilePath] = Field(default=[])
    """Files of images that previews start from, one for each prompt: for families that edit, that make
    clips from an image, or that decompose images into layers."""

    last_frames: list[FilePath] = Field(default=[])
    """Files of images that previews lead to, one for each prompt, with `inputs`: for Wan 2.2 I2V-A14B, and
    Wan 2.1 FLF2V, which without them leads back to the image that it starts from."""

    control: list[FilePath] = Field(default=[])
    """Files of control inputs of previews, one for each prompt, for families that take one: images, or for
    clips clips."""

    inpaint_masks: list[FilePath] = Field(default=[])
    """Files of masks, one for each prompt: white marks what is regenerated in `inputs`. For clips they may be
    clips."""

    faces: list[FilePath] = Field(default=[])
    """Files of clips of a face, one for each prompt, with `control`: for families that animate a
    character."""

    negative_prompt: str = " "
    """What previews are steered away from when `guidance_scale` is above 1."""

    every_steps: Count | None = None
    """Optimizer steps between previews; null makes them only before training and at the end."""

    num_inference_steps: int = Field(default=30, ge=1, le=10_000)
    """Denoising steps of a preview. Fewer is faster and coarser."""

    guidance_scale: float = Field(default=4.0, ge=0, le=1000)
    """How strongly previews follow their prompt. Above 1 each denoising step runs the model twice, unless the
    model knows the scale itself, as FLUX.1 dev does."""

    seed: Seed = 0
    """Decides the noise that previews and the validation loss start from, the same each time, so that only
    the training makes a difference; and which items `data.hold_out` takes."""

    width: Pixels | None = None
    """Width of previews in pixels; null is `data.width`, or the first of `data.sizes` or
    `data.resolutions`."""

    height: Pixels | None = None
    """Height of previews in pixels; null is that of the data; see `width`."""

    num_frames: Frames | None = None
    """Frames of a preview, for families that make clips; null takes the longest of the data."""

    num_layers: Layers | None = None
    """Layers that previews decompose their image into, for families that do that; null takes as many as the
    data have columns or folders of layers, or, where that is not known, the family's default."""

    data: FilePath | None = None
    """Folder of items with captions, kept out of training, for the fixed-noise loss; it is read like the
    first training source: folders of inputs or masks inside that one have the same place in this one. Null
    measures on those of `data.hold_out`, or without it on training items, and names the metric
    `train_fixed_noise_loss`."""

    loss_items: CountOrNone = 16
    """Items in the fixed-noise loss; 0 turns it off."""

    item_losses: CountOrNone = 20
    """Training items, evenly spread over the data, whose losses on fixed noise are recorded one by one, each
    at three noise levels: they show which items the LoRA learns, and which it does not. 20 take the 60
    forward passes of one preview with the default settings, each time; 0 turns it off."""

    scores: bool = False
    """Score the steps that are both evaluated and saved, to see which LoRA is the best one: each time and of
    the base up to 48 images are generated as previews are, of captions of held-out items (`data`, or
    `data.hold_out`), of `plain_prompts` and of captions of training items, 16 of each. They are compared by
    `score_models` on the CPU. The scores are in `scores.json`, the images in `previews/scores`."""

    plain_prompts: list[NonEmptyStr] = Field(default=[])
    """Prompts that do not name what is taught, but what is like it: they show what the LoRA leaves as it was.
    16 are best. None takes captions of sources with `preserve`, else captions of training items, in which
    `data.trigger` and the phrases that most of them have in common are left out."""

    score_models: list[FilePath] = Field(
        default=["facebook/dinov2-base", "google/siglip2-base-patch16-224"], min_length=2, max_length=2
    )
    """Two models that scores are made with, each a folder or a hub id: one that compares images (DINOv2), and
    one that compares images with prompts (SigLIP)."""

    use_ema: bool = True
    """Generate previews and measure the loss with the averaged weights where there are any
    (`train.ema_decay`), rather than with the trained ones."""

    def conflicts(self) -> Iterator[Problem]:
        for key in ("inputs", "last_frames", "control", "inpaint_masks", "faces"):
            files = getattr(self, key)
            if self.prompts and files and len(self.prompts) != len(files):
                message = f"{len(files)} for {len(self.prompts)} validation.prompts; give one for each prompt"
                yield Problem((key, "prompts"), message)
        if self.last_frames and not self.inputs:
            message = "needs inputs: a preview that ends with an image starts from one"
            yield Problem(("last_frames", "inputs"), message)


class LoggingSettings(Settings):
    """Where metrics are logged. They are always written to `metrics.jsonl` in the run folder."""

    every_steps: Count = 10
    """Optimizer steps between two logged rows."""

    trackers: Distinct[Literal["wandb", "tensorboard"]] = Field(default=[])
    """Services that get the numbers as well. They take their credentials from the environment."""

    project: NonEmptyStr = "diffsynth_lite"
    """Project that the trackers file the run under."""

    run_name: NonEmptyStr | None = None
    """Name of the run for trackers, and of the LoRA for programs that read its file; null lets the trackers
    choose, and calls the LoRA by its trigger word and its base model."""

    wandb_mode: Literal["online", "offline"] = "online"
    """`offline` needs no account: wandb writes to a folder, which `wandb sync` can upload later."""


class OutputSettings(Settings):
    """The run folder, which holds everything that a run writes, except the cache."""

    dir: FilePath
    """The run folder. A run that is already there is continued, as set by `resume.source`."""

    checkpoint_every_steps: Count = 250
    """Optimizer steps between checkpoints. The end of a run is always saved."""

    checkpoint_every_minutes: Minutes | None = None
    """Also save after so many minutes without a checkpoint; null saves by steps only."""

    keep_checkpoints: Count = 2
    """Newest checkpoints to keep. 2, so that the one before is still there should the last be damaged."""

    keep_every_steps: Count | None = None
    """Keep the checkpoints of every so many steps for good, a multiple of `checkpoint_every_steps`; null
    keeps only the newest."""

    keep_adapters: CountOrNone | Literal["all"] = "all"
    """LoRA files to keep of saves whose checkpoint is removed, so that steps can be compared and the best one
    used: `all`, or so many of the newest. They are in `checkpoints/lora-00000200` and so on, each of the size
    of `lora/`, about a sixth of a checkpoint. A run cannot be resumed from them."""

    keep_best: bool = True
    """Also keep the checkpoint with the lowest loss on held-out items (`validation.data`, `data.hold_out`),
    and write its LoRA to `lora_best/`. With `validation.scores` that is the LoRA of the saved step that the
    scores recommend, as far as they recommend one."""

    copy_to: FilePath | None = None
    """A folder that is there, such as ComfyUI's `models/loras`, into which the LoRA of each save is copied,
    too, as ComfyUI reads it: `RUN.safetensors`, by the name of the run folder, and of Wan 2.2 A14B
    `RUN-high_noise.safetensors` and `RUN-low_noise.safetensors`. A file that is not of this run is never
    replaced. Where a copy fails, as on a full disk, the run warns and goes on. Null copies nothing."""

    lora_dtype: Precision = "bfloat16"
    """Precision of the LoRA files. `bfloat16` and `float16` take half the space of `float32`; how much of the
    update is lost to rounding is logged at the end. Checkpoints are in float32, whatever this is, and a run
    that resumes from one may have another."""

    def conflicts(self) -> Iterator[Problem]:
        if self.keep_every_steps is not None and self.keep_every_steps % self.checkpoint_every_steps:
            message = (
                f"output.keep_every_steps {self.keep_every_steps} must be a multiple of "
                f"output.checkpoint_every_steps {self.checkpoint_every_steps}"
            )
            yield Problem(("keep_every_steps", "checkpoint_every_steps"), message)


class ResumeSettings(Settings):
    """Whether a run continues an earlier one."""

    source: FilePath = "auto"
    """`auto` continues the newest checkpoint in the run folder if there is one, `must` insists on one,
    `none` starts from scratch and wants an empty run folder, and anything else is the path of a checkpoint
    folder."""

    allow: Distinct[AllowedChange] = Field(default=[])
    """What may differ from the run that is continued, and would otherwise be an error. `data` is the whole
    data set with its sizes, crops and weights: the order of samples then changes from here on. Changes are
    recorded in `lineage.json`. A base model, an adapter's shape or a seed never changes: that is another
    run."""

    def conflicts(self) -> Iterator[Problem]:
        if self.allow and self.source == "none":
            message = "has no effect with resume.source none, which starts a new run; remove one of them"
            yield Problem(("allow", "source"), message)
