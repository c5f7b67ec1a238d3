"""C1, C3 and C4: wrong configs and commands, extremes, and what is written of a config and read again."""

import os
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from test_bad_config_corpus import FLAGS, OVERRIDES, PATHS, TEXTS, WRONG_FILES
from test_config_refusals import WRONG_REFERENCES, WRONG_VALUES
from test_config_round_trip import assert_survives_yaml, configs

from diffsynth_lite.config import Config, load_config, section_types
from diffsynth_lite.errors import UserError
from faults.bench import PROVOKED, Bench, environment, fault, num_passed

MINIMAL = (
    "model:\n  family: qwen_image\n  path: some/model\ndata:\n  path: images\noutput:\n  dir: runs/one\n"
)
LIMIT_S = 2.0
EXTREMES = (
    *("0", "-0", "1", "-1", "1.5", "1e-308", "1e308", "-1e308", "1e999", "nan", ".inf", "0x10", "1_000"),
    *("9" * 18, "9" * 60, "null", "", " ", "true", "a" * 20_000, "a\nb", "\x1b[31m", "\u202e", "\U0001f600"),
    *("..", "/", "[]", "[[1]]", "{a: 1}", f"[{', '.join(map(str, range(300)))}]"),
)
LONGEST_LINE = 500
MANY = 20_000
_TIME = re.compile(r"^\d\d:\d\d:\d\d ")
MODELLESS = (sys.executable, PROVOKED, "without_libraries")


@dataclass(frozen=True)
class WrongCommand:
    """A command that must be refused.

    Attributes:
        arguments: of the training command.
        answers: a line of the answer must begin with one of these, after the time.
    """

    arguments: tuple[str, ...]
    answers: tuple[str, ...]

    @property
    def is_possible(self) -> bool:
        """Whether a shell can give it: a process takes neither zero bytes nor half characters."""
        with suppress(UnicodeEncodeError):
            return b"\0" not in b"".join(map(os.fsencode, self.arguments))
        return False


@fault("C1", "exit 2, names the place, before a model is loaded; no traceback")
def refuse_wrong_configs(bench: Bench) -> str:
    """Wrong configs, overrides, flags and paths."""
    tested = num_passed("config/test_bad_config_corpus.py", "config/test_config_refusals.py")
    commands = [command for command in wrong_commands(bench.root) if command.is_possible]
    seconds = [_refused(command, bench.root) for command in commands[:: bench.pick(20, 2, 1)]]
    assert max(seconds) < LIMIT_S, max(seconds)
    return f"{tested} cases, {len(seconds)} of them as processes; at most {max(seconds):.1f} s of a processor"


def wrong_commands(folder: Path) -> Iterator[WrongCommand]:
    """All that is wrong in the corpus of the tests, with the files that it needs."""
    good = folder / "good.yaml"
    good.write_text(MINIMAL)
    for override in OVERRIDES:
        shown = override if override.isprintable() else repr(override)[1:-1]
        yield WrongCommand(("--config", str(good), override), (f"{shown} (command line)",))
    for flags, words in FLAGS:
        yield WrongCommand(("--config", str(good), *flags), (f"train.py: error: {words}",))
    for number, (text, place) in enumerate(_texts()):
        path = folder / f"{number}.yaml"
        path.write_bytes(text)
        yield WrongCommand(("--config", str(path)), (f"{path}{place}",))
    (folder / "a-folder").mkdir()
    (folder / "a-file.yaml").touch()
    (folder / "link-to-itself.yaml").symlink_to("link-to-itself.yaml")
    (folder / "link-to-nothing.yaml").symlink_to("nothing")
    for name in PATHS:
        yield WrongCommand(("--config", name), (f"--config {name}: ", f"{name}:1: "))


def _texts() -> Iterator[tuple[bytes, str]]:
    """Contents of config files, with what follows the name of the file in the answer."""
    for text, place in TEXTS:
        yield (text if isinstance(text, bytes) else text.encode()).replace(b"...", MINIMAL.encode()), place
    for text, place, _reason in WRONG_FILES:
        yield text if isinstance(text, bytes) else text.encode(), place
    for section, key, value, reason in (*WRONG_VALUES, *WRONG_REFERENCES):
        if reason is not None:
            name = f"{section}.{key.strip(chr(39))}"
            yield f"{section}:\n  {key}: {value}\n{MINIMAL}".encode(), f":2 {name}: "


def _refused(command: WrongCommand, folder: Path) -> float:
    """Seconds of the processor until a command was refused in the right way."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*MODELLESS, *command.arguments],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="backslashreplace",
        timeout=60,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2, f"{command}: exit code {done.returncode}\n{done.stderr}"
    assert "Traceback" not in done.stderr, f"{command}\n{done.stderr}"
    lines = [_TIME.sub("", line) for line in done.stderr.split("\n")]
    assert any(line.startswith(command.answers) for line in lines), f"{command}\n{done.stderr}"
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@fault("C3", "the same config")
def write_and_read_configs(bench: Bench) -> str:
    """A config written and read again."""
    wanted = bench.pick(25, 300, 3000)
    tried: list[Config] = []

    @seed(bench.seed)
    @settings(max_examples=wanted, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(config=configs())
    def survive(config: Config) -> None:
        assert_survives_yaml(config)
        tried.append(config)

    survive()
    assert len(tried) >= wanted
    return f"{len(tried)} random configs"


@fault("C4", "taken or refused in one line of at most 500 characters, in 2 s of a processor")
def go_to_extremes(bench: Bench) -> str:
    """Each setting at extremes: numbers, texts, lists; 20,000 wrong keys."""
    file = bench.root / "good.yaml"
    file.write_text(MINIMAL)
    names = [f"{section}.{key}" for section, kind in section_types().items() for key in kind.model_fields]
    answers = Counter(
        _answered(file, name, value) for name in names for value in EXTREMES[:: bench.pick(10, 3, 1)]
    )
    many = bench.root / "many.yaml"
    many.write_text(f"{MINIMAL}memory:\n" + "".join(f"  key{number}: 1\n" for number in range(MANY)))
    before = time.process_time()
    with pytest.raises(UserError) as caught:
        load_config(many)
    num_lines, seconds = str(caught.value).count("\n") + 1, time.process_time() - before
    return (
        f"{len(names)} settings, {answers.total()} values: {answers[False]} refused, {answers[True]} taken; "
        f"of {MANY} wrong keys {num_lines} lines, after {seconds:.1f} s of a processor"
    )


def _answered(file: Path, name: str, value: str) -> bool:
    """Whether a setting takes a value; where it does not, the answer is as it should be."""
    override, before = f"{name}={value}", time.process_time()
    try:
        load_config(file, [override])
    except UserError as error:
        lines = str(error).splitlines()
        assert all(len(line) <= LONGEST_LINE and line.isprintable() for line in lines), (override, lines)
        assert any(line.startswith(f"{name}=") for line in lines), (override, lines)
        return False
    finally:
        assert time.process_time() - before < LIMIT_S, override
    return True
