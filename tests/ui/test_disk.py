"""The screen of the disk: what runs, caches and models take, and what of it may be deleted, and when."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from processes import wait_for
from screens import INLINE, Screen, Started

from diffsynth_lite.queue.entry import Entry
from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.ui.home import disk, models
from diffsynth_lite.ui.jobs import Jobs
from diffsynth_lite.ui.tries.studio import device_holders

CONFIG = (
    "model: {{family: qwen_image, path: {}}}\ndata: {{path: d, cache_dir: {}}}\noutput: {{dir: runs/x}}\n"
)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with four models and a data set, all of one commit, as copies have."""
    cache = tmp_path / "hub"
    for name, files in {
        "models--me--carded": {
            "README.md": "---\nlicense: other\nlicense_name: <b>mine\n---\n",
            "w": "x" * 100,
        },
        "models--Qwen--Qwen-Image": {"w": "x" * 2000},
        "models--me--part": {"README.md": "---\n[\n---\n"},
        "models--me--modular": {"modular_model_index.json": '{"vae": ["me/part"]}'},
        "datasets--me--cats": {"w": "x"},
    }.items():
        snapshot = cache / name / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True)
        (cache / name / "refs").mkdir()
        (cache / name / "refs" / "main").write_text("a" * 40)
        (cache / name / "blobs").mkdir()
        for file, content in files.items():
            (cache / name / "blobs" / file).write_text(content)
            (snapshot / file).symlink_to(f"../../blobs/{file}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache


def config(screen: Screen, name: str, model: str = "nowhere", cache: str = "cache") -> Path:
    file = screen.workspace.configs_folder / f"{name}.yaml"
    file.write_text(CONFIG.format(model, cache))
    return file


def page(screen: Screen) -> str:
    """The page once all is counted."""
    wait_for(lambda: "Counting" not in screen.get("/disk").text)
    return str(screen.get("/disk").text)


def delete(screen: Screen, model: str) -> dict[str, Any]:
    given: dict[str, Any] = screen.post("/disk/delete", {"model": model}).json()
    return given


def test_models_are_listed_with_size_licence_and_the_configs_that_use_them(screen: Screen, hub: Path) -> None:
    own = screen.workspace.path / "models" / "own"
    own.mkdir(parents=True)
    (own / "w").write_text("x" * 50)
    inside = hub / "models--me--carded" / "snapshots" / ("a" * 40)
    for name, model in (("one", "Qwen/Qwen-Image"), ("two", "models/own"), ("three", str(inside))):
        config(screen, name, model)
    config(screen, "four", "me/modular")
    config(screen, "odd", "~nobody-at-all/model")
    loaded = disk.readable(screen.workspace)[0]
    found = {each.name: each for each in models.models(loaded, screen.workspace.path)}
    assert {name: (list(each.configs), each.licence) for name, each in found.items()} == {
        "Qwen/Qwen-Image": (["one"], "Apache-2.0"),
        "me/carded": (["three"], "<b>mine"),
        "me/part": (["four"], ""),
        "me/modular": (["four"], ""),
        str(own): (["two"], ""),
    }
    assert (found["Qwen/Qwen-Image"].num_bytes, found[str(own)].num_bytes) == (2000, 50)
    text = page(screen)
    assert text.count("Licence unknown") == 3
    assert "&lt;b&gt;mine. Used by" in text
    assert 'aria-label="Delete me/part now"' in text
    assert f'aria-label="Delete {own}' not in text
    assert not INLINE.search(text)


def test_a_cache_of_models_that_cannot_be_read_says_so_and_the_rest_is_counted(
    screen: Screen, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> None:
        raise PermissionError(13, "Permission denied", "/hub/of/root")

    monkeypatch.setattr("huggingface_hub.scan_cache_dir", refuse)
    config(screen, "mine")
    text = page(screen)
    assert "/hub/of/root: Permission denied" in text
    assert "Used by <a" in text
    assert delete(screen, "Qwen/Qwen-Image") == {"error": "/hub/of/root: Permission denied"}


def test_a_model_is_deleted_from_the_hubs_cache_only(
    screen: Screen, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as busy:
        busy.setattr(Jobs, "holders", lambda jobs: ["captions of mug"])
        assert "captions of mug: may use it" in delete(screen, "Qwen/Qwen-Image")["error"]
    own = screen.workspace.path / "own"
    own.mkdir()
    config(screen, "one", str(own))
    assert "are free" in delete(screen, "Qwen/Qwen-Image")["message"]
    left = {"models--me--carded", "models--me--part", "models--me--modular", "datasets--me--cats"}
    assert {path.name for path in hub.iterdir()} == left
    for name in ("Qwen/Qwen-Image", "../x", str(own), "me/cats"):
        assert "is not in the hub's cache" in delete(screen, name)["error"]
    assert {path.name for path in hub.iterdir()} == left
    assert own.is_dir()


def waits(screen: Screen) -> None:
    config(screen, "mine", "me/modular")
    Queue(screen.workspace).add([Entry(config="configs/mine.yaml", folder="runs/mine")])


def trains(screen: Screen) -> None:
    run = screen.workspace.runs_folder / "mine"
    run.mkdir()
    (run / "resolved.yaml").write_text(CONFIG.format("me/modular", "cache"))
    (run / ".lock").write_text(f"{Process.current().as_text()}\n")
    (run / "status.json").write_text('{"state": "running", "step": 4, "found_at": {}}')


@pytest.mark.parametrize("use", [waits, trains])
def test_a_model_that_a_run_uses_is_not_deleted(
    screen: Screen, hub: Path, use: Callable[[Screen], None]
) -> None:
    use(screen)
    for name in ("me/modular", "me/part"):
        assert "mine trains on it, or waits to" in delete(screen, name)["error"]
    assert "message" in delete(screen, "me/carded")
    if use is trains:
        (screen.workspace.runs_folder / "mine" / "resolved.yaml").unlink()
        assert "resolved.yaml" in delete(screen, "me/modular")["error"]
    assert (hub / "models--me--modular").is_dir()


def test_only_run_folders_that_have_changed_are_walked_again(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        folder = screen.workspace.runs_folder / name / "checkpoints"
        folder.mkdir(parents=True)
        (folder / "w").write_text("x" * 463)
        (folder.parent / "status.json").write_text('{"state": "finished", "found_at": {}}')
    walked = list[str]()

    def count(path: Path) -> int:
        walked.append(path.name)
        return models.bytes_in(path)

    monkeypatch.setattr(disk, "bytes_in", count)
    wait_for(lambda: "0 steps, 500 bytes" in screen.get("/").text)
    assert "Disk: 1000 bytes" in screen.get("/").text
    (screen.workspace.runs_folder / "a" / "checkpoints" / "more").write_text("x" * 1000)
    screen.client.app._app.state.disk.runs.forget()  # type: ignore[attr-defined]
    wait_for(lambda: "0 steps, 1.5 KiB" in screen.get("/").text)
    assert sorted(walked) == ["a", "a", "b"]


def test_a_count_that_meets_damaged_settings_leaves_the_last_one_and_is_tried_again(screen: Screen) -> None:
    runs = disk.DiskUse(screen.workspace).runs
    wait_for(lambda: runs.latest() == {} and not runs._is_counting)
    screen.workspace.settings_file.write_text("{")
    runs.forget()
    runs.latest()
    wait_for(lambda: not runs._is_counting)
    assert runs._due_at > 0
    screen.workspace.settings_file.unlink()
    assert runs.latest() == {}


def test_a_cache_is_pruned_for_all_configs_after_a_look(screen: Screen, hub: Path, started: Started) -> None:
    for name in ("one", "two"):
        config(screen, name)
    config(screen, "three", cache="other")
    (screen.workspace.path / "cache").mkdir()
    (screen.workspace.path / "cache" / "entry").write_text("x" * 300)
    folder = screen.workspace.path / "cache"
    assert f'aria-label="What can be freed of {folder}"' in page(screen)
    assert "300 bytes" in page(screen)
    given = {"cache": str(folder)}
    look = ["cache", "prune", "--config", "configs/one.yaml", "--config", "configs/two.yaml"]

    def prune(do: str) -> str:
        return str(screen.post("/disk/prune", given | {"do": do}).json().get("error", ""))

    assert "not as it was shown; look again" in prune("delete")
    assert prune("look") == ""
    assert started.words == [[*look, "--dry-run"]]
    assert "Looking." in page(screen)
    assert prune("look").endswith("--dry-run runs; wait until it has ended")
    assert device_holders(screen.workspace) == []
    started.end("Would delete 3 files, 1.0 KiB")
    assert "Would delete 3 files, 1.0 KiB" in page(screen)
    assert f'aria-label="Delete it from {folder} now"' in page(screen)
    trains(screen)
    assert prune("delete").startswith("mine runs, and may need what would be deleted")
    (screen.workspace.runs_folder / "mine" / "status.json").unlink()
    bad = screen.workspace.configs_folder / "bad.yaml"
    bad.write_text("model: 3\n")
    for do in ("look", "delete"):
        assert "What that config needs is not known" in prune(do)
    bad.unlink()
    assert prune("delete") == ""
    assert started.words[1:] == [[*look, "--yes"]]
    assert device_holders(screen.workspace) == ["pruning of cache"]  # no run starts meanwhile
    assert "may use it" in delete(screen, "me/carded")["error"]
    started.end("Deleted 3 files, 1.0 KiB")
    assert "Deleted 3 files, 1.0 KiB" in page(screen)
    assert "Delete it" not in page(screen)
    assert prune("look") == ""
    started.end("Would delete 3 files, 1.0 KiB")
    os.utime(config(screen, "one"), (0, 0))
    assert "not as it was shown; look again" in prune("delete")
    assert "look again" in screen.post("/disk/prune", {"cache": "../x"}).json()["error"]
