"""Filling the cache ahead, and the keys of what a run needs of it."""

from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from PIL import Image
from prepared_run import Prepared, load_config_of, prepare

from diffsynth_lite.config import Config
from diffsynth_lite.errors import UserError
from diffsynth_lite.training.caching import caching_accelerator, fill_cache, needed_keys


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    prepared = prepare(tmp_path_factory.mktemp("care"))
    held_out = prepared.root / "held out"
    held_out.mkdir()
    Image.effect_mandelbrot((96, 48), (-2, -1, 1, 1), 40).convert("RGB").save(held_out / "new.png")
    (held_out / "new.txt").write_text("something never trained on")
    return prepared


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)


def config_of(prepared: Prepared, folder: Path, **changes: str) -> Config:
    return load_config_of(
        prepared.root, {"data.cache_dir": str(folder), "output.dir": str(folder / "run")} | changes
    )


def stored_keys(config: Config) -> set[str]:
    return {path.stem for path in Path(config.data.cache_dir).rglob("*.safetensors")}


def test_what_is_needed_is_exactly_what_filling_stores(prepared: Prepared, tmp_path: Path) -> None:
    held_out = {"validation.data": str(prepared.root / "held out"), "data.caption_dropout": "0.1"}
    config = config_of(prepared, tmp_path, **held_out)
    accelerator = caching_accelerator(config)
    needed = needed_keys(config, accelerator)
    assert stored_keys(config) == set()
    assert fill_cache(config, accelerator) == 5
    assert stored_keys(config) == needed
    # Images and their caption, which is also previewed; the other prompt and the negative one; no caption
    # at all; the image held out, and its caption.
    assert len(needed) == 5 + 1 + 2 + 1 + 2
    assert not (tmp_path / "run").exists()


def test_runs_that_differ_in_precision_share_one_accelerator(prepared: Prepared, tmp_path: Path) -> None:
    accelerator = caching_accelerator(config_of(prepared, tmp_path))
    other = config_of(prepared, tmp_path, **{"train.mixed_precision": "bf16"})
    fill_cache(other, accelerator)
    assert stored_keys(other) == needed_keys(config_of(prepared, tmp_path), accelerator)


def test_what_would_stop_the_run_stops_filling_and_asking(prepared: Prepared, tmp_path: Path) -> None:
    config = config_of(prepared, tmp_path, **{"data.path": str(tmp_path / "nowhere")})
    accelerator = caching_accelerator(config)
    for ask in (fill_cache, needed_keys):
        with pytest.raises(UserError, match="nowhere: no such folder"):
            ask(config, accelerator)
    assert stored_keys(config) == set()
