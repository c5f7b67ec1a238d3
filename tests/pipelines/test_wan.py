"""Wan from text and from images against diffusers' own pipelines: T2V, TI2V, I2V, FLF2V and A14B."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import test_family_gradients as of_all_families
import torch
from family_sample import (
    CPU,
    PROMPTS,
    Sample,
    build_media,
    encode_texts,
    mandelbrot,
)
from PIL import ImageOps
from release_layouts import wan_of_images

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import Conditioning, PipelineFolder, PreviewRequest
from diffsynth_lite.pipelines.wan import Wan
from diffsynth_lite.pipelines.wan_i2v import WanI2V

FAMILY = "wan"


@pytest.fixture(scope="module")
def families(sample_of: Callable[[str], Sample]) -> dict[str, WanI2V]:
    """From images, by release."""
    names = {"i2v": "wan_i2v", "flf2v": "wan_i2v flf2v", "a14b": "wan_i2v a14b"}
    return {release: sample_of(name).family for release, name in names.items()}


@pytest.fixture(scope="module")
def prompts(families: dict[str, WanI2V]) -> list[Conditioning]:
    return encode_texts(families["i2v"], *PROMPTS)


def test_without_the_package_that_cleans_prompts_nothing_is_encoded(
    family: Wan, monkeypatch: pytest.MonkeyPatch
) -> None:
    family.check_folder()
    monkeypatch.setattr("diffsynth_lite.pipelines.wan.family.is_ftfy_available", lambda: False)
    with pytest.raises(UserError, match="prompts of Wan are cleaned with the package ftfy"):
        family.check_folder()


@pytest.mark.parametrize("name", ["wan_i2v a14b", "wan_i2v flf2v"])
def test_models_of_images_are_run_as_by_their_own_forward(
    sample_of: Callable[[str], Sample], name: str
) -> None:
    of_all_families.test_the_model_is_run_as_by_its_own_forward_to_the_last_gradient(sample_of(name))


def calls_in(transformers: Sequence[torch.nn.Module | None], run: Callable[[], object]) -> list[Any]:
    """Keyword arguments of each forward of the transformers in ``run``."""
    calls: list[Any] = []
    hooks = [
        part.register_forward_pre_hook(lambda _module, _args, kwargs: calls.append(kwargs), with_kwargs=True)
        for part in transformers
        if part is not None
    ]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return calls


@pytest.mark.parametrize(
    ("release", "has_last"), [("i2v", False), ("flf2v", True), ("a14b", False), ("a14b", True)]
)
def test_the_model_is_given_the_images_as_by_the_pipeline(
    release: str, has_last: bool, families: dict[str, WanI2V], prompts: list[Conditioning]
) -> None:
    family, pipeline = families[release], wan_of_images(release)
    first, last = mandelbrot(64, 32, 40), mandelbrot(64, 32, 50) if has_last else None
    item = dataclasses.replace(build_media(family)[0], first_frame=first, last_frame=last)
    random_state = torch.random.get_rng_state()
    (encoded,) = family.load_media_encoder(torch.float32, CPU)([item])
    assert torch.equal(torch.random.get_rng_state(), random_state)
    latents_shape = encoded.pop("latents").shape
    num_kept = sum(tensor.numel() for tensor in encoded.values())
    assert num_kept == family.num_condition_values(latents_shape) or (release, has_last) == ("a14b", True)
    assert family.takes_last_frames == (release != "i2v")
    calls = calls_in(
        [pipeline.transformer, pipeline.transformer_2],
        lambda: pipeline(
            image=first,
            last_image=last,
            prompt_embeds=family._prompt_embeds(prompts[:1]),
            width=64,
            height=32,
            num_frames=len(item.frames),
            num_inference_steps=2,
            guidance_scale=1.0,
            output_type="latent",
        ),
    )
    model = family.load_transformer(torch.float32)
    assert len(calls) == 2
    for theirs in calls:
        noisy, sigma = theirs["hidden_states"][:, :16], theirs["timestep"].float() / 1000
        (ours,) = calls_in(
            list(family.parts_of(model).values()),
            lambda noisy=noisy, sigma=sigma: family.predict(model, noisy, sigma, [prompts[0] | encoded]),
        )
        # Bit for bit: the pipeline's own methods encode the images.
        assert torch.equal(ours["hidden_states"], theirs["hidden_states"])
        assert torch.equal(ours["encoder_hidden_states"], theirs["encoder_hidden_states"])
        torch.testing.assert_close(ours["timestep"], theirs["timestep"].float(), rtol=1e-6, atol=0)
        pair = ours["encoder_hidden_states_image"], theirs["encoder_hidden_states_image"]
        assert pair == (None, None) if release == "a14b" else torch.equal(*pair)


def test_a_clip_starts_from_its_own_first_frame_unless_the_data_names_one(
    families: dict[str, WanI2V],
) -> None:
    item = build_media(families["i2v"])[0]
    first, last = item.frames[0], item.frames[-1]
    for release, named in (
        ("i2v", {"first_frame": first}),
        ("flf2v", {"first_frame": first, "last_frame": last}),
        ("flf2v", {"last_frame": last}),
        ("a14b", {"first_frame": first}),
    ):
        encode = families[release].load_media_encoder(torch.float32, CPU)
        changes: list[dict[str, Any]] = [{}, named, {"first_frame": mandelbrot(64, 32, 90)}]
        own, same, other = encode([dataclasses.replace(item, **change) for change in changes])
        assert own.keys() == same.keys()
        assert all(torch.equal(own[name], same[name]) for name in own), release
        assert torch.equal(own["latents"], other["latents"])
        assert not torch.equal(own["condition_latents"], other["condition_latents"])


def preview(prompt: Conditioning, *images: Any) -> PreviewRequest:
    return PreviewRequest(
        conditioning=prompt,
        negative=prompt,
        inputs=images,
        width=64,
        height=32,
        num_frames=9,
        num_inference_steps=2,
        guidance_scale=2.0,
        seed=0,
    )


@pytest.mark.parametrize(("release", "num_images"), [("i2v", 1), ("flf2v", 1), ("flf2v", 2)])
def test_a_preview_continues_from_its_image_as_in_training(
    release: str, num_images: int, families: dict[str, WanI2V], prompts: list[Conditioning]
) -> None:
    family = families[release]
    transformer = family.load_transformer(torch.float32)
    images = [mandelbrot(100, 80, 40), mandelbrot(64, 32, 50)][:num_images]
    request, generated = preview(prompts[0], *images), []
    calls = calls_in(
        [transformer], lambda: generated.extend(family.sample(transformer, torch.float32, [request]))
    )
    (frames,) = generated
    assert [frame.size for frame in frames] == [(64, 32)] * 9
    fitted = [ImageOps.fit(one, (64, 32)) for one in images]
    last = fitted[-1] if release == "flf2v" else None
    item = dataclasses.replace(build_media(family)[0], first_frame=fitted[0], last_frame=last)
    (encoded,) = family.load_media_encoder(torch.float32, CPU)([item])
    assert len(calls) == 4  # two steps, each with and without the prompt
    for call in calls:
        assert torch.equal(call["hidden_states"][0, 16:], encoded["condition_latents"])
        assert torch.equal(call["encoder_hidden_states_image"], encoded["image_embeds"])


def test_what_a_folder_needs_follows_from_its_transformer(families: dict[str, WanI2V]) -> None:
    for release, family in families.items():
        assert family.record_kinds == ("video", "image_to_video")
        assert family.needs_inputs
        assert ("image_encoder" in family.components) == (release != "a14b")
        assert ("add_k_proj" in family.default_target_modules) == (release != "a14b")
    # Prompts are those of the text-to-video models, which may share a cache.
    text_family = Wan(families["i2v"].folder)
    assert text_family.prompt_encoder_id(torch.float32) == families["i2v"].prompt_encoder_id(torch.float32)


def test_other_pixels_for_clip_are_other_embeddings(families: dict[str, WanI2V], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(families["i2v"].folder.path, tmp_path / "copy"))
    file = copy / "image_processor" / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"image_mean": [0.5, 0.5, 0.5]}))
    changed, family = WanI2V(PipelineFolder(path=copy)), families["i2v"]
    assert changed.media_encoder_id(torch.float32) != family.media_encoder_id(torch.float32)
    media = build_media(family)[:1]
    ours, theirs = (one.load_media_encoder(torch.float32, CPU)(media)[0] for one in (family, changed))
    assert not torch.equal(ours["image_embeds"], theirs["image_embeds"])


@pytest.mark.parametrize("num_frames", [0, 1, 4])
def test_a_clip_needs_frames_after_the_first(num_frames: int, families: dict[str, WanI2V]) -> None:
    with pytest.raises(UserError, match=f"data.frame_counts: {num_frames} frames; .* such as 5 or 9"):
        families["i2v"].check_frames(num_frames, key="data.frame_counts")
    families["i2v"].check_frames(5, key="data.frame_counts")
