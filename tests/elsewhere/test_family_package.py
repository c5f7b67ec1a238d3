"""A family, its recipe and its tiny pipeline in a package of their own: every command and page finds them."""

import importlib
import logging
import pkgutil
import shutil
from collections.abc import Iterator
from pathlib import Path

import generate_docs
import pytest
from accelerate.state import AcceleratorState
from models_page import render_models_page, render_readme
from tiny_run import tiny_image

from diffsynth_lite import pipelines
from diffsynth_lite.cli.main import main
from diffsynth_lite.cli.train import main as train
from diffsynth_lite.config.reference import render_schema
from diffsynth_lite.pipelines import family_names

MY_FAMILIES = Path(__file__).parent / "my_families"
REPOSITORY = Path(__file__).parents[2]
NAME = "their_package.their_family"
SMALL = (
    *("data.resolutions=[64]", "data.num_workers=0", "train.steps=2", "train.global_batch_size=2"),
    *("train.mixed_precision=no", "train.cpu_threads=1", "lora.rank=2", "model.dtype=float32"),
    *("model.text_encoder_dtype=float32", "model.vae_dtype=float32", "validation.prompts=[a red circle]"),
    *("validation.num_inference_steps=2", "validation.width=64", "validation.height=64"),
    *("validation.loss_items=0", "validation.item_losses=0"),
)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A family and its recipe in a folder of somebody else, which is also the working folder."""
    folder = tmp_path / "their_package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    shutil.copy(MY_FAMILIES / "stable_diffusion.py", folder / "their_family.py")
    recipe = (MY_FAMILIES / "stable_diffusion_lora.yaml").read_text()
    (folder / "stable_diffusion_lora.yaml").write_text(recipe.replace("my_families.stable_diffusion", NAME))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return folder


def test_every_command_finds_a_family_by_its_dotted_name(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module(NAME).tiny().save_pretrained("tiny")
    Path("images").mkdir()
    for number in range(2):
        tiny_image(96, 80, 10 + number).save(f"images/{number}.png")
        Path(f"images/{number}.txt").write_text(f"a circle, no. {number}")

    assert main(["init", "images", "--family", NAME, "--out", "mine.yaml"]) == 0
    assert f"Wrote mine.yaml, for {NAME}." in capsys.readouterr().out
    assert f"\nextends: {package / 'stable_diffusion_lora.yaml'}\n" in Path("mine.yaml").read_text()

    config = ["--config", "mine.yaml", "model.path=tiny", *SMALL]
    assert main(["plan", *config]) == 0
    assert f"{NAME}, 64x64, micro-batch of 1" in capsys.readouterr().out
    assert main(["doctor", *config]) == 0
    assert "2 images" in capsys.readouterr().out
    assert train(config) == 0
    assert (
        main(["sample", "--lora", "runs/mine", "--prompt", "a circle", "--steps", "2", "--out", "new"]) == 0
    )
    assert list(Path("new").glob("*.png"))
    capsys.readouterr()
    assert main(["publish", "runs/mine", "--to", "me/circle", "--dry-run"]) == 0
    assert "pytorch_lora_weights.safetensors" in capsys.readouterr().out

    generate_docs.main(["--family", NAME])
    page = capsys.readouterr().out
    assert page.startswith(f"## {NAME}\n\nStable Diffusion 1.5: a UNet")
    assert "`stable_diffusion_lora.yaml`" in page


def test_the_file_of_a_built_in_family_brings_it_into_schema_readme_and_docs(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(package / "their_family.py", package / "stable_diffusion.py")
    monkeypatch.setattr(pipelines, "__path__", [*pipelines.__path__, str(package)])
    files = pkgutil.iter_modules
    monkeypatch.setattr(pkgutil, "iter_modules", lambda paths: files([*paths, str(package)]))
    monkeypatch.setattr("models_page.family_names", lambda: ["chroma", "stable_diffusion"])
    assert "stable_diffusion" in family_names()
    assert '"stable_diffusion",\n' in render_schema(family_names())
    row = "| [`stable_diffusion`](docs/models.md#stable_diffusion) | Stable Diffusion 1.5: a UNet"
    assert row in render_readme((REPOSITORY / "README.md").read_text(encoding="utf-8"))
    assert "\n## stable_diffusion\n\nStable Diffusion 1.5" in render_models_page(REPOSITORY / "configs")
