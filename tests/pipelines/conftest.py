"""A tiny pipeline of each family on disk, built once for the tests of all files."""

from collections.abc import Iterator

import pytest
from family_sample import Sample, build_sample, families_to_test, small_edit_inputs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of all families on each."""
    has_its_own = hasattr(metafunc.module, "sample")
    if "sample" in metafunc.fixturenames and not has_its_own:
        metafunc.parametrize("sample", families_to_test(metafunc.config), indirect=True, scope="module")


@pytest.fixture(scope="module")
def _small_inputs() -> Iterator[None]:
    with small_edit_inputs():
        yield


@pytest.fixture(scope="session")
def samples() -> dict[str, Sample]:
    """Those that were built so far, by the family's name."""
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
        samples[name] = build_sample(name, tmp_path_factory.mktemp(name))
    return samples[name]
