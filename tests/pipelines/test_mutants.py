"""Tests of the tests of all families: one with a bug fails those that are there to find it."""

import dataclasses
import inspect
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import test_family_fidelity as fidelity
import test_family_interface as interface
import torch
from family_sample import Sample, build_sample, encode_sample
from PIL.Image import Image

from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import Conditioning, ModelFamily, PreviewRequest
from diffsynth_lite.pipelines.flux import Flux
from diffsynth_lite.pipelines.qwen_image import QwenImage

Check = Callable[..., None]
PREVIEW = fidelity.test_a_preview_is_what_the_pipeline_generates_from_the_text
PROMPTS = fidelity.test_another_caption_and_another_negative_prompt_generate_something_else
DECODED = fidelity.test_the_latents_that_are_trained_are_those_that_the_pipeline_decodes
PLACES = fidelity.test_what_the_model_returns_of_a_place_comes_back_at_that_place
LAYOUT = fidelity.test_latents_are_channel_first
FILES = fidelity.test_a_cache_key_changes_with_the_dtype_and_with_every_file_that_the_encoder_needs
LIMIT = fidelity.test_a_prompts_cache_key_changes_with_the_length_at_which_it_is_cut
DTYPES = fidelity.test_a_model_in_the_default_dtypes_trains_and_samples
PADDING = fidelity.test_a_prompt_counts_the_same_by_itself_and_next_to_longer_ones
NOISE_LEVEL = interface.test_a_noise_level_is_given_to_the_model_as_by_the_sampler
SIGN = interface.test_the_velocity_is_what_the_pipeline_hands_to_its_sampler


class NeverSeesTheCaption(QwenImage):
    def load_prompt_encoder(
        self, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Sequence[Prompt]], list[Conditioning]]:
        encode = super().load_prompt_encoder(dtype, device)
        return lambda prompts: encode([dataclasses.replace(prompt, text="") for prompt in prompts])


class LeavesLatentsUnscaled(QwenImage):
    def encode_pixels(self, vae: Any, pixels_bchw: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return vae.encode(pixels_bchw.unsqueeze(2)).latent_dist.mode()


class SteersAwayFromThePrompt(QwenImage):
    def generate(self, pipeline: Any, request: PreviewRequest, **inputs: Any) -> list[Image]:
        return super().generate(
            pipeline, dataclasses.replace(request, negative=request.conditioning), **inputs
        )


class HasOneKeyForAllEncoders(QwenImage):
    def prompt_encoder_id(self, dtype: torch.dtype) -> str:
        return "qwen_image"

    media_encoder_id = prompt_encoder_id


class ForgetsTheLimitInTheKey(QwenImage):
    def prompt_encoder_id(self, dtype: torch.dtype) -> str:
        return f"prompt/1 {self.folder.fingerprints('text_encoder', 'tokenizer')} {dtype}"


class ForgetsTheTokenizerInTheKey(QwenImage):
    def prompt_encoder_id(self, dtype: torch.dtype) -> str:
        return f"prompt/1 {self.folder.fingerprints('text_encoder')} {dtype} {self.max_prompt_tokens}"


class PredictsTheOpposite(QwenImage):
    def predict(self, *batch: Any) -> torch.Tensor:
        return -super().predict(*batch)


class MixesThePlacesUp(QwenImage):
    def predict(self, *batch: Any) -> torch.Tensor:
        return super().predict(*batch).flip(-1)


class TellsAnotherTimestep(QwenImage):
    def predict(
        self, transformer: Any, noisy_latents: torch.Tensor, sigma: torch.Tensor, conditioning: Any
    ) -> torch.Tensor:
        return super().predict(transformer, noisy_latents, 1000 * sigma, conditioning)


class FillsPromptsUpUnmasked(QwenImage):
    def predict(
        self, transformer: Any, noisy_latents: torch.Tensor, sigma: torch.Tensor, conditioning: Any
    ) -> torch.Tensor:
        longest = max(len(sample["prompt_embeds"]) for sample in conditioning)
        filled = [
            sample
            | {
                "prompt_embeds": torch.nn.functional.pad(
                    sample["prompt_embeds"], (0, 0, 0, longest - len(sample["prompt_embeds"]))
                )
            }
            for sample in conditioning
        ]
        return super().predict(transformer, noisy_latents, sigma, filled)


class PutsChannelsLast(QwenImage):
    def encode_pixels(self, vae: Any, pixels_bchw: torch.Tensor) -> torch.Tensor:
        return super().encode_pixels(vae, pixels_bchw).movedim(1, -1)

    def latents_shape(self, width: int, height: int, num_frames: int) -> tuple[int, ...]:
        channels, *sides = super().latents_shape(width, height, num_frames)
        return (*sides, channels)

    def predict(self, transformer: Any, noisy_latents: torch.Tensor, *others: Any) -> torch.Tensor:
        return super().predict(transformer, noisy_latents.movedim(-1, 1), *others).movedim(1, -1)


class DecodesWhatTheModelSays(Flux):
    """In the dtype of the model, which is not that of the autoencoder."""

    def preview_pipeline(self, *args: Any, **settings: Any) -> Any:
        pipeline = super().preview_pipeline(*args, **settings)
        pipeline.vae.decoder._forward_pre_hooks.clear()
        return pipeline


MUTANTS: dict[type[ModelFamily], set[Check]] = {
    NeverSeesTheCaption: {PREVIEW, PROMPTS, PADDING},
    LeavesLatentsUnscaled: {DECODED},
    SteersAwayFromThePrompt: {PREVIEW, PROMPTS},
    HasOneKeyForAllEncoders: {FILES, LIMIT},
    ForgetsTheLimitInTheKey: {LIMIT},
    ForgetsTheTokenizerInTheKey: {FILES},
    PredictsTheOpposite: {SIGN},
    MixesThePlacesUp: {PLACES},
    TellsAnotherTimestep: {NOISE_LEVEL},
    FillsPromptsUpUnmasked: {PADDING},
    PutsChannelsLast: {LAYOUT},
    DecodesWhatTheModelSays: {DTYPES},
}
"""The checks that each fails; the two real families pass them all, where these are tests."""


@dataclasses.dataclass(frozen=True)
class Real:
    """A family as it is, and what diffusers reads from its folder."""

    sample: Sample
    pipeline: Any


@pytest.fixture(scope="module")
def reals(tmp_path_factory: pytest.TempPathFactory) -> dict[type[ModelFamily], Real]:
    samples = [build_sample(name, tmp_path_factory.mktemp(name)) for name in ("qwen_image", "flux")]
    return {type(one.family): Real(one, fidelity.read_pipeline(one)) for one in samples}


def cases(check: Check) -> Iterator[dict[str, Any]]:
    """What a test is parametrised with, which has one such mark or none."""
    marks = [mark for mark in getattr(check, "pytestmark", ()) if mark.name == "parametrize"]
    if not marks:
        yield {}
    for names, values in (mark.args for mark in marks):
        for value in values:
            yield {names: value} if isinstance(names, str) else dict(zip(names, value, strict=True))


def run(check: Check, sample: Sample, pipeline: Any, tmp_path: Path) -> None:
    """As pytest would with this sample."""
    wanted = inspect.signature(check).parameters
    given = {"sample": sample, "pipeline": pipeline}
    for number, case in enumerate(cases(check)):
        if "folder" in wanted:
            copy = tmp_path / f"{check.__name__}-{number}"
            given["folder"] = shutil.copytree(sample.family.folder.path, copy)
        with pytest.MonkeyPatch.context() as patch:
            arguments = given | {"monkeypatch": patch} | case
            check(**{name: arguments[name] for name in wanted})


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda family: family.__name__)
def test_each_bug_is_found_by_what_is_there_to_find_it(
    mutant: type[ModelFamily], reals: dict[type[ModelFamily], Real], tmp_path: Path
) -> None:
    (real,) = (real for family, real in reals.items() if issubclass(mutant, family))
    sample = encode_sample(real.sample.name, real.sample.build, mutant(real.sample.family.folder))
    for check in MUTANTS[mutant]:
        with pytest.raises((AssertionError, RuntimeError)):
            run(check, sample, real.pipeline, tmp_path)
