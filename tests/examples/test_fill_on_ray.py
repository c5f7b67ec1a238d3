"""What is ours of the example for Ray: its arguments, and the command that each task runs."""

import sys
from pathlib import Path

import pytest
from fill_on_ray import Ended, PartStopped, build_parser, commands, run_part

from diffsynth_lite.cli.main import build_parser as build_command_parser


def test_each_part_has_a_command_that_fills_it(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    parsed = build_parser().parse_args(["--config", str(config), "--parts", "3", "data.width=64"])
    found = dict(commands(parsed))
    assert list(found) == ["0/3", "1/3", "2/3"]
    python, module, name, *arguments = found["2/3"]
    assert (python, module, name) == (sys.executable, "-m", "diffsynth_lite.cli.main")
    understood = build_command_parser().parse_args(arguments)
    assert understood.part == (2, 3)
    assert understood.configs == [str(config)]
    assert understood.overrides == ["data.width=64"]


@pytest.mark.parametrize("parts", ["0", "-1", "many"])
def test_a_number_of_parts_that_there_cannot_be_is_refused(parts: str) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(["--config", "a.yaml", "--parts", parts])
    assert caught.value.code == 2


def test_a_part_that_is_wrong_is_reported_and_one_that_stopped_may_be_tried_again(tmp_path: Path) -> None:
    def python(code: str) -> list[str]:
        return [sys.executable, "-c", f"import os, sys; print('no image', file=sys.stderr); {code}"]

    assert run_part("0/2", python("sys.exit(2)"), str(tmp_path)) == Ended("0/2", 2, "no image")
    assert run_part("0/2", python("pass"), str(tmp_path)).code == 0
    with pytest.raises(PartStopped, match="exit code -9: no image"):
        run_part("1/2", python("sys.stderr.flush(); os.kill(os.getpid(), 9)"), str(tmp_path))
