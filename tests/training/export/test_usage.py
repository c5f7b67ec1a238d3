"""The code of a card generates what previews show, of what no run in the tests of families has."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import release_layouts
import torch
from card_code import LARGEST_DIFFERENCE, difference, generated
from diffusers import LTXPipeline, WanVACEPipeline
from family_sample import NEGATIVE, PROMPTS, Sample, adapted_transformer, build_sample, clip, hole, mandelbrot
from torch import nn

from diffsynth_lite.data.images import black_or_white, cover
from diffsynth_lite.data.video import read_frames, write_video
from diffsynth_lite.lora import adapter_settings, adapter_tensors, exported_tensors
from diffsynth_lite.lora.kinds import LORA, AdapterKind, Dora, Lokr
from diffsynth_lite.media import Drawn
from diffsynth_lite.pipelines import ModelFamily, PreviewRequest
from diffsynth_lite.training.export.usage import usage_code
from diffsynth_lite.training.lora_file import export_lora

GIVEN = {"num_inference_steps": 2, "guidance_scale": 3.0, "seed": 4}
KINDS: dict[str, tuple[AdapterKind, ...]] = {
    "flux": (Dora(), Lokr()),
    "ltx2": (Dora(),),
    "qwen_image": (Dora(), Lokr()),
    "sdxl": (),
    "wan": (),
    "z_image": (Dora(), Lokr()),
}
"""Those of other adapters that diffusers loads, of some families."""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def export(sample: Sample, kind: AdapterKind = LORA) -> nn.Module:
    """The family's model with an adapter, which is written to the folder ``lora``."""
    model = adapted_transformer(sample, kind=kind).eval()
    for name, parameter in model.named_parameters():
        if ".lokr_w" in name:
            parameter.data.mul_(4)
    settings, family = adapter_settings(model), sample.family
    family.settle_lora_spelling(family.empty_transformer(), settings["target_modules"], rank=4, kind=kind)
    tensors = exported_tensors(model, adapter_tensors(model), torch.device("cpu"))
    export_lora(family, Path("lora"), tensors, settings, lambda _: {})
    return model


def code_for(family: ModelFamily, request: PreviewRequest, base: str = "model") -> str | None:
    told = {"base": base, "dtype": "float32", "lora": "lora"}
    prompts = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVE}
    return usage_code(family, request, **told, **prompts, fps=family.default_fps)


def previewed(family: ModelFamily, model: nn.Module, request: PreviewRequest) -> Drawn:
    with torch.no_grad():
        [preview] = family.sample(model, torch.float32, [request])
    return preview


@pytest.mark.parametrize("name", KINDS)
def test_other_kinds_of_adapters_have_code_where_diffusers_loads_them(name: str) -> None:
    sample = build_sample(name, Path("model"))
    family, request = sample.family, sample.request(**GIVEN)
    for kind in (Dora(), Lokr()):
        model = export(sample, kind)
        code = code_for(family, request)
        assert (code is not None) == family.loaded_by_diffusers == (kind in KINDS[name])
        if code is not None:
            preview = previewed(family, model, request)
            assert difference(generated(code)[0], preview) <= LARGEST_DIFFERENCE
            plain = previewed(family, family.load_transformer(torch.float32), request)
            assert difference(plain, preview) > LARGEST_DIFFERENCE


def of_0_9_5_by_another_name() -> LTXPipeline:
    """As diffusers' conversion script writes it."""
    return LTXPipeline(**release_layouts.ltx_of_conditions().components)


@pytest.mark.parametrize(
    ("name", "build"), [("wan", release_layouts.two_experts), ("ltx_video", of_0_9_5_by_another_name)]
)
def test_releases_of_another_layout_have_code_of_their_own(name: str, build: Callable[[], Any]) -> None:
    sample = build_sample(name, Path("model"), build)
    family, request = sample.family, sample.request(**GIVEN)
    model = export(sample)
    code = code_for(family, request)
    assert code is not None
    # What a base is called is no code.
    assert "import Image" not in str(code_for(family, request, base="somebody/Z-Image"))
    drawn, pipeline = generated(code)
    assert all(getattr(pipeline, part).peft_config for part in family.trained)
    assert difference(drawn, previewed(family, model, request)) <= LARGEST_DIFFERENCE


def test_what_guides_a_clip_and_what_of_it_stays_are_read_from_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model hardly changes with them, so that they are compared as the pipeline has them."""
    sample = build_sample("wan_vace", Path("model"))
    seen, prepare = [], WanVACEPipeline.preprocess_conditions

    def note(*args: Any, **kwargs: Any) -> Any:
        seen.append(prepare(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(WanVACEPipeline, "preprocess_conditions", note)
    family = sample.family
    assert family.frame_step is not None
    plain = replace(sample.request(**GIVEN), control=(), num_frames=family.frame_step + 1)
    width, height, times = plain.width, plain.height, [place / 16 for place in range(plain.num_frames)]
    write_video(Path("control.mp4"), clip(96, 48, plain.num_frames + 2, 40), fps=16)
    guides = tuple(cover(frame, width, height) for frame in read_frames(Path("control.mp4"), times))
    mandelbrot(60, 50, 20).save("input.png")
    mandelbrot(70, 40, 30).save("control.png")
    hole(90, 60, 0).save("mask.png")
    still = (mandelbrot(60, 50, 20),)
    mask = (black_or_white(cover(hole(90, 60, 0), width, height)),) * plain.num_frames
    model, pipeline = export(sample), None
    for request in (
        plain,
        replace(plain, control=guides),
        replace(plain, inpaint_mask=mask, inputs=still),
        replace(plain, inpaint_mask=mask, control=guides),
        replace(plain, inpaint_mask=mask, control=guides, inputs=still),
        replace(plain, num_frames=1, control=(cover(mandelbrot(70, 40, 30), width, height),)),
    ):
        code = code_for(family, request)
        assert code is not None
        preview = previewed(family, model, request)
        drawn, pipeline = generated(code, pipeline=pipeline)
        assert difference(drawn, preview) <= LARGEST_DIFFERENCE
    for (video, mask, _), (read, read_mask, _) in zip(seen[::2], seen[1::2], strict=True):
        # In [-1, 1]; another decoder rounds another way.
        torch.testing.assert_close(read, video, rtol=0, atol=2.01 * LARGEST_DIFFERENCE / 255)
        assert torch.equal(read_mask, mask)
    assert len({video.sum().item() for video, *_ in seen[::2]}) == 5  # a clip that stays guides itself
