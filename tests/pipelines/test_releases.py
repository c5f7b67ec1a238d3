"""Every release is built on the meta device by what is written down of it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from class_defaults import IMPORTED, Row
from diffusers_numbers import READ_IN_DIFFUSERS
from release_numbers import READ, UNCONFIRMED
from torch import nn

from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.pipelines import ModelFamily, family_names, load_family, releases_of
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.folder import ComponentFile
from diffsynth_lite.pipelines.base.release_folder import (
    differences,
    find_base_model,
    find_releases,
    num_parameters,
    weight_bytes,
    write_release,
)
from diffsynth_lite.pipelines.flux import Flux
from diffsynth_lite.releases import BaseModel, Release
from diffsynth_lite.training.distilled import distillation_warning

TOLERANCE = 0.05
"""Numbers of parameters are published with one or two digits."""
ROUNDED_DOWN = {
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": 1418996800,
    **dict.fromkeys(("krea/Krea-2-Raw", "krea/Krea-2-Turbo"), 12820073036),
}
"""Parameters of those whose names give less than is there."""
OTHER_LIMITS = {
    "FLUX.1 schnell": 256,
    "Pony V7": 768,
    **dict.fromkeys(("Qwen-Image-Edit", "Qwen-Image-Edit-2509", "Qwen-Image-Edit-2511"), 1024),
}
"""Tokens of prompts: what two were made with, and what is the most that pipelines take which cut none."""
GATES = "to_gate_logits"
"""Of LTX-2.3: layers of the attention with one output for each head."""
# krea2_edit has those of krea2.
ALL_RELEASES = [release for name in family_names() if name != "krea2_edit" for release in releases_of(name)]
ALL_ROWS: Sequence[Row] = (
    *IMPORTED,
    *(row for rows in (READ_IN_DIFFUSERS, READ, UNCONFIRMED) for row in chain(*rows.values())),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every release of every family, or of those that ``--family`` names."""
    if "release" in metafunc.fixturenames:
        names = metafunc.config.getoption("--family") or family_names()
        pairs = [(name, release) for name in names for release in releases_of(name)]
        ids = [release.hub_id for _, release in pairs]
        metafunc.parametrize(("family", "release"), pairs, ids=ids, indirect=["family"])


@pytest.fixture
def family(request: pytest.FixtureRequest, release: Release, tmp_path: Path) -> Iterator[ModelFamily]:
    """The real family, bound to the folder of the release, which has no weights."""
    return load_family(request.param)(write_release(release, tmp_path))


def parameters_of(model: nn.Module) -> int:
    """With tables that are never trained, as a file holds them and as people count."""
    return sum(tensor.numel() for tensor in model.state_dict().values())


def test_the_family_takes_the_folder_and_answers_for_it(
    family: DiffusersFamily, release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(family), "load_tokenizer", lambda *_: None)  # the folder has no vocabulary
    family.check_folder(with_weights=False)
    width, height, num_frames = release.size
    family.check_size(width, height, keys="size")
    # After an image come its layers.
    family.check_frames(num_frames - family.default_num_layers, key="size")
    shape = family.latents_shape(*release.size)
    assert all(side > 0 for side in shape)
    assert 256 <= family.num_tokens(shape) <= 120_000
    assert 1 <= family.family_shift(shape) < 40
    call = signature(getattr(diffusers, release.pipeline_class).__call__).parameters
    if "max_sequence_length" in call:
        default = call["max_sequence_length"].default
        assert family.max_prompt_tokens == OTHER_LIMITS.get(release.name, default)


def test_the_model_has_the_published_size_and_gets_a_lora(family: DiffusersFamily, release: Release) -> None:
    model = family.empty_transformer()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    for part in family.parts_of(model).values():
        if release.parameters is not None:
            published = ROUNDED_DOWN.get(release.hub_id, release.parameters)
            assert parameters_of(part) == pytest.approx(published, rel=TOLERANCE)
    for targets in (family.default_target_modules, *family.target_sets.values()):
        layers = find_target_layers(model, targets, unused_modules=family.unused_modules(model))
        weights = [model.get_submodule(layer).weight for layer in layers if not layer.endswith(GATES)]
        assert all(min(weight.shape) >= 64 for weight in weights)


def test_each_component_is_built_and_as_large_as_its_files(family: DiffusersFamily, release: Release) -> None:
    assert set(family.components) == set(release.components)
    assert set(family.components_without_weights) <= {"scheduler", *release.tokenizers}
    for component in release.components.values():
        assert num_parameters(component) > 10**6
        if component.num_bytes is not None:
            assert weight_bytes(component) == component.num_bytes


def test_a_release_names_where_it_is_from_and_is_known_by_its_files(
    family: DiffusersFamily, release: Release
) -> None:
    assert release.sources.keys() == {"pipeline", "size", "parameters", "licence", "architecture"}
    assert all(component.source for component in (*release.components.values(), release.scheduler))
    assert release.pipeline_class in family.pipeline_classes
    assert differences(release, family.folder) == {}
    by_files = find_releases(family.releases, str(family.folder.path), family.folder)
    assert (release, {}) in by_files
    assert find_releases(family.releases, release.hub_id, family.folder) == [(release, {})]
    base = find_base_model(family.releases, release.hub_id, family.folder)
    assert (base.release, base.hub_id) == (release, release.hub_id)
    assert release.architecture or "no program" in release.sources["architecture"]
    assert base.architecture == release.architecture
    assert base.version == release.version


def test_distilled_releases_are_warned_of_and_no_others(family: DiffusersFamily, release: Release) -> None:
    assert bool(distillation_warning(family, release.hub_id)) == bool(release.distilled)


def stated_numbers(release: Release) -> dict[str, dict[str, Any]]:
    """All numbers and switches that a release states, by place and setting; settings of settings by a dot."""
    places = {**release.components, "scheduler": release.scheduler}
    configs = {place: component.config for place, component in places.items()}
    size = dict(zip(("width", "height", "frames"), release.size, strict=True))
    return {
        place: {name: value for name, value in flattened(config) if holds_number(value)}
        for place, config in {**configs, "settings": release.settings, "size": size}.items()
    }


def flattened(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", tuple(value) if isinstance(value, list) else value


def holds_number(value: Any) -> bool:
    return any(map(holds_number, value)) if isinstance(value, tuple) else isinstance(value, int | float)


def rows_of(place: str) -> Iterator[Mapping[str, Any]]:
    """What is known of a place, ``name of a release / folder``, from all sources."""
    for patterns, numbers in ALL_ROWS:
        if any(fnmatchcase(place, pattern) for pattern in patterns_of(patterns)):
            yield numbers


def patterns_of(patterns: str | tuple[str, ...]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else patterns


@pytest.mark.parametrize("name", [release.name for release in ALL_RELEASES])
def test_each_number_of_a_release_is_that_of_its_source(name: str) -> None:
    (release,) = (one for one in ALL_RELEASES if one.name == name)
    for place, stated in stated_numbers(release).items():
        known = list(rows_of(f"{name} / {place}"))
        names = [setting for numbers in known for setting in numbers]
        assert sorted(names) == sorted(stated), (
            f"{place}: each number has one source, and each source a number"
        )
        assert stated == {setting: value for numbers in known for setting, value in numbers.items()}, place


def test_each_source_of_numbers_is_of_a_release() -> None:
    places = [f"{one.name} / {place}" for one in ALL_RELEASES for place in stated_numbers(one)]
    patterns = [pattern for row, _ in ALL_ROWS for pattern in patterns_of(row)]
    assert [one for one in patterns if not any(fnmatchcase(place, one) for place in places)] == []


def test_no_release_is_listed_twice() -> None:
    assert len({release.hub_id for release in ALL_RELEASES}) == len(ALL_RELEASES)
    assert len({release.name for release in ALL_RELEASES}) == len(ALL_RELEASES)


def test_a_family_that_names_no_releases_has_none_not_those_of_the_family_it_is_made_from() -> None:
    class Other(Flux):
        """Made from FLUX.1."""

    assert Flux.releases
    assert Other.releases == releases_of("my_families.stable_diffusion") == ()


@pytest.mark.parametrize(
    ("component", "changes", "expected"),
    [
        ("unet", {"upcast_attention": None}, {}),
        ("unet", {"sample_size": 64}, None),
        ("text_encoder", {"num_hidden_layers": 3}, {"num_hidden_layers": (3, 12)}),
    ],
)
def test_a_release_is_known_by_what_makes_it_that_model(
    tmp_path: Path, component: str, changes: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    base, *_ = releases = releases_of("sdxl")
    folder = write_release(base, tmp_path)
    file = tmp_path / component / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    found = find_releases(releases, "a/merge", folder)
    if expected is None:
        assert found == []
    else:
        assert found == [(base, {f"{component}.{setting}": pair for setting, pair in expected.items()})]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("stable-diffusion-xl-base-1.0", ("stabilityai/stable-diffusion-xl-base-1.0", None, "SDXL base 1.0")),
        ("juggernaut", (None, None, None)),
        (f"models--a--merge/snapshots/{'0a' * 20}", ("a/merge", "0a" * 20, None)),
        (
            f"models--stabilityai--sdxl-turbo/snapshots/{'0a' * 20}",
            ("stabilityai/sdxl-turbo", "0a" * 20, "SDXL Turbo"),
        ),
    ],
)
def test_of_a_local_folder_no_more_is_known_than_by_its_files_and_its_name(
    tmp_path: Path, place: str, expected: tuple[str | None, str | None, str | None]
) -> None:
    base, *_ = releases = releases_of("sdxl")
    folder = write_release(base, tmp_path / place)
    found = find_base_model(releases, str(folder.path), folder)
    assert (found.hub_id, found.revision, found.release and found.release.name) == expected
    is_turbo = expected[2] == "SDXL Turbo"
    assert found.architecture == f"stable-diffusion-xl-{'turbo-v1' if is_turbo else 'v1-base'}"
    assert found.version == "sdxl_base_v1-0"


def test_of_weights_from_another_file_only_the_architecture_is_known(tmp_path: Path) -> None:
    base, *_ = releases = releases_of("flux")
    folder = write_release(base, tmp_path / "FLUX.1-dev")
    folder = replace(folder, files={"transformer": ComponentFile(path=tmp_path / "mine.safetensors", key="")})
    assert find_base_model(releases, base.hub_id, folder) == BaseModel(
        architecture="flux-1-dev", version="flux1"
    )
    assert find_base_model((), "my/model", folder) == BaseModel()


def test_bytes_are_those_of_the_dtype_asked_for() -> None:
    component = releases_of("flux")[0].components["transformer"]
    assert weight_bytes(component, torch.float32) == 2 * 23802816640
