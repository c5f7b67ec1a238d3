"""A tiny pipeline of each family on disk, built once for the tests of all files."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ltx_layouts
import pytest
from family_sample import Sample, build_sample, families_to_test, small_edit_inputs
from flux2_layouts import klein
from wan_pipelines import ti2v

LAYOUTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "flux2 klein": ("flux2", klein),
    # Its decoder is told less noise than the pipeline's default, unless it is one that removes none.
    "ltx_video of conditions": ("ltx_video", partial(ltx_layouts.of_conditions, denoises=False)),
    "wan ti2v": ("wan", ti2v),
}
"""Releases with another pipeline or other encoders than the tiny pipeline of their family, which is named."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of all families on each."""
    has_its_own = hasattr(metafunc.module, "sample")
    if "sample" in metafunc.fixturenames and not has_its_own:
        names = families_to_test(metafunc.config)
        layouts = [layout for layout, (family, _) in LAYOUTS.items() if family in names]
        metafunc.parametrize("sample", [*names, *layouts], indirect=True, scope="module")


@pytest.fixture(scope="module")
def _small_inputs() -> Iterator[None]:
    with small_edit_inputs():
        yield


@pytest.fixture(scope="session")
def samples() -> dict[str, Sample]:
    """Those that were built so far, by the name of their family or layout."""
    return {}


@pytest.fixture(scope="module")
def sample(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    samples: dict[str, Sample],
    _small_inputs: None,
) -> Sample:
    name = request.param
    if name not in samples:
        family, build = LAYOUTS.get(name, (name, None))
        samples[name] = build_sample(family, tmp_path_factory.mktemp(name), build)
    return samples[name]


@pytest.fixture
def mode_of_the_vae(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the pipeline of FLUX.1 Fill take the mode of the picture that it is told of, as training does.

    It draws from what the VAE gives, which of a random one is far from that.
    """
    if sample.name == "flux_fill":
        draw = "diffusers.models.autoencoders.vae.DiagonalGaussianDistribution.sample"
        monkeypatch.setattr(draw, lambda given, _generator=None: given.mode())
