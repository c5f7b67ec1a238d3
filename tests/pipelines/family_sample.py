"""Builds a family's tiny pipeline on disk and a batch that it encoded itself, and watches its model."""

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit,
    pipeline_qwenimage_edit_plus,
    pipeline_qwenimage_layered,
)
from diffusers.pipelines.qwenimage21 import pipeline_qwenimage21
from diffusers.utils import BaseOutput
from diffusers_pipelines import called_as_others
from PIL import Image

from diffsynth_lite.core.gradient import GradientEngine, gradient_engine
from diffsynth_lite.core.noise.paths import DiffusionPath
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import adapter_settings, adapter_tensors, add_adapter, find_target_layers
from diffsynth_lite.lora.kinds import LORA, AdapterKind
from diffsynth_lite.lora.updates import LoraPair, pairs_of
from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import (
    Conditioning,
    ModelFamily,
    PipelineFolder,
    PreviewRequest,
    family_names,
    load_family,
)

CPU = torch.device("cpu")
# Of different lengths, so that every family has to pad and to mask.
PROMPTS = ("a red circle", "a blue square on a white background", "a ring")
NEGATIVE = "blurred"
# What some pipelines clean before they encode it, and others encode as it is; no encoder cuts one of these.
UNCLEAN = (
    "\u201ca red circle\u201d, it\u2019s round\u2026\n"
    "\u7ea2\u8272\u7684\u5706\uff0c\u5f88\u5927\u3002\uff21\uff22",
    "  two  spaces,\n\nlines, a tab\tsalt &amp;amp; pepper &lt;b&gt;",
    "the caf\u00c3\u00a9 isn\u00e2\u20ac\u2122t\nA Red <b>CIRCLE</b> https://a.org #3 ",
)
# What some models call the arguments of their forward, by the name that they have elsewhere.
OTHER_NAMES = {
    "sample": "hidden_states",
    "x": "hidden_states",
    "t": "timestep",
    "timesteps": "timestep",
    "encoder_hidden_states_t5": "encoder_hidden_states",
    "cap_feats": "encoder_hidden_states",
    "text_bth": "encoder_hidden_states",
}
SIGMA = torch.tensor([0.1, 0.5, 0.9])
Dtypes = tuple[torch.dtype, torch.dtype]
FP32: Dtypes = (torch.float32, torch.float32)
FLAGS = [(False, False), (True, False), (False, True), (True, True)]
ELSEWHERE = ("my_families.stable_diffusion",)
"""Families that are not part of the package, in ``tests/elsewhere``."""
SMALL_AREA = 64 * 64
LAYERS_AREA = 64 * 32
SMALL_SIZES = [(32, 96), (48, 80), (64, 64), (80, 48), (96, 32)]


def families_to_test(config: pytest.Config) -> list[str]:
    """Those that ``--family`` names, else all there are."""
    return config.getoption("--family") or [*family_names(), *ELSEWHERE]


@dataclass(frozen=True)
class Sample:
    """A family's tiny pipeline, and a batch that it encoded itself.

    Attributes:
        name: of the family.
        build: makes the pipeline, each time the same.
        prompts: what the prompt encoder made of ``PROMPTS``, together.
        first: what it made of the first by itself; kernels may sum a batch in another order.
        negative: what it made of ``NEGATIVE``.
        conditioning: ``prompts``, each with what else than latents the media encoder made of its item.
    """

    name: str
    build: Callable[[], Any]
    family: ModelFamily
    media: list[Media]
    latents: torch.Tensor
    prompts: list[Conditioning]
    first: Conditioning
    negative: Conditioning
    conditioning: list[Conditioning]
    _adapted: dict[object, torch.nn.Module] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def model(self) -> torch.nn.Module:
        """The family's model in fp32, loaded once for all tests, none of which may change it."""
        return self.family.load_transformer(torch.float32)

    def adapted(self, targets: Sequence[str] = (), kind: AdapterKind = LORA) -> torch.nn.Module:
        """An ``adapted_transformer`` in training mode, made once for the tests that only run it."""
        key = tuple(targets or self.family.default_target_modules), kind
        if key not in self._adapted:
            self._adapted[key] = adapted_transformer(self.family, targets=key[0], kind=kind)
        return self._adapted[key].train()

    @cached_property
    def learned(self) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        """What ``velocity_and_gradients`` gives of ``adapted()`` where every block keeps its activations."""
        return velocity_and_gradients(self, self.adapted())

    def fresh_pipeline(self) -> Any:
        """The tiny pipeline as it was saved; reading an edit pipeline back would need torchvision."""
        return called_as_others(self.build())

    def request(self, **settings: Any) -> PreviewRequest:
        """A preview of the first item, in the size of the batch."""
        media, family = self.media[0], self.family
        start = media.frames[:1] if family.needs_inputs else ()
        fixed = {
            "conditioning": self.first,
            "negative": self.negative,
            "inputs": media.inputs or start,
            "control": media.control,
            "inpaint_mask": media.inpaint_mask,
            "face": media.face,
            "width": 4 * family.size_divisor,
            "height": 2 * family.size_divisor,
            "num_frames": len(media.frames),
            "num_layers": len(media.layers),
        }
        return PreviewRequest(**fixed, **settings)


def sample_fixture(name: str) -> Any:
    """A fixture: the sample of a family or layout, which no test may change."""
    return pytest.fixture(scope="module")(lambda sample_of: sample_of(name))


def family_fixture(name: str) -> Any:
    """A fixture: the family of the sample of that name."""
    return pytest.fixture(scope="module")(lambda sample_of: sample_of(name).family)


@contextmanager
def small_edit_inputs() -> Iterator[None]:
    """The edit pipelines bring input images to a megapixel, which is too much for tests."""
    real = pipeline_qwenimage_edit.calculate_dimensions
    with pytest.MonkeyPatch.context() as patch:
        for pipeline in (pipeline_qwenimage_edit, pipeline_qwenimage21):
            patch.setattr(pipeline, "calculate_dimensions", lambda _area, ratio: real(SMALL_AREA, ratio))
        patch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", SMALL_AREA)
        patch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", SMALL_AREA)
        # What these generate has the size of what they start from: here that of the items of the tests.
        for pipeline in (pipeline_qwenimage_layered, pipeline_longcat_image_edit):
            patch.setattr(
                pipeline,
                "calculate_dimensions",
                lambda _area, ratio: tuple(max(32, side) for side in real(LAYERS_AREA, ratio)[:2]),
            )
        patch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", SMALL_SIZES)
        yield


def mandelbrot(width: int, height: int, quality: int) -> Image.Image:
    return Image.effect_mandelbrot((width, height), (-2, -1, 1, 1), quality).convert("RGB")


def shortest_clip(family: ModelFamily, num_steps: int) -> int:
    """Frames of the shortest clip that a family takes, of so many steps of them at least."""
    step = family.frame_step
    assert step is not None
    for num_frames in itertools.count(num_steps * step + family.frame_rest, step):
        with suppress(UserError):
            family.check_frames(num_frames, key="")
            return num_frames
    raise AssertionError


def clip(width: int, height: int, num_frames: int, quality: int) -> tuple[Image.Image, ...]:
    return tuple(mandelbrot(width, height, quality + frame) for frame in range(num_frames))


def layers_of(width: int, height: int, quality: int) -> tuple[Image.Image, ...]:
    """An opaque one, and one through which it is seen."""
    above = mandelbrot(width, height, quality + 1).convert("RGBA")
    above.putalpha(mandelbrot(width, height, quality + 2).convert("L"))
    return mandelbrot(width, height, quality).convert("RGBA"), above


def hole(width: int, height: int, place: int) -> Image.Image:
    """A mask of a part that is not a whole number of tokens, and another one in each place."""
    mask = Image.new("L", (width, height))
    mask.paste(255, (5 + 3 * place, 3, width // 2 + 7 * place, height - 6))
    return mask


def build_media(family: ModelFamily) -> list[Media]:
    """Three items of the first kind that the family trains on."""
    width, height = 4 * family.size_divisor, 2 * family.size_divisor
    kind = family.record_kinds[0]
    num_frames = 1 if family.frame_step is None else shortest_clip(family, 2)
    return [
        Media(
            frames=clip(width, height, num_frames, 10 + place),
            inputs=inputs_of(family, place) if kind == "edit" else (),
            layers=layers_of(width, height, 20 + place) if kind == "layers" else (),
            control=clip(width, height, num_frames, 40 + place) if kind == "control" else (),
            inpaint_mask=(hole(width, height, place),) * num_frames if kind == "inpaint" else (),
            face=clip(40, 48, num_frames, 60 + place) if family.takes_faces else (),
            fps=family.default_fps,
        )
        for place in range(3)
    ]


def inputs_of(family: ModelFamily, place: int) -> tuple[Image.Image, ...]:
    """Images to edit: two of different sizes, where the family takes several."""
    images = mandelbrot(100, 68, 20 + place), mandelbrot(68, 90, 30 + place)
    return images if family.edits.max_inputs is None else images[:1]


def longest_prompts(sample: Sample) -> dict[str, int]:
    """The limit of prompts that the call of the pipeline gets where its default is another."""
    if sample.name == "ideogram4":
        return {"max_sequence_length": 128}  # of 2048, which takes long
    if sample.name != "flux":
        return {}
    is_schnell = not sample.family.folder.component_config("transformer").get("guidance_embeds", True)
    return {"max_sequence_length": 256} if is_schnell else {}


def encode_texts(family: ModelFamily, *texts: str) -> list[Conditioning]:
    """The conditioning of captions, in fp32."""
    return family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in texts])


def seen_in_prompts(family: ModelFamily, item: Media) -> tuple[Image.Image, ...]:
    """The images of an item that the text encoder sees: those to edit, or the one that a clip starts from."""
    if not family.edits.prompt_sees_images:
        return ()
    return item.inputs if family.frame_step is None else (item.first_frame or item.frames[0],)


def build_prompts(family: ModelFamily, media: Sequence[Media]) -> list[Prompt]:
    """Those of the items, and the negative one of a preview of the first."""
    seen = [seen_in_prompts(family, item) for item in media]
    prompts = [Prompt(text=text, images=images) for text, images in zip(PROMPTS, seen, strict=True)]
    return [*prompts, Prompt(text=NEGATIVE, images=seen[0], is_negative=True)]


def build_sample(name: str, folder: Path, build: Callable[[], Any] | None = None) -> Sample:
    """A batch of the family's tiny pipeline, or of another one of the family."""
    family_class = load_family(name)
    build = build or importlib.import_module(family_class.__module__).tiny
    build().save_pretrained(folder)
    return encode_sample(name, build, family_class(PipelineFolder(path=folder)))


def encode_sample(name: str, build: Callable[[], Any], family: ModelFamily, dtypes: Dtypes = FP32) -> Sample:
    """A batch that a family encodes itself.

    Args:
        dtypes: of the text encoders and of the autoencoder.
    """
    media = build_media(family)
    encode = family.load_prompt_encoder(dtypes[0], CPU)
    *captions, against = build_prompts(family, media)
    prompts = encode(captions)
    first, negative = (encode([prompt])[0] for prompt in (captions[0], against))
    encoded = family.load_media_encoder(dtypes[1], CPU)(media)
    latents = torch.stack([tensors.pop("latents") for tensors in encoded])
    for tensors, of_clip in zip(encoded, latents, strict=True):
        if tensors.pop("loss_mask", None) is not None:  # the model is given a first frame in its place
            of_clip[:, :1] = tensors["first_frame_latents"]
    return Sample(
        name=name,
        build=build,
        family=family,
        media=media,
        latents=latents,
        prompts=prompts,
        first=first,
        negative=negative,
        conditioning=[prompt | tensors for prompt, tensors in zip(prompts, encoded, strict=True)],
    )


def items_with_images(sample: Sample) -> Iterator[Sample]:
    """The first item as an edit, and from another first frame, of families that train these too."""
    family, item = sample.family, sample.media[0]
    for kind in {"edit", "image_to_video"} & set(family.record_kinds[1:]):
        given = (
            {"inputs": inputs_of(family, 0)}
            if kind == "edit"
            else {"first_frame": mandelbrot(*item.frames[0].size, 40)}
        )
        changed = replace(item, **given)
        (tensors,) = family.load_media_encoder(torch.float32, CPU)([changed])
        latents, _ = tensors.pop("latents"), tensors.pop("loss_mask", None)
        first = sample.first
        if family.edits.prompt_sees_images:
            seen = Prompt(text=PROMPTS[0], images=seen_in_prompts(family, changed))
            (first,) = family.load_prompt_encoder(torch.float32, CPU)([seen])
        conditioning = [first | tensors]
        yield replace(sample, media=[changed], latents=latents[None], first=first, conditioning=conditioning)


def transformer_calls(
    transformer: torch.nn.Module, run: Callable[[], object], outputs: list[Any] | None = None
) -> list[dict[str, Any]]:
    """Arguments of each forward of the transformer in ``run``, by name; what it returned is appended."""
    calls: list[dict[str, Any]] = []
    signature = inspect.signature(transformer.forward)

    def record(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = signature.bind(*args, **kwargs).arguments
        calls.append({OTHER_NAMES.get(name, name): value for name, value in given.items()})

    def record_output(_module: torch.nn.Module, _args: object, output: Any) -> None:
        if outputs is not None:
            outputs.append(output[0])

    hooks = (
        transformer.register_forward_pre_hook(record, with_kwargs=True),
        transformer.register_forward_hook(record_output),
    )
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return calls


def with_first(output: Any, first: Any) -> Any:
    """What a forward returned, with something else in the place of its first tensor."""
    return type(output)(first) if isinstance(output, BaseOutput) else (first, *output[1:])


def as_sampled(hidden_states: torch.Tensor | list[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    """What the transformer was given of the clean latents, in the layout of what the sampler works on.

    After them, in the tokens or in the channels, may be those of other images. A first frame that is given
    is before those that the sampler works on.
    """
    given = torch.stack(hidden_states) if isinstance(hidden_states, list) else hidden_states
    if given.numel() == output.numel():
        return given.reshape(output.shape)
    if given.ndim == output.ndim == 5:
        given = given[:, :, -output.shape[2] :]
    return given[tuple(map(slice, output.shape))]


def numbers(value: Any) -> torch.Tensor:
    """All that an argument holds, one after the other; of what a step keeps for the next ones nothing."""
    if value is None or isinstance(value, QwenImage21KVCache | str):
        return torch.zeros(0)
    if isinstance(value, dict):
        value = [value[name] for name in sorted(value)]
    if isinstance(value, (list, tuple)):
        return torch.cat([torch.zeros(0), *map(numbers, value)])
    return torch.as_tensor(value).float().flatten()


def ones_like(output: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """A batch of ones, or a list of them where the model gives its samples in one."""
    return list(map(torch.ones_like, output)) if isinstance(output, list) else torch.ones_like(output)


def adapted_transformer(
    family: ModelFamily, *, dropout: float = 0.0, targets: Sequence[str] = (), kind: AdapterKind = LORA
) -> torch.nn.Module:
    """The family's transformer with a LoRA whose update is not zero, on its default targets or others."""
    transformer = family.load_transformer(torch.float32).train()
    layers = find_target_layers(
        transformer,
        targets or family.default_target_modules,
        unused_modules=family.unused_modules(transformer),
    )
    add_adapter(transformer, layers, rank=4, alpha=8, dropout=dropout, seed=1, kind=kind)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in transformer.named_parameters():
        if ".lora_B." in name or ".lokr_w" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return transformer


def assert_does_as(loaded: Mapping[str, LoraPair], transformer: torch.nn.Module) -> None:
    """Each layer is given what the adapter of a trained model gives it, bit for bit, and no other is."""
    trained = pairs_of(adapter_tensors(transformer), adapter_settings(transformer))
    assert loaded.keys() == trained.keys()
    for layer, pair in trained.items():
        assert pair.norm > 0
        assert pair.distance(loaded[layer]) == 0, layer


def load_lora(pipeline: Any, folder: Path) -> None:
    """As in docs/models.md, also for pipelines that load none, whose transformer does."""
    if hasattr(pipeline, "load_lora_weights"):
        pipeline.load_lora_weights(folder)
    else:
        pipeline.transformer.load_lora_adapter(folder, use_safetensors=True)


def pairs_on(model: torch.nn.Module) -> dict[str, LoraPair]:
    """What a pipeline of diffusers put on a model."""
    return {
        name: LoraPair(
            down=module.lora_A[adapter].weight.detach(),
            up=module.lora_B[adapter].weight.detach(),
            alpha=module.scaling[adapter] * module.r[adapter],
        )
        for name, module in model.named_modules()
        for adapter in getattr(module, "lora_A", ())
    }


def noise_levels(sample: Sample, scheduler: Any) -> torch.Tensor:
    """Those of the sampler's steps, in [0, 1]."""
    if isinstance(sample.family.noise_path, DiffusionPath):
        return (scheduler.timesteps + 0.5) / scheduler.config.num_train_timesteps
    levels: torch.Tensor = scheduler.sigmas[: len(scheduler.timesteps)]
    return levels


def engine_with(flags: tuple[bool, bool], **settings: Any) -> GradientEngine:
    """A gradient engine with these two switches."""
    return GradientEngine(
        use_gradient_checkpointing=flags[0], use_gradient_checkpointing_offload=flags[1], **settings
    )


def velocity_and_gradients(
    sample: Sample, transformer: torch.nn.Module, engine: GradientEngine | None = None, seed: int = 3
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """What a family predicts, and the gradients of its mean square by name, after seeding dropout.

    Without an engine every block keeps its activations.
    """
    torch.manual_seed(seed)
    transformer.zero_grad()
    with gradient_engine(engine) if engine else nullcontext():
        velocity = sample.family.predict(transformer, sample.latents, SIGMA, sample.conditioning)
    velocity.square().mean().backward()
    gradients = {name: value.grad for name, value in transformer.named_parameters() if value.requires_grad}
    return velocity.detach(), gradients


def gradients(model: torch.nn.Module, predicted: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Those of the mean square of what the model predicts, by the names of its parameters."""
    model.zero_grad()
    predicted.square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_equal_under_all_flags(
    model: torch.nn.Module,
    reference: torch.Tensor,
    model_fn: Callable[..., torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> dict[str, torch.Tensor | None]:
    """A ``model_fn`` gives what the model's own forward gave, and its gradients, bit for bit; returns these.

    Args:
        model: the first argument of ``model_fn``.
        reference: what its own forward gave, with its graph.
        model_fn: called with the other arguments and each pair of flags.
    """
    expected = gradients(model, reference)
    for flags in FLAGS:
        predicted = model_fn(
            model,
            *args,
            use_gradient_checkpointing=flags[0],
            use_gradient_checkpointing_offload=flags[1],
            **kwargs,
        )
        assert torch.equal(predicted, reference), flags
        for name, gradient in gradients(model, predicted).items():
            pair = gradient, expected[name]
            assert pair == (None, None) or torch.equal(*pair), (flags, name)
    return expected
