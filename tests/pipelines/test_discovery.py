"""Families are found by their file's name or by a dotted path, and imported when they are used."""

import json
import re
from pathlib import Path

import diffusers
import pytest
from processes import Program

from diffsynth_lite import pipelines
from diffsynth_lite.config import Config
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import PipelineFolder, family_names, load_family, require_family
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.pipelines.qwen_image_edit import QwenImageEdit
from diffsynth_lite.releases import UNTRAINED
from diffsynth_lite.training.optimization.optimizers import shown_arguments


def test_the_built_in_families_are_the_files_and_folders_next_to_their_base() -> None:
    here = Path(pipelines.__path__[0])
    folders = {path.parent.name for path in here.glob("*/__init__.py")}
    files = {path.stem for path in here.glob("*.py")}
    assert family_names() == sorted((files | folders) - {"__init__", "base"})
    assert {"sdxl", "wan", "wan_i2v"} < set(family_names())
    assert load_family("qwen_image") is QwenImage
    assert load_family("qwen_image_edit") is QwenImageEdit


def test_a_family_kept_elsewhere_is_found_by_its_dotted_path() -> None:
    family = load_family("my_families.stable_diffusion")
    assert (family.__name__, family.__module__) == ("StableDiffusion", "my_families.stable_diffusion")


CODE = """
import logging
import torch
from diffsynth_lite.pipelines.qwen_image import QwenImage
logging.getLogger(__name__).warning("runs")
class Mine(QwenImage): ...
class Optimizer(torch.optim.SGD): ...
"""
LOADED_BY = {
    "model.family": lambda module: load_family(module),
    "train.optimizer": lambda module: shown_arguments(config_with(f"{module}.Optimizer")),
}


def config_with(optimizer: str) -> Config:
    required = {"model": {"family": "qwen_image", "path": "m"}, "data": {"path": "d"}, "output": {"dir": "o"}}
    return Config.model_validate(required | {"train": {"optimizer": optimizer}})


@pytest.mark.parametrize("setting", LOADED_BY)
def test_code_of_somebody_else_is_named_before_it_runs_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, setting: str
) -> None:
    package = f"of_somebody_{setting.replace('.', '_')}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("import logging\nlogging.warning('package runs')\n")
    (tmp_path / package / "code.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        LOADED_BY[setting](f"{package}.code")
    warning, *others = caplog.messages
    assert warning.startswith(
        f"{setting}: imports the Python module {package}.code, which comes with neither"
    )
    assert others == ["package runs", "runs"]


def test_expected_code_is_imported_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    load_family("diffsynth_lite.pipelines.qwen_image")
    for optimizer in ("torch.optim.SGD", "prodigyopt.Prodigy", "schedule_free", "adamw"):
        shown_arguments(config_with(optimizer))
    assert caplog.messages == []


def test_a_family_may_be_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "more_families" / "mine"
    package.mkdir(parents=True)
    (package / "family.py").write_text(
        "from diffsynth_lite.pipelines.qwen_image import QwenImage\nclass Mine(QwenImage): ...\n"
    )
    (package / "__init__.py").write_text("from more_families.mine.family import Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_family("more_families.mine").__name__ == "Mine"


def test_an_unknown_family_is_refused_with_the_close_one() -> None:
    with pytest.raises(UserError, match="did you mean 'qwen_image'"):
        load_family("qwen_imag")


@pytest.mark.parametrize("name", ["base", "no_such", "no.such.module", "diffsynth_lite.no_such"])
def test_an_unknown_family_names_the_ones_there_are(name: str) -> None:
    with pytest.raises(UserError, match=f"built-in families: {', '.join(family_names())}"):
        load_family(name)


def test_a_dotted_path_that_python_does_not_find_is_an_error_with_where_it_looks() -> None:
    with pytest.raises(UserError, match="install its package or name its folder in PYTHONPATH"):
        load_family("my_package.my_family")


def test_a_module_without_a_family_is_refused() -> None:
    with pytest.raises(UserError, match="defines 0 concrete subclasses"):
        load_family("json.decoder")


def test_a_missing_import_inside_a_familys_file_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "broken_families"
    package.mkdir()
    (package / "broken.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_family("broken_families.broken")


REFUSED = {
    "LTXLatentUpsamplePipeline": ("Upscalers of LTX-Video", "ltx_video"),
    "LTX2LatentUpsamplePipeline": ("Upscalers of LTX-2", "ltx2"),
    "SkyReelsV2Pipeline": ("SkyReels-V2", "wan"),
    "SkyReelsV2ImageToVideoPipeline": ("SkyReels-V2 from images", "wan_i2v"),
    "SkyReelsV2DiffusionForcingPipeline": ("SkyReels-V2 DF", "wan"),
    "CogVideoXImageToVideoPipeline": ("CogVideoX from images", "cogvideox"),
    "CogVideoXFunControlPipeline": ("CogVideoX-Fun", "cogvideox"),
    "HunyuanVideoFramepackPipeline": ("FramePack", "hunyuan_video"),
    "HunyuanSkyreelsImageToVideoPipeline": ("SkyReels V1 from images", "hunyuan_video"),
    "StableDiffusion3ControlNetPipeline": ("ControlNets of Stable Diffusion 3", "sd3"),
    "FluxControlPipeline": ("FLUX.1 Depth and Canny", "flux"),
    "FluxControlNetPipeline": ("ControlNets of FLUX.1", "flux"),
    "Flux2KleinKVPipeline": ("FLUX.2 klein KV", "flux2"),
    "SanaVideoPipeline": ("Sana-Video", "sana"),
    "SanaSprintPipeline": ("Sana Sprint", "sana"),
    "ZImageOmniPipeline": ("Z-Image-Omni", "z_image"),
    "ZImageControlNetPipeline": ("ControlNets of Z-Image", "z_image"),
    "StableDiffusionXLImg2ImgPipeline": ("The SDXL refiner", "sdxl"),
}


def refusal(family: str, pipeline_class: str, root: Path) -> str:
    (root / "model_index.json").write_text(json.dumps({"_class_name": pipeline_class}))
    with pytest.raises(UserError, match=f"holds a {pipeline_class}, but this family trains a ") as caught:
        require_family(load_family(family), PipelineFolder(path=root))
    return str(caught.value)


@pytest.mark.parametrize(("pipeline_class", "expected"), REFUSED.items(), ids=REFUSED)
def test_a_model_that_no_family_trains_is_refused_with_the_nearest(
    pipeline_class: str, expected: tuple[str, str], tmp_path: Path
) -> None:
    models, nearest = expected
    message = refusal("chroma", pipeline_class, tmp_path)
    assert f"no built-in family trains that ({models}: " in message
    assert f"; the nearest is {nearest} (" in message
    assert "; docs/add-a-model.md says how one is added, or check model.path" in message


@pytest.mark.parametrize(
    ("family", "pipeline_class", "words"),
    [
        (
            "wan",
            "QwenImageImg2ImgPipeline",
            "trains that; the nearest is qwen_image (Qwen-Image, from text)",
        ),
        (
            "wan",
            "LikeNoOtherPipeline",
            "no built-in family trains that; docs/add-a-model.md says how",
        ),
        ("flux", "FluxFillPipeline", "; set model.family: flux_fill, or"),
        ("flux", "FluxKontextPipeline", "; set model.family: flux_kontext, or"),
        ("wan", "LTXConditionPipeline", "; set model.family: ltx_video, or"),
        ("wan", "WanImageToVideoPipeline", "; set model.family: wan_i2v, or"),
        ("wan_i2v", "WanPipeline", "; set model.family: wan, or"),
        ("chroma", "FluxPipeline", "; set model.family: flux, or"),
    ],
)
def test_another_pipeline_is_refused_with_the_family_that_trains_it_or_the_way_to_add_one(
    family: str, pipeline_class: str, words: str, tmp_path: Path
) -> None:
    assert words in refusal(family, pipeline_class, tmp_path)


@pytest.mark.parametrize("beginning", UNTRAINED)
def test_what_is_refused_by_name_is_a_pipeline_of_diffusers_that_no_family_trains(beginning: str) -> None:
    names = [name for name in dir(diffusers) if name.startswith(beginning) and name.endswith("Pipeline")]
    assert names
    trained = [name for family in family_names() for name in load_family(family).pipeline_classes]
    assert not [name for name in trained if name.startswith(beginning)]
    assert UNTRAINED[beginning].nearest in family_names()


FAMILIES = {f"diffsynth_lite.pipelines.{name}" for name in family_names()}


# Each line is run in turn; then the process prints what it holds.
STEPS = {
    "package": "import diffsynth_lite",
    "families": "import diffsynth_lite.pipelines as pipelines; pipelines.family_names()",
    "trainer": "import diffsynth_lite.cli.train, diffsynth_lite.training.run",
    "one family": "pipelines.load_family('qwen_image')",
}


FORGET = """
import sys
for name in [*sys.modules]:
    if name.partition(".")[0] in ("diffsynth_lite", "diffusers", "pyarrow"):
        del sys.modules[name]
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Modules after each of ``STEPS``, in a process that begins without ours, diffusers' and pyarrow's."""
    folder = tmp_path_factory.mktemp("imports")
    program = folder / "imports.py"
    program.write_text(FORGET + "".join(f"{line}\nprint(*sorted(sys.modules))\n" for line in STEPS.values()))
    run = Program(program, [], folder / "printed")
    assert run.wait() == 0, run.printed()
    lines = run.printed().splitlines()
    return {step: set(line.split()) for step, line in zip(STEPS, lines, strict=True)}


def diffusers_pipelines(modules: set[str]) -> list[str]:
    """Files of diffusers that define the pipelines of a model."""
    return sorted(name for name in modules if re.fullmatch(r"diffusers\.pipelines\.\w+\.pipeline_\w+", name))


@pytest.mark.parametrize("step", ["package", "families", "trainer"])
def test_nothing_imports_a_family_or_a_pipeline_of_diffusers_before_one_is_asked_for(
    loaded: dict[str, set[str]], step: str
) -> None:
    assert "diffsynth_lite" in loaded[step]
    assert loaded[step] & (FAMILIES | {"pyarrow"}) == set()
    assert diffusers_pipelines(loaded[step]) == []


def test_a_family_imports_itself_and_the_pipelines_it_names(loaded: dict[str, set[str]]) -> None:
    modules = loaded["one family"]
    assert modules & FAMILIES == {"diffsynth_lite.pipelines.qwen_image"}
    assert "diffusers.pipelines.qwenimage.pipeline_qwenimage" in modules
    assert not any("flux" in name for name in diffusers_pipelines(modules))
