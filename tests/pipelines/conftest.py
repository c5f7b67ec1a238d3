"""A tiny pipeline of each family on disk, built once for the tests of all files."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import release_layouts as releases
from family_sample import Sample, build_sample, families_to_test, small_edit_inputs

from diffsynth_lite.pipelines import load_family

Layouts = dict[str, tuple[str, Callable[[], Any]]]
LAYOUTS: Layouts = {
    "flux2 klein": ("flux2", releases.klein),
    # Its decoder gets less noise than the pipeline's default, unless it is one that removes none.
    "ltx_video of conditions": ("ltx_video", partial(releases.ltx_of_conditions, denoises=False)),
    "wan ti2v": ("wan", releases.ti2v),
}
"""Releases with another pipeline or other encoders than the tiny pipeline of their family, which is named."""
FURTHER_LAYOUTS: Layouts = {
    "cogvideox 1.5": ("cogvideox", partial(releases.cogvideox, "1.5")),
    "cogvideox 2b": ("cogvideox", partial(releases.cogvideox, "2b")),
    "flux schnell": ("flux", releases.schnell),
    "flux2 klein distilled": ("flux2", partial(releases.klein, is_distilled=True)),
    "hunyuan_video unguided": ("hunyuan_video", releases.hunyuan_without_guidance),
    "hunyuan_video_i2v 33ch": ("hunyuan_video_i2v", releases.hunyuan_of_33_channels),
    "hunyuan_video_15 of images": ("hunyuan_video_15", releases.hunyuan_of_images),
    "ltx2 2.5": ("ltx2", releases.ltx_2_5),
    "qwen_image_edit plus": ("qwen_image_edit", releases.edit_plus),
    "sana 1.5": ("sana", partial(releases.sana, qk_norm="rms_norm_across_heads")),
    "sana 4k": (
        "sana",
        partial(releases.sana, interpolation_scale=2.0, sample_size=128, timestep_scale=0.001),
    ),
}
"""Releases that differ in less, for the tests marked ``further_layouts``."""
ALL_LAYOUTS: Layouts = {
    **LAYOUTS,
    **FURTHER_LAYOUTS,
    "kandinsky5_video of images": ("kandinsky5_video", releases.kandinsky_of_images),
    "wan experts": ("wan", releases.two_experts),
    "wan_i2v a14b": ("wan_i2v", partial(releases.wan_of_images, "a14b")),
    "wan_i2v flf2v": ("wan_i2v", partial(releases.wan_of_images, "flf2v")),
    "wan_vace experts": ("wan_vace", releases.vace_of_two_experts),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of all families on each."""
    is_of_one = hasattr(metafunc.module, "FAMILY") or hasattr(metafunc.module, "sample")
    if "sample" in metafunc.fixturenames and not is_of_one:
        names = families_to_test(metafunc.config)
        if only := metafunc.definition.get_closest_marker("families"):
            names = [name for name in names if only.args[0](name, load_family(name))]
        marks = {mark.name for mark in metafunc.definition.iter_markers()}
        layouts = {} if "of_the_model" in marks else LAYOUTS
        if "further_layouts" in marks:
            layouts = LAYOUTS | FURTHER_LAYOUTS
        chosen = [layout for layout, (family, _) in layouts.items() if family in names]
        metafunc.parametrize("sample", [*names, *chosen], indirect=True, scope="module")


@pytest.fixture(scope="module")
def _small_inputs() -> Iterator[None]:
    with small_edit_inputs():
        yield


class _Samples(dict[str, Sample]):
    """Those that were built so far, by the name of their family or layout."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__()
        self._config = config

    def __missing__(self, name: str) -> Sample:
        family, build = ALL_LAYOUTS.get(name, (name, None))
        self[name] = build_sample(family, self._config._tmp_path_factory.mktemp(name), build)
        return self[name]


_SAMPLES = pytest.StashKey[_Samples]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SAMPLES] = _Samples(config)


def pytest_before_fork(session: pytest.Session) -> None:
    """Build the samples of which several files have tests; all take 15 CPU seconds, in each worker."""
    files: dict[str, set[Path]] = {}
    for item in session.items:
        if name := getattr(item, "callspec", None) and item.callspec.params.get("sample"):
            files.setdefault(name, set()).add(item.path)
    samples = session.config.stash[_SAMPLES]
    with small_edit_inputs():
        for name in (name for name, paths in files.items() if len(paths) > 1):
            # What raises here fails the tests that need it, and no others.
            pytest.CallInfo.from_call(partial(samples.__getitem__, name), "setup", KeyboardInterrupt)


@pytest.fixture(scope="module")
def sample_of(request: pytest.FixtureRequest, _small_inputs: None) -> Callable[[str], Sample]:
    """The sample of a family or layout by its name, which no test may change."""
    return request.config.stash[_SAMPLES].__getitem__


@pytest.fixture(scope="module")
def sample(request: pytest.FixtureRequest, sample_of: Callable[[str], Sample]) -> Sample:
    """Of each family, or in a file with a ``FAMILY`` of that one."""
    return sample_of(getattr(request, "param", None) or request.module.FAMILY)


@pytest.fixture(scope="module")
def family(sample: Sample) -> Any:
    return sample.family


@pytest.fixture(scope="module")
def pipeline(sample: Sample) -> Any:
    """The tiny pipeline as it was saved."""
    return sample.fresh_pipeline()


@pytest.fixture
def mode_of_the_vae(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the pipeline of FLUX.1 Fill take the mode of its image, as training does.

    It draws from what the VAE gives, which of a random one is far from that.
    """
    if sample.name == "flux_fill":
        draw = "diffusers.models.autoencoders.vae.DiagonalGaussianDistribution.sample"
        monkeypatch.setattr(draw, lambda given, _generator=None: given.mode())
