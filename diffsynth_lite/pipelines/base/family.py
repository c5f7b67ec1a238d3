"""What a model family offers to the trainer. Latents have no layout here: a family's file has its axes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch

from diffsynth_lite.core.noise.paths import FlowMatchingPath, NoisePath
from diffsynth_lite.core.parallel import ContextParallel, SequenceSplit
from diffsynth_lite.core.weights.frozen_linear import Quantization
from diffsynth_lite.core.weights.packing import HostBlocks
from diffsynth_lite.core.weights.sharding import BaseShards
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.layer_names import LoraLayers
from diffsynth_lite.lora.spelling import DIFFUSERS, Spelling
from diffsynth_lite.media import Generated, Media, Prompt, RecordKind
from diffsynth_lite.pipelines.base.folder import ComponentFile, PipelineFolder
from diffsynth_lite.pipelines.base.lora_files import LoraFiles
from diffsynth_lite.pipelines.base.mixins import EditInputs
from diffsynth_lite.pipelines.base.preview_request import Conditioning as Conditioning
from diffsynth_lite.pipelines.base.preview_request import PreviewRequest as PreviewRequest
from diffsynth_lite.pipelines.base.text_encoders import TextEncoderMemory
from diffsynth_lite.pipelines.base.vae_tiles import VaeTiles
from diffsynth_lite.releases import Release

EncodedMedia = dict[str, torch.Tensor]
"""What training needs of one item's media, on the CPU, without a batch axis: ``latents``, normalised, fp32,
``loss_mask`` where not all of them are learned, (1, ...) at their size, ``audio_latents`` of a clip that is
learned with its audio, and whatever else the transformer is conditioned on, which joins the conditioning of
its prompt."""

TargetSets = Mapping[str, tuple[str, ...]]
"""Names of linear layers, or endings of them, by the name of the set."""


class ModelFamily(ABC):
    """A model family, bound to one pipeline folder.

    Class attributes are the training facts of the family; methods load one component at a time, so that an
    encoder is never in memory together with the transformer.

    Attributes:
        pipeline_classes: class names of which the folder's index must give one.
        releases: the released models that are known of it; none unless a family names its own.
        notice: what all who train it must know, such as whom its licence excludes: a run logs it once.
        starting_recipes: the config that a run starts from, for each kind of data: one of ``configs/``, or a
            file next to the family's own.
        lora_spelling: the names of layers in its LoRA files; diffusers' by default.
        lora_layers: the layers that files of other programs may have, by all their names; a family that gives
            none reads only files with diffusers' names on the layers that it trains.
        frame_step: frame counts must be k * ``frame_step`` + ``frame_rest``; None of families of images only.
        unused_in_last_block: endings of names in the last block whose output nobody uses.
        blocks_by_hook: whether diffusers' hook for gradient checkpointing runs the blocks.
        unused_matmuls: names of layers in the blocks whose results no gradient needs as long as the gate that
            they are multiplied with does not train; the recompute then leaves their products out.
        refused_in_prompts: texts that its pipeline refuses in prompts, as they are placeholders of an image
            or a video.
        sequence_split: how context parallelism splits its model; None where it cannot.
        dispatches_attention: whether the attention of its model is by the kernel that it is to take.
        masks_attention: whether it has a mask: never, for padding that a batch adds to shorter prompts, or
            always.
        default_num_layers: of a preview unless the user or the data set it; 0 in families without layers.
        splits_batches: whether ``predict`` runs the model once for each length of prompts in a batch.
        is_counted_by_few_blocks: whether the memory of all blocks can be estimated from a few, each called
            with the output of the last one.
        quantization: of the blocks of the trained models, by names within each; None is none. A run sets it.
        host_blocks: of these models, loaded to host memory; None is none. A run sets it while it loads them.
        shards: over which all models that remove noise are spread; None is over none. A run sets it.
        context: by which all these models are split over processes; None leaves them whole. A run sets it.
        text_encoder_memory: how text encoders are kept while they encode. A run sets it, too.
        vae_tiles: that the autoencoder works in; None leaves images and clips whole. A run sets it, too.
        training_guidance: guidance scale given in training to a model that takes one; 1 is none. A run sets
            it.
        with_audio: whether clips are trained and generated with their audio, which those of a family that is
            ``WithAudio`` have. A run sets it.
        with_controls: whether the data name controls of their items. A run sets it.
        control_downscale: pixels of an item to one of its control, on each axis; other than 1 only where
            ``takes_small_controls``. A run sets it.
        takes_small_controls: whether controls may have fewer pixels than what they guide.
        takes_faces: whether each clip has a control, and a clip of the face in it.
        keeps_padding: whether the cache holds the padding of prompts, which the model sees: as many rows of
            each prompt as of the longest.
        num_other_rows: of each prompt in the cache, in addition to ``max_prompt_tokens``.
    """

    pipeline_classes: ClassVar[tuple[str, ...]]
    releases: ClassVar[tuple[Release, ...]] = ()
    notice: ClassVar[str | None] = None
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {}
    lora_spelling: ClassVar[Spelling] = DIFFUSERS
    lora_layers: ClassVar[LoraLayers] = {}
    tokenizers: ClassVar[tuple[str, ...]] = ("tokenizer",)
    frame_step: ClassVar[int | None] = None
    frame_rest: ClassVar[int] = 1
    unused_in_last_block: ClassVar[tuple[str, ...]] = ()
    unused_matmuls: ClassVar[tuple[str, ...]] = ()
    refused_in_prompts: ClassVar[tuple[str, ...]] = ()
    blocks_by_hook: ClassVar[bool] = True
    splits_batches: ClassVar[bool] = False
    sequence_split: ClassVar[SequenceSplit | None] = None
    dispatches_attention: ClassVar[bool] = True
    masks_attention: ClassVar[Literal["never", "padding", "always"]] = "padding"
    default_num_layers: ClassVar[int] = 0
    is_counted_by_few_blocks: ClassVar[bool] = True
    takes_small_controls: ClassVar[bool] = False
    takes_faces: ClassVar[bool] = False
    keeps_padding: ClassVar[bool] = False
    num_other_rows: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Those of the family that it is made from are of other pipelines.
        if "releases" not in vars(cls):
            cls.releases = ()
        if "starting_recipes" not in vars(cls):
            cls.starting_recipes = {}

    def __init__(self, folder: PipelineFolder, *, trained: Sequence[str] | None = None) -> None:
        """Bind the family to a folder.

        Args:
            trained: which of ``trainable`` get a LoRA; None takes ``trained_by_default``.
        """
        self.folder = folder
        given = trained or self.trained_by_default
        if unknown := set(given) - set(self.trainable):
            raise UserError(
                f"lora.components: {', '.join(sorted(unknown))} cannot be trained; "
                f"this pipeline has {', '.join(self.trainable)}"
            )
        self.trained = tuple(name for name in self.trainable if name in given)
        self.quantization: Quantization | None = None
        self.host_blocks: HostBlocks | None = None
        self.shards: BaseShards | None = None
        self.context: ContextParallel | None = None
        self.text_encoder_memory = TextEncoderMemory()
        self.vae_tiles: VaeTiles | None = None
        self.training_guidance = 1.0
        self.with_audio = False
        self.with_controls = False
        self.control_downscale = 1

    @property
    @abstractmethod
    def components(self) -> tuple[str, ...]:
        """Folders whose weights training and previews need; most families give it as a plain attribute."""

    @property
    def text_encoders(self) -> tuple[str, ...]:
        """Those of ``components`` that read prompts, in their order."""
        return tuple(name for name in self.components if name.startswith("text_encoder"))

    @property
    def components_without_weights(self) -> tuple[str, ...]:
        """Folders without weights that training and previews need."""
        return ("scheduler", *self.tokenizers)

    @property
    @abstractmethod
    def block_lists(self) -> tuple[str, ...]:
        """Where the first of ``trained`` holds its blocks, in call order; often a plain attribute."""

    @property
    @abstractmethod
    def default_target_modules(self) -> tuple[str, ...]:
        """Endings of the names of the linear layers that get a LoRA; often a plain attribute.

        A ``*`` matches one part of a name, such as the number of a block.
        """

    @property
    def target_sets(self) -> TargetSets:
        """Such endings by the name that ``lora.target_modules`` may give: ``attention`` and ``all``.

        The first holds the projections of attention, the second the linear layers in the blocks. A family
        without them takes lists only.
        """
        return {}

    @property
    @abstractmethod
    def max_prompt_tokens(self) -> int:
        """Longer prompts are cut, as by the pipeline's own default; often a plain attribute."""

    @property
    def record_kinds(self) -> tuple[RecordKind, ...]:
        """Kinds of items that it trains on; many families give it as a plain attribute."""
        return ("image",)

    @property
    def trainable(self) -> tuple[str, ...]:
        """Folders of the models that can get a LoRA."""
        return ("transformer",)

    @property
    def trained_by_default(self) -> tuple[str, ...]:
        """Those of ``trainable`` that get a LoRA by default."""
        return self.trainable[:1]

    @property
    def denoisers(self) -> tuple[str, ...]:
        """Those of ``trainable`` that remove noise and whose weights may come from a file, in order."""
        return ()

    @property
    @abstractmethod
    def lora_files(self) -> LoraFiles:
        """How adapters on ``trained`` become files that diffusers and ComfyUI read, and files adapters."""

    @property
    def noise_path(self) -> NoisePath:
        """How data become noise: flow matching, unless the model is trained on another path."""
        return FlowMatchingPath()

    @property
    def noise_ranges(self) -> tuple[tuple[float, float], ...]:
        """Ranges [low, high) of noise levels: one, or one for each of ``trained``, which are experts then."""
        return ((0.0, 1.0),)

    @property
    @abstractmethod
    def size_divisor(self) -> int:
        """Width and height must be multiples of it, in pixels; most families give it as a plain attribute."""

    @property
    def max_side(self) -> int | None:
        """Largest side of an image, in pixels, that the model has position embeddings for; None: no limit."""
        return None

    @property
    def default_num_frames(self) -> int:
        """Frames of a clip by default."""
        return 1

    @property
    def default_fps(self) -> float | None:
        """Frames per second that the model was trained on; None where there are only images."""
        return None

    @property
    def edits(self) -> EditInputs:
        """What it does with the images that an edit starts from."""
        return self if isinstance(self, EditInputs) else EditInputs()

    @property
    def takes_last_frames(self) -> bool:
        """Whether a clip, and a preview, may be led to an image that is given next to its first one."""
        return False

    @property
    def has_guidance(self) -> bool:
        """Whether a scale of guidance has an effect on previews."""
        return True

    @property
    def takes_guidance(self) -> bool:
        """Whether the model takes a guidance scale; others are guided by the negative prompt."""
        return False

    @property
    def min_inference_steps(self) -> int:
        """Fewest denoising steps of a preview."""
        return 1

    @property
    def needs_inputs(self) -> bool:
        """Whether the model needs an image to start from, next to a prompt."""
        return not {"image", "video", "control"} & set(self.record_kinds)

    def take_files(self, files: Mapping[str, ComponentFile]) -> None:
        """Have ``denoisers`` read from these files; raises UserError where one is not for this family."""
        self.folder = replace(self.folder, files=files)

    def learn_as(self, other: "ModelFamily") -> None:
        """Be given what another one is given of items: their audio, and their controls in a size."""
        self.with_audio, self.with_controls = other.with_audio, other.with_controls
        self.control_downscale = other.control_downscale

    @property
    def lora_metadata(self) -> Mapping[str, str]:
        """What programs that use its LoRA files read there, by the names that these programs have."""
        return {}

    def check_folder(self, *, with_weights: bool = True) -> None:
        """Check, without loading weights, that the folder holds what training and previews need.

        Args:
            with_weights: also that the weights are there, in files that are whole, but for those of the hub.
        """
        if with_weights:
            self.folder.require_complete(self.components)
        for component in (*self.components_without_weights, *self.components):
            self.folder.require_files(component)

    @property
    def sampler(self) -> str:
        """Class of the scheduler that previews are generated with."""
        return str(self.folder.component_config("scheduler")["_class_name"])

    def fingerprint(self) -> str:
        """Identity of the base model: changes with the weights and settings of any of its components."""
        return self.folder.fingerprints(*self.components, "scheduler")

    def check_trained(self) -> None:
        """Check that the folder's model can be trained, and does not only generate."""
        return  # most can

    def check_size(self, width: int, height: int, *, keys: str) -> None:
        """Check that both sides of an image are multiples of ``size_divisor``, and at most ``max_side``."""
        divisor = self.size_divisor
        if width % divisor or height % divisor:
            fit = [max(divisor, round(side / divisor) * divisor) for side in (width, height)]
            raise UserError(
                f"{keys}: {width}x{height} is not divisible by {divisor}; "
                f"the nearest size is {fit[0]}x{fit[1]}"
            )
        if self.max_side is not None and max(width, height) > self.max_side:
            raise UserError(
                f"{keys}: {width}x{height}; this model has position embeddings for images of at most "
                f"{self.max_side} pixels on each side"
            )

    def check_prompt(self, text: str, where: str) -> None:
        """Check that a caption or prompt is one that the pipeline takes: else it is learned in vain."""
        if found := [token for token in self.refused_in_prompts if token in text]:
            raise UserError(
                f"{where} holds {' and '.join(found)}, for which this family's pipeline expects an image or "
                "a video, and refuses the prompt; remove it"
            )

    def check_frames(self, num_frames: int, *, key: str) -> None:
        """Check that a number of frames is k * ``frame_step`` + ``frame_rest``, or 1 without such a step."""
        if self.frame_step is None:
            if num_frames != 1:
                raise UserError(f"{key}: {num_frames} frames; this family makes images, of 1 frame")
            return
        steps, rest = divmod(num_frames - self.frame_rest, self.frame_step)
        if num_frames < self.frame_rest or rest:
            fit = [max(0, steps + extra) * self.frame_step + self.frame_rest for extra in (0, 1)]
            raise UserError(
                f"{key}: {num_frames} frames; this family needs {self.frame_step} k + {self.frame_rest}, "
                f"such as {' or '.join(map(str, fit))}"
            )

    def check_vae_dtype(self, dtype: torch.dtype) -> None:
        """Check that ``model.vae_dtype`` suits the folder's autoencoder."""
        return  # most do in any

    @property
    def known_vae_tiles(self) -> VaeTiles | None:
        """The tiles that the folder's autoencoder can work in; None where they are not known."""
        return None

    def tile_vae(self) -> None:
        """Have the autoencoder work in the tiles that are known."""
        self.vae_tiles = self.known_vae_tiles
        if self.vae_tiles is None:
            raise UserError(
                "model.vae_tiling: true, but no tiles are known for the autoencoder of this family; set it "
                "to false"
            )

    @property
    def distilled(self) -> str | None:
        """Why the folder's files seem those of a distilled model, and what to train instead; or None.

        Such as "its sampler has the shift of Turbo; better train the base model".
        """
        return None

    @abstractmethod
    def empty_transformer(self) -> torch.nn.Module:
        """The model that is trained, on the meta device: its structure without its weights."""

    def empty_component(self, name: str) -> torch.nn.Module | None:
        """One of ``components`` on the meta device, to be counted; None where it cannot be built so."""
        return None

    @abstractmethod
    def load_transformer(self, dtype: torch.dtype) -> torch.nn.Module:
        """The model that is trained, on the CPU in ``dtype``, frozen; several come as one ``Composite``."""

    def parts_of(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """The components, by name, of what ``load_transformer`` or ``empty_transformer`` gave."""
        if len(self.trained) == 1:
            return {self.trained[0]: model}
        return {name: model.get_submodule(name) for name in self.trained}

    def unused_modules(self, model: torch.nn.Module) -> list[str]:
        """Modules of ``model`` whose output nobody uses: a LoRA there gets no gradient, which DDP refuses."""
        return []

    @abstractmethod
    def prompt_encoder_id(self, dtype: torch.dtype) -> str:
        """Identity of everything that decides a prompt's conditioning; part of the cache's key."""

    @abstractmethod
    def load_prompt_encoder(
        self, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Sequence[Prompt]], list[Conditioning]]:
        """A function from prompts to their conditioning; the encoders live as long as it does."""

    @abstractmethod
    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, uncut, as ``max_prompt_tokens`` counts them; loads the tokenizer only."""

    @abstractmethod
    def media_encoder_id(self, dtype: torch.dtype) -> str:
        """Identity of everything that decides what is encoded of media; part of the cache's key."""

    @abstractmethod
    def load_media_encoder(
        self, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Sequence[Media]], list[EncodedMedia]]:
        """A function from media, all of one size and frame count, to what training needs of them."""

    @abstractmethod
    def latents_shape(self, width: int, height: int, num_frames: int) -> tuple[int, ...]:
        """Shape of the latents of media of this size, without a batch axis; loads no weights."""

    def num_condition_values(self, latents_shape: Sequence[int]) -> int:
        """Numbers that are kept of each item's media next to its latents, where that is not a small part."""
        return 0

    def num_given_tokens(self, latents_shape: Sequence[int]) -> int:
        """Tokens that the transformer sees of one sample next to those of its latents."""
        return 0

    @abstractmethod
    def num_tokens(self, latents_shape: Sequence[int]) -> int:
        """Tokens that the transformer makes of one sample's latents, or of those of its audio."""

    @abstractmethod
    def resolution_shift(self, latents_shape: Sequence[int]) -> float:
        """The sampler's shift s that grows with the image; raises UserError where there is none."""

    @abstractmethod
    def family_shift(self, latents_shape: Sequence[int]) -> float:
        """The shift that the family is trained with by default; 1 is none."""

    def earlier_shift(self, latents_shape: Sequence[int]) -> float:
        """What ``family_shift`` was where a family has corrected it: of checkpoints that do not hold it."""
        return self.family_shift(latents_shape)

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning | None:
        """Ones, shaped as the conditioning of these latents and the longest prompt; None where not known."""
        return None

    @abstractmethod
    def predict(
        self,
        transformer: torch.nn.Module,
        noisy_latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
    ) -> torch.Tensor:
        """The model's estimate of the target of ``noise_path``, whatever the model's own convention is.

        On the flow-matching path that is ``noise - latents``. Blocks are run as the gradient engine in scope
        sets (``gradient_flags``).

        Args:
            transformer: what ``load_transformer`` gave, plain or wrapped by DDP.
            noisy_latents: (B, ...) as the media encoder gives them, in fp32.
            sigma: (B,), noise level in [0, 1], in fp32.
        """

    @abstractmethod
    def sample(
        self, transformer: torch.nn.Module, vae_dtype: torch.dtype, requests: Sequence[PreviewRequest]
    ) -> Sequence[Generated]:
        """The frames of each preview, generated by diffusers' own pipeline around the given transformer."""
