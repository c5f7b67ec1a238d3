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
    SIGMA,
    Sample,
    build_media,
    encode_texts,
    family_fixture,
    mandelbrot,
)
from PIL import ImageOps
from release_layouts import wan_of_images

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import Conditioning, PipelineFolder, PreviewRequest
from diffsynth_lite.pipelines.wan import Wan
from diffsynth_lite.pipelines.wan_i2v import WanI2V

FAMILY = "wan"
of_ti2v = family_fixture("wan ti2v")


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


def test_in_bf16_the_input_follows_the_first_layer_and_not_what_stays_in_fp32(sample: Sample) -> None:
    transformer = sample.family.load_transformer(torch.bfloat16)
    assert next(transformer.parameters()).dtype == torch.float32  # a table comes first
    with torch.no_grad():
        velocity = sample.family.predict(transformer, sample.latents, SIGMA, sample.conditioning)
    assert velocity.dtype == torch.bfloat16


def test_the_facts_of_ti2v_come_from_its_folder(family: Wan, of_ti2v: Wan) -> None:
    facts = [
        (one.size_divisor, one.default_num_frames, one.default_fps, one.num_tokens((48, 3, 4, 8)))
        for one in (family, of_ti2v)
    ]
    assert facts == [(16, 81, 16, 24), (32, 121, 24, 24)]
    with pytest.raises(UserError, match="48x32 is not divisible by 32"):
        of_ti2v.check_size(48, 32, keys="data.width, data.height")


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


def test_what_is_kept_of_the_images_is_counted_before_anything_is_encoded(
    families: dict[str, WanI2V],
) -> None:
    for family in families.values():
        (encoded,) = family.load_media_encoder(torch.float32, CPU)(build_media(family)[:1])
        latents = encoded.pop("latents")
        num_values = sum(tensor.numel() for tensor in encoded.values())
        assert num_values == family.num_condition_values(latents.shape)


@pytest.mark.parametrize("has_last", [False, True])
def test_the_mask_marks_the_frames_that_are_given_and_the_latents_are_those_of_grey_between_them(
    has_last: bool, families: dict[str, WanI2V]
) -> None:
    family = families["a14b"]
    item = build_media(family)[0]
    item = dataclasses.replace(item, last_frame=item.frames[-1] if has_last else None)
    (encoded,) = family.load_media_encoder(torch.float32, CPU)([item])
    mask, latents = encoded["condition_latents"].split([4, 16])
    given = [[1.0] * 4, [0.0] * 4, [0.0] * 3 + [float(has_last)]]  # of 1 + 4 + 4 frames, the first four times
    assert mask.shape == (4, 3, 4, 8)
    assert mask.mean((2, 3)).T.tolist() == given
    vae = wan_of_images("a14b").vae
    pixels = torch.zeros(1, 3, 9, 32, 64)
    for place in [0, -1] if has_last else [0]:
        channels = torch.frombuffer(bytearray(item.frames[place].tobytes()), dtype=torch.uint8)
        pixels[0, :, place] = channels.view(32, 64, 3).permute(2, 0, 1) / 127.5 - 1
    mean, std = (
        torch.tensor(values).view(-1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    with torch.no_grad():
        expected = (vae.encode(pixels).latent_dist.mode()[0] - mean) / std
    torch.testing.assert_close(latents, expected, rtol=1e-4, atol=1e-5)


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


def test_clips_are_encoded_alike_singly_and_together(families: dict[str, WanI2V]) -> None:
    encode = families["flf2v"].load_media_encoder(torch.float32, CPU)
    media = build_media(families["flf2v"])
    for item, together in zip(media, encode(media), strict=True):
        (single,) = encode([item])
        for name, tensor in single.items():
            torch.testing.assert_close(together[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("release", ["i2v", "flf2v"])
def test_each_sample_of_a_batch_sees_its_own_images(
    release: str, families: dict[str, WanI2V], prompts: list[Conditioning]
) -> None:
    family = families[release]
    transformer = family.load_transformer(torch.float32)
    encoded = family.load_media_encoder(torch.float32, CPU)(build_media(family))
    noisy = torch.stack([tensors.pop("latents") for tensors in encoded])
    conditioning = [prompt | tensors for prompt, tensors in zip(prompts, encoded, strict=True)]
    with torch.no_grad():
        together = family.predict(transformer, noisy, SIGMA, conditioning)
        for place, sample in enumerate(conditioning):
            here = slice(place, place + 1)
            single = family.predict(transformer, noisy[here], SIGMA[here], [sample])
            torch.testing.assert_close(together[here], single, rtol=1e-4, atol=1e-5)
            stranger = conditioning[place - 1]["image_embeds"].flip(0)
            other = family.predict(
                transformer, noisy[here], SIGMA[here], [sample | {"image_embeds": stranger}]
            )
            assert not torch.allclose(single, other, atol=1e-4)


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


def test_the_folder_decides_whether_a_clip_may_end_with_an_image(families: dict[str, WanI2V]) -> None:
    takes = {release: family.takes_last_frames for release, family in families.items()}
    assert takes == {"i2v": False, "flf2v": True, "a14b": True}


@pytest.mark.parametrize("num_frames", [0, 1, 4])
def test_a_clip_needs_frames_after_the_first(num_frames: int, families: dict[str, WanI2V]) -> None:
    with pytest.raises(UserError, match=f"data.frame_counts: {num_frames} frames; .* such as 5 or 9"):
        families["i2v"].check_frames(num_frames, key="data.frame_counts")
    families["i2v"].check_frames(5, key="data.frame_counts")
