"""A model that stays loaded for many requests, and the process that serves it to another program."""

import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tiny_run import TinyRun

from diffsynth_lite.cli.main import main
from diffsynth_lite.config import load_config
from diffsynth_lite.errors import RunInterrupted, UserError
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.progress_log import watched
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.sampling.request import SampleRequest, find_lora
from diffsynth_lite.sampling.serving import AskedSamples, serve_samples
from diffsynth_lite.sampling.session import SampleSession
from diffsynth_lite.serving import Requests

DEFAULTS: dict[str, Any] = {
    "lora": ["{run}"],
    "prompt": ["a red circle"],
    "negative": "",
    "seed": [0],
    "scale": [1.0],
    "steps": 2,
    "guidance": 1,
    "size": [32, 32],
}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list["weakref.ref[torch.nn.Module]"]:
    """Each transformer that is loaded."""
    loaded, load = [], QwenImage.load_transformer

    def loading(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model = load(*args, **kwargs)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(QwenImage, "load_transformer", loading)
    return loaded


def request_in(run: TinyRun, given: dict[str, Any]) -> SampleRequest:
    """The request that `sample --config` makes of these arguments."""
    asked = DEFAULTS | given
    settings = {
        "prompts": json.dumps(asked["prompt"]),
        "negative_prompt": asked["negative"],
        "num_inference_steps": asked["steps"],
        "guidance_scale": asked["guidance"],
        "width": asked["size"][0],
        "height": asked["size"][1],
    }
    flags = [f"validation.{name}={value}" for name, value in settings.items()]
    return SampleRequest(
        config=load_config(run.config, [*run.settings, *flags]).config,
        loras=[find_lora(one.format(run=run.folder)) for one in asked["lora"]],
        scales=asked["scale"],
        by_step={},
        seeds=asked["seed"],
        run=RunFolder(run.folder),
        out=None,
    )


@contextmanager
def opened(run: TinyRun) -> Iterator[Callable[..., dict[str, bytes]]]:
    """Generates in one session, and gives the files by name."""
    session = SampleSession.open(load_config(run.config, run.settings).config, RunFolder(run.folder))
    with closing(session):

        def generate(**given: Any) -> dict[str, bytes]:
            grid = session.generate(request_in(run, given)).grid
            return {path.name: path.read_bytes() for path in grid.parent.iterdir()}

        yield generate


def by_command(run: TinyRun, given: dict[str, Any]) -> dict[str, bytes]:
    """The files of the command, which loads everything for itself."""
    asked = DEFAULTS | given
    out = run.root / f"by command {len(list(run.root.iterdir()))}"
    words = ["--config", run.config, *run.settings, "--out", out, "--negative", asked["negative"]]
    words += ["--size", "x".join(map(str, asked["size"]))]
    words += [word for name in ("steps", "guidance") for word in (f"--{name}", asked[name])]
    words += [word for one in asked["lora"] for word in ("--lora", one.format(run=run.folder))]
    words += [word for one in asked["prompt"] for word in ("--prompt", one)]
    words += [word for name in ("seed", "scale") for word in (f"--{name}", ",".join(map(str, asked[name])))]
    assert main(["sample", *map(str, words)]) == 0
    return {path.name: path.read_bytes() for path in out.iterdir()}


REQUESTS: list[dict[str, Any]] = [
    {"lora": ["{run}@2"], "scale": [0, 1, -2]},
    {"prompt": ["a dog", "a cat"], "negative": "blurry", "guidance": 3, "size": [48, 32], "seed": [4, 2]},
    {"lora": [], "scale": [0], "steps": 3},
    {"lora": ["{run}@4:0.5", "{run}@2"]},
]


@pytest.mark.parametrize("settings", [(), ("model.quantize=int8", "memory.stream_blocks=2")])
def test_a_request_has_the_bytes_of_the_command_whatever_came_before_it(
    finished_run: TinyRun, loads: list[object], settings: tuple[str, ...]
) -> None:
    run = finished_run.having(*settings, "memory.stream_slots=1", "memory.min_bytes=1")
    requests = REQUESTS if not settings else [REQUESTS[3], REQUESTS[0]]
    expected = [by_command(run, given) for given in requests]
    loads.clear()
    with opened(run) as generate:
        for place in (*range(len(requests)), *reversed(range(len(requests)))):
            torch.manual_seed(place)
            assert generate(**requests[place]) == expected[place]
    assert len(loads) == 1 + (not settings)  # once more for the second LoRA


def test_the_text_encoder_is_loaded_for_new_prompts_only_and_close_frees_the_model(
    finished_run: TinyRun, loads: list["weakref.ref[torch.nn.Module]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoders, load = [], QwenImage.load_prompt_encoder

    def loading(*args: Any) -> Any:
        encoders.append(len([model for model in loads if model() is not None]))
        if encoders == [0, 1]:
            raise torch.OutOfMemoryError("full")
        return load(*args)

    monkeypatch.setattr(QwenImage, "load_prompt_encoder", loading)
    with opened(finished_run) as generate:
        first = generate(prompt=["one"])
        assert generate(prompt=["one"]) == first
        assert (encoders, len(loads)) == ([0], 1)
        generate(prompt=["two"])
        # It did not fit next to the model, which was free when it was loaded again.
        assert (encoders, len(loads)) == ([0, 1, 0], 2)
        generate(prompt=["three"])
        assert (encoders, len(loads)) == ([0, 1, 0, 1], 2)
        assert loads[1]() is not None
    assert loads[1]() is None


def test_what_fails_or_is_cancelled_between_passes_leaves_no_trace(finished_run: TinyRun) -> None:
    seen: list[int] = []

    def cancel(phase: str, done: int, total: int) -> None:
        seen.append(done)
        if phase == "generating" and len(seen) == 7:
            raise RunInterrupted

    given: dict[str, Any] = {"prompt": ["a dog"], "steps": 9}
    with opened(finished_run) as generate:
        expected = generate(**given)
        with watched(cancel), pytest.raises(RunInterrupted):
            generate(**given)
        assert seen == [0] * 7  # in the middle of the only image
        with pytest.raises(UserError, match="overflow"):
            generate(**given, scale=[1e30])
        with pytest.raises(UserError, match="not divisible"):
            generate(**given, size=[33, 32])
        assert generate(**given) == expected


class Served:
    """A server in this process, whose lines come through a pipe and whose answers are read at its end."""

    def __init__(self, run: TinyRun) -> None:
        self.answers = StringIO()
        self._run = run
        self._read, self._write = os.pipe()

    def write(self, *lines: dict[str, Any] | str) -> None:
        for line in lines:
            text = line if isinstance(line, str) else json.dumps(line)
            os.write(self._write, f"{text}\n".encode())

    def serve(self) -> list[dict[str, Any]]:
        config, folder = load_config(self._run.config).config, RunFolder(self._run.folder)
        with os.fdopen(self._read, "rb", buffering=0) as lines:
            requests = Requests(AskedSamples, lines, self.answers, idle_s=0.05)
            serve_samples(requests, config, folder, lambda given: request_in(self._run, given))
            os.close(self._write)
        return [json.loads(line) for line in self.answers.getvalue().splitlines()]


def test_a_server_answers_in_lines_and_the_newest_request_takes_the_place_of_one_that_waits(
    finished_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, opening = Served(finished_run), SampleSession.open

    def all_wait(*args: Any) -> SampleSession:
        session = opening(*args)
        served.write({"id": "a", "prompt": ["x"]}, "{", {"id": 1, "colour": "red"}, {"id": 2, "scale": []})
        served.write({"id": "b", "size": [33, 32]}, {"id": "c", "prompt": ["a\nb"], "scale": [0, 1]})
        while '"b", "state": "dropped"' not in served.answers.getvalue():
            pass
        return session

    monkeypatch.setattr(SampleSession, "open", all_wait)
    answers = served.serve()
    assert [(answer["id"], answer["state"]) for answer in answers if answer["state"] != "working"] == [
        *((None, "failed"), (1, "failed"), (2, "failed"), ("a", "dropped"), ("b", "dropped")),
        *((None, "ready"), ("c", "done")),
    ]
    errors = [answer["error"].split(": ")[1] for answer in answers if answer["state"] == "failed"]
    assert errors[1:] == ["colour", "scale"]
    columns = answers[-1]["columns"]
    assert list(columns) == ["base", "scale 1"]
    assert all(Path(file).is_file() for file in (answers[-1]["grid"], *columns["base"], *columns["scale 1"]))
    working = [answer for answer in answers if answer.get("phase") == "generating"]
    assert max(answer["ticks"] for answer in working) >= 2


class Reacting(StringIO):
    """Takes answers, and calls something after the first one of a request that has these words."""

    def __init__(self, reactions: dict[str, Callable[[], None]]) -> None:
        super().__init__()
        self._reactions = reactions

    def write(self, line: str) -> int:
        for words in [words for words in self._reactions if words in line]:
            self._reactions.pop(words)()
        return super().write(line)


def test_a_request_can_end_the_one_that_is_generated_and_so_can_the_end(finished_run: TinyRun) -> None:
    long: dict[str, Any] = {"prompt": ["x"], "steps": 1000}
    served = Served(finished_run)
    reactions = {
        '"ready"': lambda: served.write({"id": 1, **long}),
        '"id": 1, "state": "working", "phase": "generating"': lambda: served.write(
            {"id": 2, **long, "cancels": True}
        ),
        '"id": 2, "state": "working", "phase": "generating"': lambda: served.write({"ask": "cancel"}),
        '"id": 2, "state": "cancelled"': lambda: served.write({"id": 3, **long}),
        '"id": 3, "state": "working", "phase": "generating"': lambda: served.write({"ask": "end"}),
    }
    served.answers = Reacting(reactions)
    answers = served.serve()
    assert [(one["id"], one["state"]) for one in answers if one["state"] != "working"] == [
        *((None, "ready"), (1, "cancelled"), (2, "cancelled"), (3, "cancelled")),
    ]
    assert not list((finished_run.folder / "samples").iterdir())


def test_the_memory_of_a_session_is_counted_with_its_loras_before_anything_is_loaded(
    finished_run: TinyRun, loads: list[object]
) -> None:
    with closing(SampleSession.open(load_config(finished_run.config).config)) as session:
        plain, one, two = (
            session.count_bytes(request_in(finished_run, {"lora": ["{run}"] * number})) for number in range(3)
        )
        tensors = find_lora(str(finished_run.folder)).place / "pytorch_lora_weights.safetensors"
        lora_bytes = sum(tensor.nbytes for tensor in load_file(tensors).values())
        assert two.device - one.device == one.device - plain.device == lora_bytes
        assert plain.least_device < plain.device
        larger = session.count_bytes(request_in(finished_run, {"size": [512, 512], "lora": []}))
        assert larger.least_device > plain.least_device
    assert loads == []


def test_the_command_serves_only_answers_on_stdout_until_it_is_idle(
    finished_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, sample = finished_run.root, SampleSession.generate

    def printing(*args: Any) -> object:
        os.write(sys.stdout.fileno(), b"from a library")
        return sample(*args)

    monkeypatch.setattr(SampleSession, "generate", printing)
    reading, writing = os.pipe()
    os.write(writing, b'{"id": 7, "prompt": ["@a"], "scale": [1], "guidance": 1.0}\n')
    with (root / "out").open("w") as out, (root / "log").open("w") as log, os.fdopen(reading) as lines:
        for name, stream in (("stdin", lines), ("stdout", out), ("stderr", log)):
            monkeypatch.setattr(sys, name, stream)
        words = ["--lora", str(finished_run.folder), "--steps", "2", "--size", "32x32"]
        assert main(["sample", *words, "--serve", "0.01"]) == 0
    os.close(writing)
    *_, done = answers = [json.loads(line) for line in (root / "out").read_text().splitlines()]
    assert {answer["state"] for answer in answers} == {"ready", "working", "done"}
    assert "from a library" in (root / "log").read_text()
    [image] = done["columns"]["scale 1"]
    with Image.open(image) as opened:
        assert opened.info["parameters"].startswith("@a <lora:run:1>\nSteps: 2,")
