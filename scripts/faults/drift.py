"""C2 and C4: each setting changed in a run that is continued, and each setting at its extremes."""

import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from diffsynth_lite.config import load_config, section_types
from diffsynth_lite.errors import UserError
from faults.bench import Bench, assert_same, fault
from faults.settings import BASE, DATA, FREE, NAMED, NEVER, NOT_OF_IMAGES

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


@fault("C2", "refused, refused without resume.allow, or free and then exact")
def change_each_setting(bench: Bench) -> str:
    """Each setting changed by itself."""
    run = bench.images(*BASE)
    whole, stopped = run.finish("whole"), run.stop_after(2, "stopped")
    for key, change in (NEVER | DATA | NAMED).items():
        tried = _copied(stopped)
        assert run.exit_code(tried, *change) == 2, key
        assert _files(tried) == _files(stopped), f"{key}: a refused start changed files"
        if key not in NEVER | dict.fromkeys(NOT_OF_IMAGES):
            permission = "data" if key in DATA else key
            run.finish(tried, *change, f"resume.allow=[{permission}]")
    for change in FREE.values():
        assert_same(whole, run.finish(_copied(stopped), *change), 4)
    return f"{len(NEVER)} settings never, {len(DATA) + len(NAMED)} only when allowed, {len(FREE)} free"


def _copied(stopped: Path) -> Path:
    tried = stopped.with_name("tried")
    shutil.rmtree(tried, ignore_errors=True)
    return shutil.copytree(stopped, tried)


def _files(folder: Path) -> dict[Path, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder): path.read_bytes() for path in files}


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
