"""A tiny pipeline of each family on disk, built once for the tests of a file."""

from collections.abc import Iterator

import pytest
from family_sample import Sample, build_sample, small_edit_inputs

from diffsynth_lite.pipelines import family_names


@pytest.fixture(scope="module")
def _small_inputs() -> Iterator[None]:
    with small_edit_inputs():
        yield


@pytest.fixture(scope="module", params=family_names())
def sample(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, _small_inputs: None
) -> Sample:
    return build_sample(request.param, tmp_path_factory.mktemp(request.param))
