"""C2: a run that is continued with each setting changed by itself."""

import shutil
from pathlib import Path

from tiny_run import TinyRun

from faults.bench import Bench, assert_same, fault, stopped_after, train
from faults.settings import BASE, DATA, FREE, NAMED, NEVER, NOT_OF_IMAGES, Change


@fault("C2", "refused, refused without resume.allow, or free and then exact")
def change_each_setting(bench: Bench) -> str:
    """Each setting changed by itself."""
    run = bench.images()
    run = run.having(*BASE)
    whole, stopped = run.root / "whole", run.root / "stopped"
    assert train(run, whole) == 0
    stopped_after(run, 2, stopped)
    for key, change in NEVER.items():
        tried = _copied(stopped)
        assert train(run, tried, *change) == 2, key
        _assert_untouched(stopped, tried, key)
    for key, change in (DATA | NAMED).items():
        permission = "data" if key in DATA else key
        tried = _copied(stopped)
        assert train(run, tried, *change) == 2, key
        _assert_untouched(stopped, tried, key)
        if key not in NOT_OF_IMAGES:
            code = train(run, tried, *change, f"resume.allow=[{permission}]")
            assert code == 0, f"{key}: exit code {code}"
    for key, change in FREE.items():
        _assert_free(run, whole, _copied(stopped), key, change)
    return f"{len(NEVER)} settings never, {len(DATA) + len(NAMED)} only when allowed, {len(FREE)} free"


def _copied(stopped: Path) -> Path:
    tried = stopped.with_name("tried")
    if tried.exists():
        shutil.rmtree(tried)
    return shutil.copytree(stopped, tried)


def _assert_untouched(stopped: Path, tried: Path, key: str) -> None:
    before, after = (
        {
            path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path.name != ".lock"
        }
        for folder in (stopped, tried)
    )
    assert before == after, (
        f"{key}: a refused start changed {[str(path) for path in before.keys() ^ after.keys()]}"
    )


def _assert_free(run: TinyRun, whole: Path, tried: Path, key: str, change: Change) -> None:
    code = train(run, tried, *change)
    assert code == 0, f"{key}: exit code {code}"
    assert_same(whole, tried, 4)
