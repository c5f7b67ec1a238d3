"""Shows what the tests notice: changes one line of the package, and runs the tests that should fail.

    python scripts/mutants                # all; some need Chromium or bitsandbytes
    python scripts/mutants m24 m25

One process imports the package. Each mutant is a fork of it, which changes the code of the functions that
differ, or imports the package again where the line is outside of functions. Programs that tests start by
themselves do not see the change. Exits with 1 where a mutant is killed or survives against mutants.yaml.
"""

import argparse
import contextlib
import functools
import gc
import importlib
import os
import pkgutil
import resource
import signal
import sys
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
LIMIT_S = 900
PYTEST_FAILED = 1


@dataclass(frozen=True)
class Mutant:
    """One changed line.

    Attributes:
        within: a file, or a folder in one of whose files it is.
        old: occurs there once.
        tests: files and folders below ``tests``, separated by spaces, with wildcards.
        survives: why all of these tests pass; empty where one must fail.
        family: the only one that the tests of all families are run for; empty where they are run for all.
    """

    id: str
    within: str
    old: str
    new: str
    tests: str
    survives: str = ""
    family: str = ""

    @property
    def file(self) -> Path:
        """The file that has the line."""
        texts = _texts(ROOT / self.within).items()
        found = [path for path, text in texts for _ in range(text.count(self.old))]
        assert len(found) == 1, f"{self.id}: {self.old!r} is {len(found)} times in {self.within}"
        return found[0]

    def changed(self) -> str:
        """The file with the line changed."""
        return self.file.read_text().replace(self.old, self.new)

    def test_files(self) -> list[str]:
        """The paths of its tests."""
        patterns = self.tests.split()
        found = [str(path) for pattern in patterns for path in sorted((ROOT / "tests").glob(pattern))]
        assert found, f"{self.id}: {self.tests} match no test"
        return found


@functools.cache
def _texts(within: Path) -> dict[Path, str]:
    """The code of a file, or of all of a folder."""
    found = within.rglob("*") if within.is_dir() else [within]
    return {path: path.read_text() for path in found if path.suffix in (".py", ".js") or path == within}


def read_mutants() -> list[Mutant]:
    """Those of mutants.yaml."""
    rows = yaml.safe_load(Path(__file__).with_name("mutants.yaml").read_text())
    return [Mutant(**row) for row in rows]


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the mutants; 1 if one did not end as expected."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("ids", nargs="*", help="such as m24 (default: all)")
    parser.add_argument("--logs", type=Path, default=Path("/dev/null"), help="folder for what pytest prints")
    options = parser.parse_args(arguments)
    known = {mutant.id: mutant for mutant in read_mutants()}
    if unknown := set(options.ids) - known.keys():
        parser.error(f"{sorted(unknown)} are not in mutants.yaml")
    _import_the_package()
    unexpected = []
    for name in options.ids or known:
        mutant = known[name]
        log = options.logs / f"{name}.log" if options.logs.is_dir() else options.logs
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        outcome = _tried(mutant, log)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        expected = "survived" if mutant.survives else "killed"
        if outcome != expected:
            unexpected.append(name)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        note = "" if outcome == expected else f", not {expected}"
        print(f"{name} {mutant.within}: {outcome}{note} ({cpu_s:.1f} CPU s)", flush=True)
    print(f"{len(options.ids or known)} mutants, not as expected: {', '.join(unexpected) or 'none'}")
    return int(bool(unexpected))


def _import_the_package() -> None:
    os.environ |= {"ACCELERATE_USE_CPU": "true", "CI": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    package = importlib.import_module("diffsynth_lite")
    for module in pkgutil.walk_packages(package.__path__, "diffsynth_lite."):
        with contextlib.suppress(ModuleNotFoundError):  # of an extra that is not installed
            importlib.import_module(module.name)


def _tried(mutant: Mutant, log: Path) -> str:
    """Run the tests of a mutant in a fork: killed, survived, or what went wrong."""
    child = os.fork()
    if not child:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = 70
        try:
            _install(mutant)
            code = _failing([*(["--family", mutant.family] if mutant.family else ()), *mutant.test_files()])
        finally:
            sys.stdout.flush()
            os._exit(code)
    end = time.monotonic() + LIMIT_S
    ended, status = 0, 0
    while not ended and time.monotonic() < end:
        time.sleep(0.05)
        ended, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
        return "killed"  # a test waits for ever
    code = os.waitstatus_to_exitcode(status)
    return {0: "survived", PYTEST_FAILED: "killed"}.get(code, f"could not be tried (exit code {code})")


def _failing(tests: Sequence[str]) -> int:
    import pytest

    options = ("-x", "-q", "-p", "no:cacheprovider", "--tb=line", "--all")
    rewritten = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    return int(pytest.main([*options, *rewritten, *tests]))


def _install(mutant: Mutant) -> None:
    path, changed = str(mutant.file), mutant.changed()
    if not path.endswith(".py"):
        read = Path.read_text
        Path.read_text = lambda self, *args, **given: (  # type: ignore[method-assign]
            changed if str(self.absolute()) == path else read(self, *args, **given)
        )
        return
    module = compile(changed, path, "exec", dont_inherit=True)
    new = dict(_codes(module))
    old = dict(_codes(compile(Path(path).read_text(), path, "exec", dont_inherit=True)))
    differing = [name for name in new if not _is_same(old.get(name), new[name])]
    functions = [
        each
        for each in gc.get_objects()
        if isinstance(each, types.FunctionType) and each.__code__.co_filename == path
    ]
    # A nested function is in the constants of its owner, whose code is replaced.
    owners = {name.partition(".<locals>")[0] for name in differing}
    # None differ where the change is in one of several lambdas or comprehensions of one name.
    if owners and owners <= {function.__code__.co_qualname for function in functions}:
        for function in functions:
            if function.__code__.co_qualname in owners:
                function.__code__ = new[function.__code__.co_qualname]
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "diffsynth_lite"]:
        del sys.modules[name]
    get_code = SourceFileLoader.get_code
    SourceFileLoader.get_code = lambda self, name: module if self.path == path else get_code(self, name)  # type: ignore


def _codes(code: types.CodeType) -> Iterator[tuple[str, types.CodeType]]:
    """A code object and those inside it, by qualified name."""
    yield code.co_qualname, code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_same(old: types.CodeType | None, new: types.CodeType) -> bool:
    """Whether two code objects are the same but for those inside them."""
    if old is None:
        return False

    def content(code: types.CodeType) -> object:
        constants = [each for each in code.co_consts if not isinstance(each, types.CodeType)]
        return code.co_code, code.co_names, repr(constants)

    return content(old) == content(new)


if __name__ == "__main__":
    sys.path[:1] = [str(ROOT)]
    os.chdir(ROOT)
    sys.exit(main())
