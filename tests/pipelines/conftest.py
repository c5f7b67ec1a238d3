"""A tiny pipeline of each family on disk, built once."""

import pytest
from family_sample import Sample, build_sample

from diffsynth_lite.pipelines import family_names


@pytest.fixture(scope="session", params=family_names())
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return build_sample(request.param, tmp_path_factory.mktemp(request.param))
