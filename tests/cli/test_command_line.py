"""The flags: which there are, what wins, and what is refused."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from diffsynth_lite.cli import arguments as worded
from diffsynth_lite.cli import sample, train
from diffsynth_lite.cli.main import main
from diffsynth_lite.cluster.node import COMMAND_VARIABLE
from diffsynth_lite.errors import RunInterrupted, RunStoppedError, UserError, exit_code


def test_the_flags_are_these_and_no_others() -> None:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    assert {option for action in parser._actions for option in action.option_strings} == {
        *("-h", "--help", "--config", "--preset", "--resume"),
        *("--use_gradient_checkpointing", "--no-use_gradient_checkpointing"),
        *("--use_gradient_checkpointing_offload", "--no-use_gradient_checkpointing_offload"),
        *("--ray", "--ray-resources", "--num-nodes", "--min-nodes", "--gpus-per-node", "--max-failures"),
    }


@pytest.mark.parametrize("entry", [train.main, lambda words: main(["train", *words])])
def test_overrides_and_flags_come_in_any_order(
    entry: Callable[[list[str]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[argparse.Namespace] = []
    monkeypatch.setattr(train, "_train", lambda parsed, _: given.append(parsed))
    words = ["--config", "a.yaml", "train.steps=5", "--use_gradient_checkpointing_offload", "lora.rank=4"]
    assert entry(words) == 0
    [parsed] = given
    assert parsed.overrides == ["train.steps=5", "lora.rank=4"]
    flag = "train.use_gradient_checkpointing_offload=True"
    assert train.settings_of(parsed) == ["train.steps=5", "lora.rank=4", flag]
    assert parsed.words == ["train", *words]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["sample", "--lora", "one", "--preset", "style"], "--preset style: lies on top of a --config; "),
        (["plan", "--config", "sdxl_lora.yaml", "--preset", "motion"], "--preset motion: is for cogvideox, "),
        (["doctor", "--preset", "x", "--config", "sdxl_lora.yaml"], "--preset x: There are few_pictures, "),
        (
            ["cache", "fill", "--config", "sdxl_lora.yaml", "--preset", "x"],
            "--preset x: There are few_pictures, ",
        ),
    ],
)
def test_commands_refuse_presets_that_do_not_fit(
    arguments: list[str], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(arguments) == 2
    assert caplog.messages[-1].startswith(reason)


def test_each_way_to_end_has_its_exit_code() -> None:
    assert exit_code(UserError("")) == 2
    assert exit_code(RunStoppedError("")) == 3
    assert exit_code(RunInterrupted("")) == 75
    assert exit_code(ValueError("")) == 1


def test_torchs_agent_gets_the_reason_for_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert train.main(["--config", "nowhere.yaml"]) == 2
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    assert "nowhere.yaml" in str(ChildFailedError("train.py", {0: failure}))


@pytest.mark.parametrize(
    ("module", "name", "command", "code", "message"),
    [
        (train, "_train", "train --config a.yaml", 75, "stopped by SIGINT; the same command continues"),
        (sample, "_request", "sample --config a.yaml --prompt b", 130, "stopped by Ctrl+C"),
        (
            *(sample, "_make_items", "sample --config a.yaml --from-captions b --out c", 75),
            "stopped; items that are there are whole, and the same command goes on",
        ),
    ],
)
def test_ctrl_c_ends_a_command_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: ModuleType,
    name: str,
    command: str,
    code: int,
    message: str,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, name, interrupted)
    assert main(command.split()) == code
    assert caplog.messages == [message]


AGENT = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1"}


@pytest.mark.parametrize(
    ("installed", "on_path", "environment", "launcher", "expected"),
    [
        (True, True, {}, [], "diffsynth-lite train --config 'my run.yaml'"),
        (True, False, {}, [], "{bin}/diffsynth-lite train --config 'my run.yaml'"),
        (False, True, {}, [], "python3 -m diffsynth_lite.cli.main train --config 'my run.yaml'"),
        (False, False, {}, [], "{bin}/python3 -m diffsynth_lite.cli.main train --config 'my run.yaml'"),
        # accelerate launch with one process
        (True, True, AGENT | {"WORLD_SIZE": "1"}, ["x"], "diffsynth-lite train --config 'my run.yaml'"),
        (True, True, AGENT, ["{bin}/python3", "{bin}/torchrun", "a.py", "a b"], "torchrun a.py 'a b'"),
        (True, False, AGENT, ["{bin}/python3", "-m", "torch"], "{bin}/python3 -m torch"),
        (True, True, AGENT, [], None),
        (True, True, {"PMI_RANK": "0", "PMI_SIZE": "2"}, ["mpirun"], None),
        (True, True, {"RANK": "0", "WORLD_SIZE": "2", COMMAND_VARIABLE: "train --ray"}, [], "train --ray"),
    ],
)  # fmt: skip
def test_the_same_command_is_as_it_can_be_typed_here(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    installed: bool,
    on_path: bool,
    environment: dict[str, str],
    launcher: list[str],
    expected: str | None,
) -> None:
    for name in ("python3", "torchrun", *(["diffsynth-lite"] if installed else [])):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    monkeypatch.setenv("PATH", str(tmp_path) if on_path else "/nowhere")
    parent = [word.replace("{bin}", str(tmp_path)) for word in launcher]
    monkeypatch.setattr(worded, "parent_command", lambda: parent)
    monkeypatch.chdir(tmp_path.parent)
    words = ("train", "--config", "my run.yaml", "--resume", "none", "--resume=none")
    several = "torchrun --standalone --nproc_per_node 2 -m diffsynth_lite.cli.train --config 'my run.yaml'"
    assert worded.train_command(words[1:3], num_processes=2) == several
    wanted = expected and expected.replace("{bin}", tmp_path.name)
    assert worded.same_command(environment, words) == wanted
