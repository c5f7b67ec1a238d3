"""The sections ``model``, ``lora`` and ``objective``: what is trained, and on which noise levels."""

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from diffsynth_lite.config.settings import Distinct, FilePath, NonEmptyStr, Problem, Settings
from diffsynth_lite.config.slider import SliderSettings

Precision: TypeAlias = Literal["bfloat16", "float16", "float32"]
TargetSet: TypeAlias = Literal["attention", "all"]
AttentionBackend: TypeAlias = Literal[
    "native",
    "_native_cudnn",
    "_native_efficient",
    "_native_flash",
    "_native_math",
    "flash",
    "flash_varlen",
    "_flash_varlen_3",
    "xformers",
]
# The densities that each setting belongs to; with another one it would do nothing.
_LOGIT_NORMAL = ("logit_normal", "stretched_logit_normal")
_DENSITIES_OF = {"logit_mean": _LOGIT_NORMAL, "logit_std": _LOGIT_NORMAL, "mode_scale": ("mode",)}

# Settings that do not apply to a LoKr, and why.
_NOT_WITH_LOKR = {
    "use_rslora": "has no such scale, as the rank is that of one of its two factors",
    "init": "has no pair of matrices",
    "loraplus_ratio": "has no second matrices",
    "dropout": "drops no inputs in peft, but rows of the weight, or layers",
}


class ModelSettings(Settings):
    """The pretrained pipeline that the LoRA is trained on. All of its weights stay frozen."""

    family: NonEmptyStr
    """Which code runs the model: the name of a file under `diffsynth_lite/pipelines/`, such as `qwen_image`,
    or the dotted path of a module of your own, such as `my_package.my_family`."""

    path: FilePath
    """The pipeline: a local folder in the diffusers layout (it holds `model_index.json`, or
    `modular_model_index.json`, whose components may lie in other repositories), or a hub id such as
    `Qwen/Qwen-Image`. A local folder of that name is preferred."""

    revision: NonEmptyStr | None = None
    """Branch, tag or commit of a hub id; null is its main branch. Set a commit to be sure that a later run
    gets the same weights."""

    variant: NonEmptyStr | None = None
    """Which weight files to load where a pipeline has several, such as `fp16`; null loads the plain ones, or
    those that a modular index names. All components of the pipeline must have it."""

    transformer_file: FilePath | None = None
    """A safetensors or GGUF file that the transformer's weights are read from, in place of those of `path`,
    which are then not needed and not downloaded: names as in diffusers, or as in the model's own repository
    and in ComfyUI; in 16 or 32 bits, fp8 or fp8_scaled. Of a checkpoint of SDXL the text encoders and the VAE
    are read, too. It must be on this machine. All else is that of `path`, which must be a pipeline of the
    same model: [base-model.md](base-model.md#from-one-file)."""

    transformer_2_file: FilePath | None = None
    """The same for the second of two experts: in Wan 2.2 14B the one for low noise."""

    training_adapter: FilePath | None = None
    """A LoRA that is on the model while it trains, frozen, and neither in previews nor in the trained LoRA:
    its file or folder, with any layer names that `diffsynth-lite convert` reads. For distilled models, whose
    adapters undo the distillation during training, such as `ostris/zimage_turbo_training_adapter`:
    [methods.md](methods.md#distilled-models)."""

    dtype: Precision = "bfloat16"
    """How the frozen transformer is kept in memory: 2 bytes a parameter, or 4 for `float32`. LoRA weights are
    float32 in any case."""

    quantize: Literal["none", "int8", "int8_convrot", "nf4"] = "none"
    """How the linear layers in the frozen transformer's blocks are kept: in `dtype`, in 8 bits a weight
    (`int8`; or `int8_convrot`, for columns of large numbers and ComfyUI's INT8 ConvRot files), or in 4.5
    (`nf4`; it needs `pip install bitsandbytes`). The rest stays in `dtype`, and so do the numbers that are
    computed. What this saves and costs: [base-model.md](base-model.md)."""

    quantize_skip: Distinct[NonEmptyStr] = Field(default=[])
    """Layers of the blocks that `quantize` leaves as they are: names and endings of names, such as
    `[to_out.0, ff.net.2]`, with `*` for one part, as in `lora.target_modules`."""

    attention: AttentionBackend | None = None
    """The kernel that computes attention in the trained model, by the name that diffusers has for it; null
    leaves the choice to torch, as `native` does. `flash`, `flash_varlen` and `_flash_varlen_3` need packages
    of flash-attention, `xformers` needs its own. Numbers differ in their last digits. It is tried on the
    device before anything loads: [compile.md](compile.md#which-kernel-computes-attention)."""

    text_encoder_dtype: Precision = "bfloat16"
    """How the text encoder is kept while prompts are encoded; it is freed before training starts."""

    text_encoder_quantize: Literal["none", "int8", "nf4"] = "none"
    """How the linear layers in the text encoder's transformer layers are kept: in `text_encoder_dtype`,
    or in fewer bits, as with `quantize`. Prompts are encoded a little differently then; to avoid that, use
    `memory.stream_text_encoder`."""

    vae_dtype: Precision = "float32"
    """How the VAE is kept while images are encoded and previews decoded. VAEs are small and lose detail in
    16 bits: change this only when a large image does not fit."""

    vae_tiling: bool = False
    """Whether the VAE encodes images and clips, and decodes previews, in tiles of 256 or 512 pixels that
    overlap, which needs a fraction of the memory. The results differ slightly: [memory.md](memory.md) has by
    how much, and how much memory is saved. Otherwise previews are decoded in tiles only where they do not fit
    whole."""

    @property
    def has_own_attention(self) -> bool:
        """Whether attention is computed by a kernel that is not torch's."""
        return self.attention is not None and "native" not in self.attention

    @property
    def saves_attention(self) -> bool:
        """Whether what attention computes can be saved: by a fused kernel of torch's."""
        return not self.has_own_attention and self.attention != "_native_math"

    def conflicts(self) -> Iterator[Problem]:
        if self.quantize == "none" and self.quantize_skip:
            yield _without_effect("model.quantize_skip", "model.quantize", "none", "int8 or nf4")


class LoraGroup(Settings):
    """Layers that are trained with other settings than the rest. A setting that is null is as for the
    rest."""

    match: NonEmptyStr
    """Which layers: those in whose names these parts follow one another, anywhere. A component, such as
    `transformer_2` or `text_encoder`; blocks, such as `transformer_blocks.0-9`; a part of all blocks, such as
    `attn.to_q`. `*` matches any one part, and `0-9` a number from 0 to 9. Where several entries match a layer
    the first one applies; an entry left without layers is an error."""

    learning_rate: float | None = Field(default=None, gt=0, le=1)
    """In place of `train.learning_rate`; warm-up and schedule are the same."""

    weight_decay: float | None = Field(default=None, ge=0, le=100)
    """In place of `train.weight_decay`."""

    rank: int | None = Field(default=None, ge=1, le=8_192)
    """In place of `lora.rank`."""

    alpha: float | None = Field(default=None, ge=1e-6, le=1e6)
    """In place of `lora.alpha`. Where that is null, too, it is the rank of the entry."""

    def conflicts(self) -> Iterator[Problem]:
        if all(getattr(self, key) is None for key in LoraGroup.defaults()):
            message = f"lora.groups: {self.match} is trained as the rest; give it a learning_rate or a rank"
            yield Problem(("match",), message)


class LoraSettings(Settings):
    """The low-rank matrices that are trained (Hu et al. 2021, arXiv:2106.09685)."""

    kind: Literal["lora", "lokr", "dora"] = "lora"
    """What trains next to each layer: two matrices of low rank (`lora`), the factors of a Kronecker product
    (`lokr`), or a LoRA and the norms of the weight's rows (`dora`). When to use which, their cost, and which
    programs read them: [methods.md](methods.md#adapters)."""

    rank: int = Field(default=32, ge=1, le=8_192)
    """Rank of the matrices. More learns finer detail and makes a larger file; 8 to 64 is usual."""

    alpha: float | None = Field(default=None, ge=1e-6, le=1e6)
    """Scale: the LoRA's output is multiplied by alpha / rank. Null means the rank itself, a factor of 1."""

    use_rslora: bool = False
    """Whether the output is multiplied by alpha / sqrt(rank) instead, so that a rank of any size learns about
    as fast (rsLoRA; Kalajdzievski 2023, arXiv:2312.03732). Set `alpha` with it: null is a factor of
    sqrt(rank). The exported file has the factor in its matrices."""

    init: Literal["default", "orthogonal"] = "default"
    """How the two matrices start: the second one at zero, or both with numbers, orthogonal to each other so
    that their product is zero but for rounding. `orthogonal` needs an even rank."""

    lokr_factor: int | None = Field(default=None, ge=2, le=1_024)
    """Size of the smaller factor of a `lokr`, where it divides the sides of a weight: 16 splits 3072 into 16
    and 192. Less makes a larger file. Null takes the divisors nearest to the square root. The larger factor
    has `rank`, or is trained whole where that is half of its longer side or more."""

    init_from: FilePath | None = None
    """A LoRA that a new run starts from: its file, the folder of it or of its run, or a file of another
    trainer, by any names that `diffsynth-lite convert` reads. It must be on this run's layers and have its
    rank; where its alpha is another, it is scaled to do the same. Its optimizer starts from scratch: to
    continue a run of yours, start it again with its `output.dir`. Null starts from a LoRA that changes
    nothing."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the LoRA's inputs set to zero at each training step. A little, such as 0.05, works against
    overfitting to a small set of images."""

    components: Distinct[NonEmptyStr] | None = Field(default=None, min_length=1)
    """Folders of the pipeline that get a LoRA; null takes what the family trains by default. For most models
    that is `transformer`, and the only choice. Wan 2.2 14B has two, `transformer` for high noise and
    `transformer_2` for low, trained together or each in a run of its own; SDXL adds `text_encoder` and
    `text_encoder_2` to its `unet`."""

    target_modules: Annotated[Distinct[NonEmptyStr], Field(min_length=1)] | TargetSet | None = None
    """The linear layers that get a LoRA: `attention` (its projections), `all` (those of the blocks), or a
    list of these words, names, and endings of names, such as `[to_q, to_k, to_v]`; null takes the family's
    default. [models.md](models.md) lists these for each family. In a name `*` matches one part, such as the
    number of a block (`single_transformer_blocks.*.proj_out`), and `0-9` a number from 0 to 9. An entry that
    matches no layer is an error."""

    target_blocks: Annotated[Distinct[NonEmptyStr], Field(min_length=1)] | None = None
    """Only layers of these blocks get a LoRA, such as `[transformer_blocks.0-9]`: parts that follow one
    another in a layer's name, as in `match` of `groups`. Null takes all blocks. An entry that matches no
    layer is an error."""

    loraplus_ratio: float = Field(default=1.0, ge=1, le=1_000)
    """Factor on the learning rate of the second matrix of each pair (LoRA+; Hayou et al.
    2024, arXiv:2402.12354, whose authors recommend 16). 1 is plain LoRA. The learning rate is that of the
    first matrix, and may have to be lower than without."""

    groups: list[LoraGroup] = Field(default=[])
    """Layers with another learning rate, weight decay, rank or alpha, such as an expert of Wan 2.2:
    `[{match: transformer, learning_rate: 3e-5}]`."""

    def conflicts(self) -> Iterator[Problem]:
        if self.kind != "lokr" and self.lokr_factor is not None:
            yield _without_effect("lora.lokr_factor", "lora.kind", self.kind, "lokr")
        if self.kind == "lokr":
            for key, instead in _NOT_WITH_LOKR.items():
                if not self.is_default(key):
                    message = f"is not for a LoKr, which {instead}; leave it out, or set lora.kind: lora"
                    yield Problem((key, "kind"), message)
        if self.init_from is not None and self.init != "default":
            yield _without_effect("lora.init", "lora.init_from", "given", "null")
        ranks = [self.rank, *(group.rank for group in self.groups if group.rank is not None)]
        if self.init == "orthogonal" and any(rank % 2 for rank in ranks):
            message = "gives each half of the rank directions of its own; take an even rank"
            yield Problem(("init", "rank"), message)


class ObjectiveSettings(Settings):
    """The model sees an image mixed with noise, at a noise level sigma between 0 (clean) and 1 (only noise),
    and learns to predict what takes one to the other. With SDXL sigma is the timestep as a fraction of all
    timesteps."""

    timestep_density: Literal["uniform", "logit_normal", "stretched_logit_normal", "mode", "cosmap"] = (
        "uniform"
    )
    """How noise levels are drawn, before the shift: uniformly, or with more weight on some, as in Stable
    Diffusion 3 (Esser et al. 2024, arXiv:2403.03206, section 3.1). `stretched_logit_normal` is that of
    Lightricks' LTX-2 trainer: the shift moves the centre of a `logit_normal`, the range between its 0.5 % and
    99.9 % percentiles is then stretched to 0 to 1, and one level of ten is drawn uniformly."""

    logit_mean: float = Field(default=0.0, ge=-100, le=100)
    """Centre of `logit_normal` and `stretched_logit_normal`: 0 favours sigma 0.5, above 0 more noise, below 0
    less. A shift s has the same effect as adding log(s)."""

    logit_std: float = Field(default=1.0, ge=0.001, le=100)
    """Width of `logit_normal` and `stretched_logit_normal`: less than 1 stays closer to the centre."""

    mode_scale: float = Field(default=1.29, ge=-1, le=1.75)
    """Strength of `mode`: above 0 favours the middle, below 0 both ends, 0 is uniform."""

    shift: Literal["family", "none", "static", "resolution"] = "family"
    """How drawn noise levels are moved towards more noise, which larger images need: by the model family's
    default, which docs/models.md gives with its reason; not at all; by `shift_value`; or as its sampler does
    by the number of image tokens. `diffsynth-lite doctor` shows the resulting levels."""

    shift_value: float | None = Field(default=None, ge=0.001, le=1000)
    """The static shift s: sigma becomes s * sigma / (1 + (s - 1) * sigma). Above 1 trains more at high
    noise; 3 is common."""

    sigma_min: float = Field(default=0.0, ge=0, lt=1)
    """Lowest noise level trained on, after the shift. Raise it to learn composition rather than texture."""

    sigma_max: float = Field(default=1.0, gt=0, le=1)
    """Highest noise level trained on, after the shift. Lower it to learn texture rather than composition."""

    loss: Literal["mse", "huber"] = "mse"
    """How an error counts: its square (`mse`), or the square of small errors and the size of larger ones
    (`huber`), so that single items with large errors, such as wrong captions, pull less. The losses on fixed
    noise are squared errors with both, so that they compare."""

    huber_delta: float = Field(default=0.1, ge=1e-4, le=1e3)
    """The error beyond which `huber` is linear: e^2 below, 2 delta e - delta^2 above. 0.1 is what diffusers'
    scripts and kohya's take. With flow matching an error is one of noise minus image, both about 1 in size:
    most are then in the linear part, and with 1 few are."""

    loss_weighting: Literal["none", "sigma_sqrt", "cosmap", "bell", "min_snr"] = "none"
    """How much a noise level counts in the loss: all equally, 1 / sigma^2 (diffusers calls this
    `sigma_sqrt`), the cosine map of the same paper, most in the middle (`bell`), or by the ratio of signal to
    noise, cut off (`min_snr`; Hang et al. 2023, arXiv:2303.09556). SDXL has `none` and `min_snr`."""

    min_snr_gamma: float = Field(default=5.0, ge=0.001, le=1e6)
    """Where `min_snr` cuts the ratio of signal to noise off; 5 is the paper's."""

    audio_loss_weight: float = Field(default=1.0, ge=0, le=1e6)
    """With `data.audio`, how much the audio error counts relative to that of the frames: the loss of a
    sample is the mean error of its images plus this times that of its audio. 0 gives the model the audio
    and learns from the frames only."""

    audio_noise: Literal["shared", "own"] = "shared"
    """With `data.audio`, the noise level of a clip's audio: that of the clip, or the one that the sampler of
    MiniMax-H3 has for audio then (`shared`); or one that is drawn for it, with the shift for its own number
    of tokens, where there is another (`own`). [models.md](models.md#ltx2) lists which trainers do which."""

    guidance_target: float | None = Field(default=None, gt=1, le=100)
    """For models that are distilled to be used without classifier-free guidance: learn the prediction under
    guidance of this scale, `u + g (v - u)`, in place of v, the target from the data. u is the model's own
    output for an empty prompt, with the LoRA as it is by then; that takes one more forward pass. 3 to 4 is
    usual. Models that take a guidance scale as input, such as FLUX.1 dev, get this one. Null learns from the
    data only: [methods.md](methods.md#distilled-models)."""

    slider: SliderSettings | None = None
    """Learn a slider from prompts, a LoRA whose strength moves one property, in place of images with
    captions; `data` may then be left out. Null learns from the data."""

    def conflicts(self) -> Iterator[Problem]:
        for key, densities in _DENSITIES_OF.items():
            if self.timestep_density not in densities and not self.is_default(key):
                yield _without_effect(
                    f"objective.{key}",
                    "objective.timestep_density",
                    self.timestep_density,
                    " or ".join(densities),
                )
        if self.loss != "huber" and not self.is_default("huber_delta"):
            yield _without_effect("objective.huber_delta", "objective.loss", self.loss, "huber")
        if self.loss_weighting != "min_snr" and not self.is_default("min_snr_gamma"):
            yield _without_effect(
                "objective.min_snr_gamma", "objective.loss_weighting", self.loss_weighting, "min_snr"
            )
        if self.shift != "static" and self.shift_value is not None:
            yield _without_effect("objective.shift_value", "objective.shift", self.shift, "static")
        if self.shift == "static" and self.shift_value is None:
            message = "objective.shift static needs objective.shift_value, such as 3.0"
            yield Problem(("shift", "shift_value"), message)
        if self.sigma_min >= self.sigma_max:
            message = (
                f"objective.sigma_min {self.sigma_min} must be less than objective.sigma_max {self.sigma_max}"
            )
            yield Problem(("sigma_min", "sigma_max"), message)


def _without_effect(key: str, owner: str, value: str, wanted: str) -> Problem:
    section, _, name = owner.partition(".")
    message = f"{key} has no effect with {owner} {value}; remove it, or set {name}: {wanted}"
    return Problem((key.removeprefix(f"{section}."), name), message)
