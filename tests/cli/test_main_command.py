"""The console script: its commands, and its errors about wrong words on the command line."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from PIL import Image

from diffsynth_lite import __version__
from diffsynth_lite.cli import sample
from diffsynth_lite.cli.main import main
from diffsynth_lite.doctor import machine

_CACHE = "diffsynth-lite cache"
_PART = f"{_CACHE} fill: error: argument --part"
_GIB, _NO_SIZES = "diffsynth-lite plan: error: argument --device-gib", ("0", "-1", "nan", "inf", "much")
_COMMANDS = (
    *("init", "caption", "prepare", "doctor", "plan", "cache", "cache prune", "train", "report", "sample"),
    *("choose", "convert", "publish", "queue", "queue add", "queue move", "ui", "env"),
)
_EACH_HELP = """
import sys
sys.modules["torch"] = None  # an import of it is an error
from diffsynth_lite.cli import continuation, main
for line in sys.argv[2:]:
    try:
        main.main([*line.split(), "--help"])
    except SystemExit as exit:
        print("code", exit.code)
family, config = ["--family", "qwen_imag"], ["--config", "quickstart.yaml", "model.family=qwen_imag"]
for words in (["init", *family], ["caption", "--model", "a/b", *family]):
    print("refused", main.main([*words, sys.argv[1]]))
for command in ("doctor", "train"):
    print("refused", main.main([command, *config]))
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "diffsynth-lite: error: the following arguments are required: COMMAND"),
        ("reprot runs", "diffsynth-lite: error: reprot: is not a command; did you mean 'report'?"),
        (
            "sample --promt x",
            "diffsynth-lite sample: error: unrecognized arguments: --promt; did you mean --prompt?",
        ),
        (
            "doctor --config a --sheets=3",
            "diffsynth-lite doctor: error: unrecognized arguments: --sheets=3; did you mean --sheet?",
        ),
        (
            "doctor --config a --network_dim 8",
            "diffsynth-lite doctor: error: unrecognized arguments: --network_dim; settings are written "
            "without dashes: lora.rank=...",
        ),
        (
            "convert a b --to kohya --ranks 8",
            "diffsynth-lite convert: error: unrecognized arguments: --ranks 8; did",
        ),
        ("doctor --config a --pag x", "diffsynth-lite doctor: error: unrecognized arguments: --pag"),
        ("report a --serve train.steps=3", "diffsynth-lite report: error: unrecognized arguments: train.s"),
        ("convert a b --to kohya lora.rank=4", "diffsynth-lite convert: error: unrecognized arguments: lora"),
        ("convert a b --to kohya --alpha 0", "diffsynth-lite convert: error: argument --alpha: "),
        ("convert a b --to kohya --alpha x", "diffsynth-lite convert: error: argument --alpha: "),
        ("publish runs/a --to a/b --qq", "diffsynth-lite publish: error: unrecognized arguments: --qq;"),
        ("publish runs/a --to a/b x=1", "diffsynth-lite publish: error: unrecognized arguments: x=1;"),
        ("cache --config a --verify", f"{_CACHE}: error: --config: the task comes first: `{_CACHE} fill`"),
        ("cache --prune --config a", f"{_CACHE}: error: --prune: the task comes first: `{_CACHE} fill`"),
        ("cache fill --config a --yes", f"{_CACHE} fill: error: unrecognized arguments: --yes;"),
        (
            "cache prune --config a --yse",
            f"{_CACHE} prune: error: unrecognized arguments: --yse; did you mean --yes?",
        ),
        ("cache verify --config a --part 0/2", f"{_CACHE} verify: error: unrecognized arguments: --part"),
        ("cache prune --config a --part 0/2", f"{_CACHE} prune: error: unrecognized arguments: --part"),
        ("cache fill --config a --part 3/3", f"{_PART}: 3/3: parts are 0/3 to 2/3"),
        ("cache fill --config a --part 0/0", f"{_PART}: 0/0: parts are 0/64 to 63/64"),
        ("cache fill --config a --part 1", f"{_PART}: 1: parts are 0/64 to 63/64"),
        ("cache fill --config a --part 1/2/3", f"{_PART}: 1/2/3: parts are 0/64 to 63/64"),
        ("cache fill --config a --part a/3", f"{_PART}: a/3: parts are 0/3 to 2/3"),
        *((f"plan --config a --device-gib={gib}", f"{_GIB}: {gib}: a number above 0") for gib in _NO_SIZES),
        ("sample --size 64", "diffsynth-lite sample: error: argument --size: 64: width and height"),
    ],
)
def test_wrong_words_are_answered_in_one_line(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith(message)
    assert shown.endswith("--help")


@pytest.mark.parametrize(("given", "scales"), [("-1,0,1", [-1, 0, 1]), ("-.5", [-0.5])])
def test_a_list_of_scales_may_begin_with_a_negative_one(
    given: str, scales: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "run", lambda parsed: found.append(parsed.scale))
    found: list[list[float]] = []
    for words in (["--scale", given], [f"--scale={given}"]):
        assert main(["sample", *words, "--prompt", "x"]) == 0
    assert found == [scales, scales]


@pytest.mark.parametrize("command", _COMMANDS)
def test_each_command_shows_an_example_of_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"Example: diffsynth-lite {command} ")


@pytest.mark.parametrize("as_json", [True, False])
def test_the_environment_is_printed_without_its_secrets(
    as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("UNRELATED", "2")
    monkeypatch.setattr(machine, "_OPTIONAL", ("no_such_package", "rich"))
    assert main(["env", *["--json"] * as_json]) == 0
    shown = capsys.readouterr().out
    facts = json.loads(shown) if as_json else dict(line.split(": ", 1) for line in shown.splitlines())
    assert facts["diffsynth_lite"] == __version__
    assert f"diffusers {version('diffusers')}" in facts["packages"]
    assert facts["optional packages"] == f"rich {version('rich')}"
    assert (facts["HF_TOKEN"], facts["CUDA_VISIBLE_DEVICES"]) == ("REDACTED", "1")
    assert "UNRELATED" not in facts
    assert "aaaa" not in shown


def test_help_and_a_wrong_family_are_answered_without_torch(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    lines = ("", *_COMMANDS)
    program = [sys.executable, "-c", _EACH_HELP, str(tmp_path), *lines]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    printed = done.stdout.splitlines()
    assert (printed.count("code 0"), printed.count("refused 2")) == (len(lines), 4)
    assert done.stderr.count("unknown family 'qwen_imag'; did you mean 'qwen_image'?") == 4
