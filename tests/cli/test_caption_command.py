"""``diffsynth-lite caption``: its flags, what it prints, and how it is stopped, with a tiny Qwen3-VL."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from chat_server import chat, reply, running
from colour_captioner import captions_in, status_of
from processes import Program, wait_for
from tiny_run import TinyRun, tiny_image

from diffsynth_lite.captioning import endpoint as endpoint_module
from diffsynth_lite.captioning.report import CaptionReport
from diffsynth_lite.cli import caption
from diffsynth_lite.cli.arguments import command
from diffsynth_lite.cli.main import main
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.testing.captioners import save_tiny_qwen3_vl

NUM_IMAGES = 4
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it is an error
from diffsynth_lite.cli.main import main
"""
SCRIPT = Path(caption.__file__).with_name("main.py")


@pytest.fixture(scope="session")
def tiny_captioner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3_vl(tmp_path_factory.mktemp("captioner"))


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = Path("my images")
    folder.mkdir()
    for number in range(NUM_IMAGES):
        tiny_image(90, 60 + 8 * number, 40 * number + 10).save(folder / f"{number}.png")
    return folder


def test_it_writes_captions_and_names_the_page_and_what_comes_next(
    images: Path,
    tiny_captioner: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (images / "3.png").write_bytes(b"damaged")
    words = ["--model", str(tiny_captioner), "--trigger", "ohwx", "--length", "short"]
    arguments = ["caption", str(images), *words]
    assert main(arguments) == 2
    assert caplog.messages[-1].startswith("1 item is without a caption; the same command asks again")
    found = captions_in(images)
    assert found.keys() == {"0.txt", "1.txt", "2.txt"}
    assert all(text.startswith("ohwx, ") for text in found.values())
    printed = capsys.readouterr().out
    assert "> 3.png: not a PNG, JPEG" in printed
    assert "\n3 written, 0 kept, 1 failed, " in printed
    assert f"Page with all captions: {images}/.captions/captions.html\n" in printed
    assert printed.endswith(f"Next: {command('init', str(images))}\n")
    status = status_of(images)
    assert (status.state, status.arguments) == ("finished", tuple(arguments[1:]))
    assert main([*arguments, "--json", "--replace", "model"]) == 2
    result = json.loads(capsys.readouterr().out)
    assert {f"{Path(name).stem}.txt": f"{text}\n" for name, text in result["written"].items()} == found
    assert (result["kept"], result["failed"].keys(), result["preview"]) == (0, {"3.png"}, {})
    assert result["items_per_minute"] > 0


def test_what_cannot_be_read_is_named_before_anything_is_loaded(
    images: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in images.iterdir():
        file.rename(file.with_suffix(".heic"))
    assert main(["caption", str(images), "--model", "m"]) == 2
    assert "skipped files: 4 heic; save heic as png or jpg" in caplog.messages[-2]
    assert caplog.messages[-1].endswith("holds no image or clip")


def test_a_dry_run_prints_captions_and_writes_none(
    images: Path, tiny_captioner: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["caption", str(images), "--model", str(tiny_captioner), "--dry-run", "2"]) == 0
    printed = capsys.readouterr().out
    status = status_of(images)
    assert list(status.preview) == ["0.png", "3.png"]
    assert printed.startswith("".join(f"{name}:\n  {text}\n" for name, text in status.preview.items()))
    assert "2 shown and not written, 0 kept" in printed
    assert "Next:" not in printed
    assert captions_in(images) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--model, --endpoint: name a model, such as --model Qwen/Qwen3-VL-4B-Instruct, or a server"),
        ("--model m --key-variable K", "--key-variable K: is for a server: give --endpoint, or "),
        ("--endpoint http://h/v1 --quantize int8", "--quantize int8: is for a model that is loaded"),
        ("--endpoint http://h/v1 --key-variable NO_KEY", "--key-variable NO_KEY: this environment"),
        ("--endpoint h:1234", "--endpoint h:1234: must be http:// or https://"),
        ("--model m --goal edit", "--goal edit: name the folder of the images before the edit, "),
        ("--model m --goal style --inputs x", "--goal style: is not for edits; leave it or "),
        ("--model m --inputs x --format tags", "--format tags: what changes in an edit is written as prose"),
        ("--model m --inputs nowhere", "nowhere: no such folder"),
        ("--model m --inputs itself", "--inputs itself: is the folder itself; name that of the images bef"),
        ("--model m --instruction none.txt", "--instruction none.txt: cannot be read: No such file"),
        ("--model m --instruction mine.txt", "--instruction mine.txt: {word} is not known"),
        (
            "--model m --instruction goal.txt --language French",
            "--language French: is part of what --instruction replaces: leave it out, or ",
        ),
        ("--model ./nothing --instruction goal.txt --goal style", "there is no folder ./nothing"),
        ("--model m --trigger ohwx\udcff", r"'ohwx\udcff': is not UTF-8 text"),
        ("--model m --trigger=", "--trigger: is empty; leave it out"),
        ("--model m --keep opening", "--keep opening: is not a rule of cleaning; did you mean 'op"),
        ("--model m --only 5.png", "--only 5.png: is not an item of my images; did you mean "),
        ("--model m --family sdlx", "sdlx"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line_before_anything_is_loaded(
    images: Path, arguments: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    Path("itself").symlink_to(images, target_is_directory=True)
    Path("mine.txt").write_text("Describe {word}.")
    Path("goal.txt").write_text("Describe it for {goal}.")
    assert main(["caption", str(images), *arguments.split()]) == 2
    assert message in caplog.messages[-1]
    assert not (images / ".captions").exists()


def test_the_text_encoder_of_a_config_limits_captions(
    images: Path,
    tiny_captioner: Path,
    tiny_run: TinyRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--model", str(tiny_captioner), "--config", str(tiny_run.config), "--keep", "repetition"]
    arguments = ["caption", str(images), *words]
    assert main(arguments) == 0
    assert capsys.readouterr().out.endswith(f"Next: {command('doctor', '--config', str(tiny_run.config))}\n")
    whole = captions_in(images)
    monkeypatch.setattr(QwenImage, "max_prompt_tokens", 20)
    assert main([*arguments, "--replace", "model", "--json"]) == 0
    cut, kept = json.loads(capsys.readouterr().out)["cut"], captions_in(images)
    assert len(cut) == NUM_IMAGES
    assert {f"{kept[f'{name[0]}.txt'].strip()} {rest}\n" for name, rest in cut.items()} == set(whole.values())


def test_a_server_writes_captions_without_torch(images: Path) -> None:
    words = ["caption", str(images), "--model", "served", "--key-variable", "MY_KEY", "--endpoint"]
    program = f"{WITHOUT_TORCH}print(main(['caption', 'my image', '--model', 'm']))\nsys.exit(main())"
    variables = {**os.environ, "MY_KEY": "my secret"}
    with running() as server:
        server.always = reply(chat("Here is a caption: A shape."))
        words.append(server.endpoint)
        done = subprocess.run(
            [sys.executable, "-c", program, *words, "--json"], capture_output=True, text=True, env=variables
        )
    assert (done.returncode, "not this machine" in done.stderr) == (0, False), done.stderr
    assert set(captions_in(images).values()) == {"A shape.\n"}
    assert "my image: no such folder; did you mean 'my images'?" in done.stderr
    code, _, result = done.stdout.partition("\n")
    assert code == "2"
    assert json.loads(result)["model"].startswith("served at 127.0.0.1:")
    sent = {(one.body["model"], one.headers["Authorization"]) for one in server.received}
    assert sent == {("served", "Bearer my secret")}
    status = status_of(images)
    assert status.arguments == tuple(words[1:])
    assert not any("my secret" in path.read_text() for path in CaptionReport(images).folder.iterdir())


def test_another_machine_is_named_before_images_are_sent_there(
    images: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        assert caplog.messages[-1] == "The images are sent to images.example:8000, which is not this machine."
        raise UserError("stopped here")

    monkeypatch.setattr(endpoint_module, "ChatServer", refuse)
    arguments = ["--endpoint", "https://images.example:8000/v1", "--model", "served"]
    assert main(["caption", str(images), *arguments]) == 2
    assert caplog.messages[-1] == "stopped here"


def start(images: Path, arguments: Sequence[str], log: Path) -> Program:
    # The program's working folder is the repository's.
    return Program(SCRIPT, ["caption", str(images.resolve()), *arguments], log)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_is_stopped_and_given_again_writes_the_same_as_one_that_is_not(
    images: Path, tiny_captioner: Path, tmp_path: Path, number: int
) -> None:
    for copy in range(NUM_IMAGES, 20):
        tiny_image(90, 60, 10 + copy).save(images / f"{copy}.png")
    shutil.copytree(images, "others")
    words = ["--model", str(tiny_captioner.resolve()), "--batch", "1", "--length", "short"]
    (tmp_path / "log").touch()
    stopped = start(images, words, tmp_path / "log")
    wait_for(lambda: len(captions_in(images)) >= 2)
    os.kill(stopped.pid, number)
    if number == signal.SIGINT:
        os.kill(stopped.pid, signal.SIGTERM)  # as a launcher that Ctrl+C stopped sends
    code, before = stopped.wait(), captions_in(images)
    assert len(before) < 20, "it was stopped before the end"
    status = status_of(images)
    assert not status.is_running
    if number == signal.SIGKILL:
        assert (code, status.state) == (-signal.SIGKILL, "running")
    else:
        assert (code, status.state) == (75, "stopped")
        assert f"{signal.Signals(number).name}: stopped; the captions so far are written" in stopped.printed()
    assert main(["caption", str(images.resolve()), *words]) == 0
    assert main(["caption", "others", *words[:2], "--batch", "4", *words[4:]]) == 0
    after = captions_in(images)
    assert after == captions_in(Path("others"))
    assert before.items() <= after.items()
    assert len(after) == 20
    assert CaptionReport(images).rows().keys() == {f"{Path(name).stem}.png" for name in after}
