"""The house rules that no linter checks: sizes, swallowed errors, paths, the public surface."""

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import diffsynth_lite

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES = 500
MAX_FOLDER_FILES = 20
CATALOGUES = ("diffsynth_lite/cli", "diffsynth_lite/pipelines")
"""A file or a folder an entry, all of one shape, each found by its name: nobody reads all of them."""
MAX_TRAINER_LINES = 250
"""All of a step, and all that follows it, is to be read in one go."""
MAX_TRAINING_FLOORS = 9
MAX_BODY_LINES = 60
MAX_NESTING = 3

BROAD_EXCEPTIONS = {"Exception", "BaseException"}
BOUNDARIES = (
    "diffsynth_lite/training/previews.py",
    "diffsynth_lite/training/export/card.py",
    "diffsynth_lite/report/page.py",
    "diffsynth_lite/report/run_report.py",
)
"""A failing preview, card or page must not end a run, nor one run take the page from others: the places where
any exception is caught, once each."""

REPLACED_WORDS = {
    "told": "logged, given, known",
    "said": "shown, logged, a message",
    "beside": "next to, with, in addition to",
    "likewise": "also",
    "anew": "again",
}
"""Words that a reader in this field stops at, and what to write."""

MACHINE_PATH = re.compile(r"(?<![\w.:/-])(/(home|mnt|root|scratch|tmp|work|workspace|Users)/|[A-Z]:\\)\w")

Offences = Iterator[tuple[int, str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef
COMPOUND = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.TryStar,
    ast.Match,
)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def files(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file())


PRODUCT = files("train.py", "diffsynth_lite/**/*.py", "examples/**/*.py", "scripts/**/*.py")
TESTS = files("tests/**/*.py")
TEXTS = files("configs/**/*.yaml", "examples/**/*.yaml", "scripts/*", ".ci/*")


def long_bodies(tree: ast.AST) -> Offences:
    """Functions whose body, without its docstring, has too many lines."""
    for function in functions(tree):
        body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
        num_lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
        if num_lines > MAX_BODY_LINES:
            yield function.lineno, f"{function.name} has {num_lines} lines"


def deep_nesting(tree: ast.AST) -> Offences:
    """Functions with blocks too deep inside each other; an elif is as deep as its if."""
    for function in functions(tree):
        depth = max(nesting(statement) for statement in function.body)
        if depth > MAX_NESTING:
            yield function.lineno, f"{function.name} nests {depth} deep"


def nesting(node: ast.AST) -> int:
    if isinstance(node, SCOPES):
        return 0
    inner = max((nesting(child) for child in ast.iter_child_nodes(node)), default=0)
    if not isinstance(node, COMPOUND):
        return inner
    if isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        return max(1 + max(map(nesting, node.body)), nesting(node.orelse[0]))
    return 1 + inner


def swallowed_exceptions(tree: ast.AST) -> Offences:
    """Handlers of any exception that do not raise, and ``suppress`` of any exception."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and is_broad(node.type) and not raises(node):
            yield node.lineno, "any exception is caught and not raised again"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("suppress", "contextlib.suppress"):
            yield from ((node.lineno, "any exception is suppressed") for each in node.args if is_broad(each))


def is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(map(is_broad, caught.elts))
    return caught is None or ast.unparse(caught).removeprefix("builtins.") in BROAD_EXCEPTIONS


def raises(node: ast.AST) -> bool:
    children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, SCOPES)]
    return any(isinstance(child, ast.Raise) or raises(child) for child in children)


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def offences(rule: Callable[[ast.AST], Offences], paths: list[Path]) -> list[str]:
    found = []
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(ROOT).as_posix()}:{line}: {what}" for line, what in rule(tree)]
    return found


def test_there_is_something_to_check() -> None:
    assert len(PRODUCT) > 30
    assert len(TESTS) > 10


def test_no_file_is_longer_than_a_reader_s_patience() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PRODUCT + TESTS}
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_folder_holds_more_files_than_a_reader_can_keep_in_mind() -> None:
    catalogues = [ROOT / folder for folder in CATALOGUES]
    sizes = Counter(path.parent for path in files("diffsynth_lite/**/*.py") if path.name != "__init__.py")
    assert [folder for folder in sizes if sizes[folder] > MAX_FOLDER_FILES and folder not in catalogues] == []
    assert all(folder in sizes for folder in catalogues)


def test_each_test_file_has_a_name_of_its_own() -> None:
    """As pytest needs it, which finds two of one name only where both are run."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []


def test_the_training_loop_is_read_in_one_go() -> None:
    trainer = ROOT / "diffsynth_lite/training/trainer.py"
    assert len(trainer.read_text(encoding="utf-8").splitlines()) <= MAX_TRAINER_LINES


def imports_of(path: Path) -> set[str]:
    """Names of modules that a file imports, each with the longer name that it is if the name is a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def floors(imports: dict[str, set[str]]) -> dict[str, int]:
    """The height of each module: 1 where it imports none of the others, else one more than the highest."""
    heights: dict[str, int] = {}
    while len(heights) < len(imports):
        above = {
            name: below & imports.keys() - {name} for name, below in imports.items() if name not in heights
        }
        ready = {name for name, below in above.items() if below <= heights.keys()}
        assert ready, f"these import each other: {sorted(above)}"
        heights |= {name: 1 + max((heights[each] for each in above[name]), default=0) for name in ready}
    return heights


def rooms(folder: Path, imports: dict[Path, set[str]]) -> dict[str, set[str]]:
    """The rooms of a folder, each a file or a folder in it, with the rooms that each of them imports from."""
    package = ".".join(folder.relative_to(ROOT).parts)
    found: dict[str, set[str]] = {}
    for path, names in imports.items():
        room = path.relative_to(folder).with_suffix("").parts[0]
        inside = {name.removeprefix(f"{package}.") for name in names if name.startswith(f"{package}.")}
        found.setdefault(room, set()).update(name.partition(".")[0] for name in inside)
    return found


def test_the_rooms_of_training_have_few_floors_and_no_circle() -> None:
    training = ROOT / "diffsynth_lite/training"
    modules = [path for path in files("diffsynth_lite/training/**/*.py") if path.name != "__init__.py"]
    heights = floors(rooms(training, {path: imports_of(path) for path in modules}))
    assert {room: height for room, height in heights.items() if height > MAX_TRAINING_FLOORS} == {}


def test_files_that_import_each_others_rooms_are_a_circle_of_rooms() -> None:
    folder = ROOT / "a"
    imports = {folder / "b/x.py": {"a.c.y"}, folder / "c/y.py": set(), folder / "c/z.py": {"a.b.x", "os"}}
    assert rooms(folder, imports) == {"b": {"c"}, "c": {"b"}}
    with pytest.raises(AssertionError, match="import each other"):
        floors(rooms(folder, imports))


def test_floors_are_counted_by_the_longest_way_down() -> None:
    assert floors({"a": {"b", "c", "os"}, "b": {"c"}, "c": set()}) == {"a": 3, "b": 2, "c": 1}
    with pytest.raises(AssertionError, match="import each other"):
        floors({"a": {"b"}, "b": {"a"}})


@pytest.mark.parametrize("rule", [long_bodies, deep_nesting], ids=lambda rule: rule.__name__)
def test_the_product_keeps_the_rule(rule: Callable[[ast.AST], Offences]) -> None:
    assert offences(rule, PRODUCT) == []


def test_no_exception_is_swallowed_but_at_the_boundaries() -> None:
    places = [offence.partition(":")[0] for offence in offences(swallowed_exceptions, PRODUCT)]
    assert sorted(places) == sorted(BOUNDARIES)


def test_nothing_names_a_path_of_the_machine_it_was_written_on() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in PRODUCT + TEXTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("word", REPLACED_WORDS)
def test_a_word_that_was_replaced_does_not_return(word: str) -> None:
    code = files("diffsynth_lite/**/*.py", "diffsynth_lite/ui/*/*.js", "tests/**/*.py", "train.py")
    texts = [*code, *files("configs/**/*.yaml", "docs/*.md", "*.md")]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts
        if path.name not in ("changelog.md", "caption_sets.py", Path(__file__).name)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(rf"\b{word}\b", line, re.IGNORECASE)
    ]
    assert found == [], f"write {REPLACED_WORDS[word]}"


def in_function(*lines: str) -> str:
    return "def function():\n" + "".join(f"    {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (long_bodies, in_function('"""' + "\n" * 70 + '"""', *["x = 1"] * 60), in_function(*["x = 1"] * 61)),
        (
            deep_nesting,
            "def f():\n for a in b:\n  with c:\n   if d: pass\n   elif e: pass\n   else: pass",
            "def f():\n for a in b:\n  with c:\n   if d: pass\n   elif e:\n    while g: pass",
        ),
        (
            deep_nesting,
            "def f():\n try: pass\n except E: pass",
            in_function("if a:\n     try:\n      for b in c:\n       if d: pass\n     finally: pass"),
        ),
        (swallowed_exceptions, "try: f()\nexcept OSError: pass", "try: f()\nexcept Exception: pass"),
        (swallowed_exceptions, "try: f()\nexcept Exception:\n log()\n raise", "try: f()\nexcept: log()"),
        (
            swallowed_exceptions,
            "try: f()\nexcept BaseException as e:\n if e: raise E from e",
            "try: f()\nexcept (OSError, BaseException):\n def g(): raise",
        ),
        (swallowed_exceptions, "with suppress(KeyError): f()", "with contextlib.suppress(Exception): f()"),
    ],
)
def test_each_rule_passes_the_good_and_finds_the_bad(
    rule: Callable[[ast.AST], Offences], good: str, bad: str
) -> None:
    assert list(rule(ast.parse(good))) == []
    assert len(list(rule(ast.parse(bad)))) == 1


def test_machine_paths_are_distinguished_from_others() -> None:
    for line in ('open("/home/ann/x")', "cd /tmp/run", "path: /Users/ann", r'"C:\data"'):
        assert MACHINE_PATH.search(line)
    for line in ("https://example.org/home/x", "out/tmp/x", "./home/x", "a/b", "/", "//home/x", "e:/tmp/x"):
        assert not MACHINE_PATH.search(line)


HEAVY = {"accelerate", "datasets", "diffusers", "peft", "torch", "transformers"}


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("diffsynth_lite", HEAVY | {"numpy", "PIL"}),
        ("diffsynth_lite.report.server", HEAVY),
        ("diffsynth_lite.ui.server", HEAVY),
    ],
)
def test_what_needs_no_model_imports_nothing_heavy(modules: str, heavy: set[str]) -> None:
    program = f"import sys, {modules}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded = set(done.stdout.split())
    assert "diffsynth_lite" in loaded
    assert loaded & heavy == set()


def test_every_public_name_is_there_and_every_name_that_is_there_is_public() -> None:
    public = diffsynth_lite.__all__
    assert len(set(public)) == len(public)
    for name in public:
        assert getattr(diffsynth_lite, name) is not None
    shown = {name for name in dir(diffsynth_lite) if not name.startswith("_")}
    modules = {name for name in shown if inspect.ismodule(getattr(diffsynth_lite, name))}
    assert shown - modules == {name for name in public if not name.startswith("_")}


def test_a_name_that_is_not_public_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        diffsynth_lite.no_such_name  # noqa: B018
