"""Files that others may have written are data: pickles and modules planted in their place never run."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from audit_watch import AuditWatch, watched_pickles
from poison import poisons
from test_bad_input import copied_model
from tiny_run import TinyRun

from diffsynth_lite.errors import CheckpointError
from diffsynth_lite.training.checkpoint.manifest import ListedFile, Manifest, read_checkpoint


@pytest.fixture(scope="module")
def watch() -> AuditWatch:
    return watched_pickles()


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "planted-code-ran"


@pytest.fixture
def poison(marker: Path) -> bytes:
    return poisons(marker)["pickle"]


def test_the_poison_works_and_is_seen(poison: bytes, marker: Path, watch: AuditWatch) -> None:
    with watch.on() as names:
        pickle.loads(poison)
    assert marker.is_dir()
    assert names == [("posix", "mkdir")]


def test_what_workers_send_is_all_that_is_unpickled_with_workers(
    tiny_run: TinyRun, watch: AuditWatch
) -> None:
    with watch.on() as names:
        assert tiny_run.train("train.steps=1", "data.num_workers=1") == 0
    assert ("diffsynth_lite.data.batches", "Batch") in names
    kinds = ("diffsynth_lite.data.", "multiprocessing.", "torch.")
    assert [name for name in names if not f"{name[0]}.".startswith(kinds)] == []


def test_a_resume_unpickles_nothing_and_sets_pickles_in_checkpoint_cache_and_lora_aside(
    tiny_run: TinyRun, poison: bytes, marker: Path, watch: AuditWatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert tiny_run.train("train.steps=2") == 0
    with watch.on() as names:
        assert tiny_run.train("train.steps=4", "data.num_workers=0") == 0
    assert names == []  # of a resume
    newest = tiny_run.folder / "checkpoints" / "step-00000004"
    places = (newest, tiny_run.folder / "lora", tiny_run.root / "cache")
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert len(files) > 12
    for path in files:
        path.write_bytes(poison)
    with watch.on() as names:
        assert tiny_run.train("train.steps=5") == 0
    assert (names, marker.exists()) == ([], False)
    assert "looking for an earlier checkpoint" in caplog.text
    assert poison not in {path.read_bytes() for path in (tiny_run.folder / "lora").glob("*.safetensors")}
    # Under all names of a run folder they end it.
    for path in filter(Path.is_file, list(tiny_run.folder.rglob("*"))):
        path.write_bytes(poison)
    with watch.on() as names:
        assert tiny_run.train("train.steps=6") == 2
    assert (names, marker.exists()) == ([], False)


def test_pickles_under_a_manifest_that_lists_them_are_refused(
    tiny_run: TinyRun, poison: bytes, marker: Path, watch: AuditWatch
) -> None:
    assert tiny_run.train("train.steps=1") == 0
    folder = tiny_run.folder / "checkpoints" / "step-00000001"
    names = sorted(path.name for path in folder.iterdir() if path.suffix)
    assert len(names) == 6
    contents = {name: (folder / name).read_bytes() for name in names}
    for name in names:
        for other, content in contents.items():
            (folder / other).write_bytes(poison if other == name else content)
        listed = {other: ListedFile.of((folder / other).read_bytes()) for other in names}
        (folder / "COMPLETE").write_bytes(Manifest(step=1, files=listed).encode())
        with watch.on() as unpickled, pytest.raises(CheckpointError, match=name):
            read_checkpoint(folder).tensors(name.removesuffix(".safetensors"))
        assert (unpickled, marker.exists()) == ([], False)


def plant_module(model: Path, marker: Path, poison: bytes) -> None:
    """Pickles and modules next to the files of a pipeline, which its settings name where they can."""
    for component, name in {
        "transformer": "diffusion_pytorch_model.bin",
        "vae": "diffusion_pytorch_model.bin",
        "text_encoder": "pytorch_model.bin",
        "tokenizer": "tokenizer.pkl",
    }.items():
        (model / component / name).write_bytes(poison)
        (model / component / "planted.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nclass P: ...\n")
    for component in ("transformer", "vae", "text_encoder"):
        change_json(model / component / "config.json", auto_map={"AutoModel": "planted.P"})
    (model / "pipeline.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_pickles_and_modules_next_to_the_weights_are_ignored(
    tiny_run: TinyRun, poison: bytes, marker: Path, watch: AuditWatch
) -> None:
    plant_module(copied_model(tiny_run), marker, poison)
    with watch.on() as names:
        assert tiny_run.train("train.steps=1", "validation.prompts=[a red circle]") == 0
    assert (names, marker.exists()) == ([], False)


def tokenizer_with_code(model: Path, _poison: bytes) -> None:
    settings = model / "tokenizer" / "tokenizer_config.json"
    change_json(settings, tokenizer_class="P", auto_map={"AutoTokenizer": ["planted.P", None]})


def no_safetensors(model: Path, poison: bytes) -> None:
    for path in model.rglob("*.safetensors"):
        path.rename(path.with_suffix(".bin")).write_bytes(poison)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (no_safetensors, "holds no safetensors weights"),
        (
            lambda model, poison: [path.write_bytes(poison) for path in model.rglob("*.safetensors")],
            "cannot be read",
        ),
        (lambda model, poison: (model / "model_index.json").write_bytes(poison), "cannot be read"),
        (tokenizer_with_code, "contains custom code"),
        (
            lambda model, _: change_json(model / "model_index.json", _class_name=["planted", "P"]),
            "names no pipeline class",
        ),
    ],
)
def test_a_model_that_needs_code_or_pickles_is_refused(
    tiny_run: TinyRun,
    poison: bytes,
    marker: Path,
    watch: AuditWatch,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path, bytes], object],
    message: str,
) -> None:
    model = copied_model(tiny_run)
    plant_module(model, marker, poison)
    spoil(model, poison)
    with watch.on() as names:
        assert tiny_run.train("train.steps=1") == 2
    assert message in caplog.text
    assert (names, marker.exists()) == ([], False)


def test_a_pickle_in_place_of_an_image_is_a_bad_item(
    tiny_run: TinyRun, poison: bytes, marker: Path, watch: AuditWatch, caplog: pytest.LogCaptureFixture
) -> None:
    for path in (tiny_run.root / "data").glob("2.*"):
        path.write_bytes(poison)
    with watch.on() as names:
        assert tiny_run.train("train.steps=1") == 2
    assert "2.png" in caplog.text
    assert (names, marker.exists()) == ([], False)


@pytest.mark.parametrize("name", ["pytorch_lora_weights.safetensors", "pytorch_lora_weights.bin", "lora.pt"])
def test_a_pickle_in_place_of_a_lora_to_start_from_is_refused(
    tiny_run: TinyRun, marker: Path, watch: AuditWatch, name: str
) -> None:
    folder = tiny_run.root / "theirs"
    folder.mkdir()
    for content in poisons(marker).values():
        (folder / name).write_bytes(content)
        with watch.on() as names:
            for place in (folder, folder / name):
                assert tiny_run.train("train.steps=1", f"lora.init_from={place}") == 2
        assert (names, marker.exists()) == ([], False)
