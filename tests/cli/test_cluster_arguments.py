"""The flags that send a command to a cluster, and how its work is parted; no cluster is started."""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from tiny_run import TinyRun

from diffsynth_lite.cli.cluster import (
    add_ray_arguments,
    add_training_arguments,
    default_gpus,
    folders_of,
    parts_by_cost,
    ray_words,
    require_done,
    without_ray,
)
from diffsynth_lite.cli.main import build_parser, main
from diffsynth_lite.cli.queue import worker_of
from diffsynth_lite.cluster.node import Ended
from diffsynth_lite.config import load_config
from diffsynth_lite.data.records import Part
from diffsynth_lite.errors import RunStoppedError, UserError
from diffsynth_lite.queue.entry import Entry
from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.workspace import Workspace


def parsed(*words: str, parts: bool = True) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_ray_arguments(parser, parts=parts)
    return parser.parse_args(words)


def test_parts_have_all_items_and_the_costliest_begins() -> None:
    costs = {f"{place}.png": float(place) for place in range(200)}
    parts = parts_by_cost(costs, 16)
    assert sum(parts.values()) == sum(costs.values())
    assert list(parts.values()) == sorted(parts.values(), reverse=True)
    for name, cost in parts.items():
        index, count = map(int, name.split("/"))
        assert cost == sum(costs[item] for item in costs if Part(index, count).owns(item))


def test_a_part_without_items_is_no_task() -> None:
    assert sum(parts_by_cost({"a": 0.0, "b": 0.0}, 50).values()) == 0
    assert len(parts_by_cost({"a": 0.0, "b": 0.0}, 50)) == 2


@pytest.mark.parametrize(
    "words",
    [
        ["--ray", "--parts", "3"],
        ["--ray", "auto", "--gpus-per-task=0.5"],
        ["--ray=10.0.0.1:6379", "--ray-resources", '{"A100": 1}', "--parts=3"],
    ],
)
def test_the_words_of_a_part_are_those_of_the_command_without_the_cluster(words: list[str]) -> None:
    command = ["cache", "fill", "--config", "a.yaml", *words, "data.width=64", "--preset", "style"]
    left = without_ray(command)
    assert left == ["cache", "fill", "--config", "a.yaml", "data.width=64", "--preset", "style"]
    assert build_parser().parse_args(left).ray is None


def test_a_setting_is_not_taken_for_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["cache", "fill", "--config", "a.yaml", "--ray", "data.width=64"])
    assert caught.value.code == 2
    assert "data.width=64: is a setting and not an address; write --ray after the settings" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(
            ("--ray-resources", value)
            for value in ("A100", "[1]", '{"A100": 0}', '{"A100": true}', '{"GPU": 1}')
        ),
        *(("--ray", value) for value in ("ray://head:10001", "images")),
        *(("--gpus-per-task", value) for value in ("-1", "1.5", "all", "nan")),
        *(("--parts", value) for value in ("0", "-1", "many")),
    ],
)
def test_what_ray_could_not_be_asked_for_is_refused(flag: str, value: str) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed("--ray", flag, value)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (["train"], "--num-nodes 2"),
        (["train"], "--gpus-per-node 0"),
        (["cache", "fill"], "--parts 3"),
        (["cache", "fill"], '--ray-resources {"A100":1}'),
    ],
)
def test_a_flag_of_the_cluster_without_one_is_refused(
    command: list[str], flag: str, tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    assert main([*command, *tiny_run.arguments, *flag.split()]) == 2
    assert f"{flag.split()[0]}: has no effect without --ray" in caplog.text


def test_without_ray_one_line_names_what_to_install(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for command in ("train", "cache fill"):
        caplog.clear()
        assert main([*command.split(), *tiny_run.arguments, "--ray"]) == 2
        assert "Ray is not installed; install it on all nodes with pip install 'diffsynth_lite[ray]'" in (
            caplog.records[-1].message
        )


@pytest.mark.parametrize(("nodes", "most"), [("0", "1"), ("2", "3"), ("2", "0")])
def test_more_nodes_that_will_do_than_there_are_to_be_are_refused(
    nodes: str, most: str, tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["--ray", "auto", "--num-nodes", nodes, "--min-nodes", most]
    assert main(["train", *tiny_run.arguments, *words]) == 2
    assert f"--num-nodes {nodes}, --min-nodes {most}: " in caplog.text


def test_a_task_has_a_gpu_unless_this_machine_is_all_and_has_none() -> None:
    def ray(**resources: float) -> SimpleNamespace:
        return SimpleNamespace(cluster_resources=lambda: resources)

    assert default_gpus(ray(CPU=8, GPU=4), parsed("--ray", "auto")) == 1
    assert default_gpus(ray(CPU=8), parsed("--ray")) == 0
    with pytest.raises(UserError, match=r"--gpus-per-task: no node has a GPU now; give 1 where"):
        default_gpus(ray(CPU=8), parsed("--ray", "auto"))


def test_runs_of_a_queue_are_given_the_cluster_and_what_a_node_is_to_have() -> None:
    parser = argparse.ArgumentParser()
    add_training_arguments(parser, run=False)
    words = ["--ray", "auto", "--ray-resources", '{"A100": 1}', "--gpus-per-node", "4"]
    assert ray_words(parser.parse_args(words)) == words


def test_wrong_input_is_the_users_and_what_failed_otherwise_is_not() -> None:
    fine = Ended(name="0/3", node="a", exit_code=0, last_line="")
    bad = Ended(name="1/3", node="a", exit_code=2, last_line="3.png: is damaged")
    lost = Ended(name="2/3", node="", exit_code=1, last_line="the node was lost")
    require_done([fine])
    with pytest.raises(UserError, match=r"part 1/3: 3.png: is damaged\n1 of 2 failed"):
        require_done([fine, bad])
    with pytest.raises(RunStoppedError, match="part 2/3: the node was lost"):
        require_done([fine, bad, lost])


def test_nodes_are_to_see_each_file_and_folder_that_settings_name_and_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read = ["model", "expert.gguf", "photos", "photos.csv", "inputs", "masks", "drawings", "held", "a.png"]
    trained = ["before", "copies", "step"]
    for name in (*read, *trained, "cache", "run"):
        Path(name).mkdir()
    Path("mine.yaml").write_text(
        "model: {family: wan, path: model, transformer_file: on/a/hub, transformer_2_file: expert.gguf}\n"
        "lora: {init_from: before}\n"
        "data:\n  cache_dir: cache\n  sealed: s3://bucket/sealed\n  sources:\n"
        "  - {path: photos, metadata: photos.csv, input_dirs: [inputs], mask_dir: masks}\n"
        "  - {dataset: drawings, loss_weight: 2}\n"
        "validation: {data: held, prompts: [a, b], inputs: [a.png, a.png]}\n"
        "output: {dir: run, copy_to: copies}\n"
        "resume: {source: step}\n"
    )
    config = load_config("mine.yaml").config
    assert sorted(folders_of(config)) == sorted(tmp_path / name for name in (*read, *trained))
    filled = folders_of(config, sections=("model", "data", "validation"))
    assert sorted(filled) == sorted(tmp_path / name for name in read)


@pytest.mark.parametrize(
    ("command", "key"),
    [
        ("cache fill", "data.cache_dir"),
        ("cache fill", "data.mask_dir"),
        ("train", "output.dir"),
        ("train", "model.path"),
        ("train", "lora.init_from"),
    ],
)
def test_an_object_store_is_refused_before_a_cluster_is_joined(
    command: str, key: str, tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    words = [*command.split(), *tiny_run.arguments, f"{key}=s3://bucket/mine", "--ray", "auto"]
    assert main(words) == 2
    assert f"{key}: s3://bucket/mine: is in an object store" in caplog.text


@pytest.mark.parametrize("command", ["queue work", "sweep mine.yaml lora.rank=4,8"])
def test_runs_of_a_queue_and_of_a_sweep_are_started_on_the_cluster(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"init": lambda **_: None, "shutdown": lambda: None, "cluster_resources": lambda: {"GPU": 8}}
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(**there))
    given = build_parser().parse_args([*command.split(), "--ray", "auto"])
    queue = Queue(Workspace(tmp_path))
    entry = Entry(config="configs/mine.yaml", folder="runs/mine", num_nodes=2, num_processes=4)
    with worker_of(given, queue) as worker:
        words = worker._command(entry)
    # What the entry asks for is the last word.
    assert words[3:] == [
        *("train", "--config", "configs/mine.yaml", "output.dir=runs/mine"),
        *("--ray", "auto", "--gpus-per-node", "1", "--num-nodes", "2", "--gpus-per-node", "4"),
    ]
    # Devices of this machine do not matter there.
    assert not worker._has_no_room(entry, [entry] * 31)
    assert worker._has_no_room(entry, [entry] * 32)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "holds no image or clip"),
        (("--only", "cat.png"), "--only cat.png: is not an item"),
        (("--part", "0/2"), "--part (0, 2): does not go with --ray"),
        (("--dry-run", "2"), "--dry-run 2: does not go with --ray"),
    ],
)
def test_captions_that_there_cannot_be_are_refused_before_a_cluster_is_joined(
    flags: tuple[str, ...], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if flags:
        Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    words = ["caption", str(tmp_path), "--endpoint", "http://127.0.0.1:1/v1", *flags, "--ray", "auto"]
    assert main(words) == 2
    assert message in caplog.text


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999"])
def test_an_address_at_which_nothing_answers_is_an_error_at_once(
    address: str, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=lambda **_: pytest.fail("Ray waits")))
    assert main(["train", *tiny_run.arguments, "--ray", address]) == 2
    assert f"--ray {address}: " in caplog.text
    assert "give the address of a running cluster, as ray start printed it" in caplog.text
