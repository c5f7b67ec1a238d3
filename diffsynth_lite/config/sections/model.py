"""The sections ``model`` and ``lora``: what is trained."""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from diffsynth_lite.config.field_type import NotEmpty, Range
from diffsynth_lite.config.settings import Settings

Precision: TypeAlias = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """The pretrained pipeline that the LoRA is trained on. All of its weights stay frozen."""

    family: Annotated[str, NotEmpty()]
    """Which code runs the model: the name of a file under `diffsynth_lite/pipelines/`, such as `qwen_image`,
    or the dotted path of a module of your own, such as `my_package.my_family`."""

    path: Annotated[str, NotEmpty()]
    """The pipeline: a local folder in the diffusers layout (it holds `model_index.json`), or a hub id such
    as `Qwen/Qwen-Image`. A local folder of that name is preferred."""

    revision: Annotated[str | None, NotEmpty()] = None
    """Branch, tag or commit of a hub id; null is its main branch. Set a commit to be sure that a later run
    gets the same weights."""

    variant: Annotated[str | None, NotEmpty()] = None
    """Which weight files to load where a pipeline has several, such as `fp16`; null loads the plain ones.
    All components of the pipeline must have it."""

    dtype: Precision = "bfloat16"
    """How the frozen transformer is kept in memory: 2 bytes a parameter, or 4 for `float32`. LoRA weights
    are float32 whatever this says."""

    text_encoder_dtype: Precision = "bfloat16"
    """How the text encoder is kept while prompts are encoded; it is freed before training starts."""

    vae_dtype: Precision = "float32"
    """How the VAE is kept while images are encoded and previews decoded. VAEs are small and lose detail in
    16 bits: change this only when a large picture does not fit."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings(Settings):
    """The low-rank matrices that are trained (Hu et al. 2021, arXiv:2106.09685)."""

    rank: Annotated[int, Range(at_least=1)] = 32
    """Rank of the matrices. More learns finer detail and makes a larger file; 8 to 64 is usual."""

    alpha: Annotated[float | None, Range(above=0)] = None
    """Scale: the LoRA's output is multiplied by alpha / rank. Null means the rank itself, a factor of 1."""

    init_from: Annotated[str | None, NotEmpty()] = None
    """A LoRA that a new run starts from: its file, or its folder, in diffusers' format. Its layers, rank and
    alpha must be this run's. Its optimizer starts anew: to continue a run of yours, start it again with its
    `output.dir`. Null starts from a LoRA that changes nothing."""

    dropout: Annotated[float, Range(at_least=0, below=1)] = 0.0
    """Share of the LoRA's inputs set to zero at each training step. A little, such as 0.05, works against
    learning a small set of images by heart."""

    components: Annotated[list[str] | None, NotEmpty()] = None
    """Folders of the pipeline that get a LoRA; null takes what the family trains by default. For most models
    that is `transformer`, and the only choice. Wan 2.2 14B has two, `transformer` for high noise and
    `transformer_2` for low, trained together or each in a run of its own; SDXL adds `text_encoder` and
    `text_encoder_2` to its `unet`."""

    target_modules: Annotated[list[str] | None, NotEmpty()] = None
    """Names, or endings of names, of the linear layers that get a LoRA, such as `[to_q, to_k, to_v]`; null
    takes the family's own list. An entry that matches no layer is an error."""
