"""Nothing in the product runs code that comes with data: banned names, and imports by name."""

import ast
from collections.abc import Callable

import pytest
from test_house_rules import PRODUCT, ROOT, Offences, offences

BANNED_MODULES = {
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"),
    *("code", "codeop", "runpy"),
}
BANNED_NAMES = {
    *("eval", "exec", "os.system", "os.popen"),
    *("torch.load", "torch.hub", "torch.package", "torch.jit.load", "pandas.read_pickle"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"),
    *("yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader"),
}
BANNED_KEYWORDS = {"trust_remote_code": False, "shell": False, "allow_pickle": False, "weights_only": True}
"""Keyword arguments that may only be given as this literal."""

IMPORTS_BY_NAME = {"__import__", "importlib.import_module", "importlib.util.spec_from_file_location"}
IMPORTERS = {
    "diffsynth_lite/__init__.py": "the public names, on their first use",
    "diffsynth_lite/pipelines/base/discovery.py": "model.family and train.optimizer, with a warning before",
}
"""The files of the package that may import by name, once each; the last one's come from a config."""


def banned_names(tree: ast.AST) -> Offences:
    """Ways to run code that comes with data, and shells."""
    meanings = aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, name) for name in imported(node) if is_banned(name))
        elif isinstance(node, ast.Name | ast.Attribute):
            if (name := meaning(node, meanings)) in BANNED_NAMES:
                yield node.lineno, name
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            yield from ((node.lineno, f"{name}({word})") for word in banned_keywords(node))


def imports_by_name(tree: ast.AST) -> Offences:
    """Imports of modules whose name is only known when the program runs."""
    meanings = aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and meaning(node, meanings) in IMPORTS_BY_NAME:
            yield node.lineno, ast.unparse(node)


def aliases(tree: ast.AST) -> dict[str, str]:
    """What the names that were imported as something else stand for."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        if isinstance(node, ast.ImportFrom)
        else alias.name
        for node in nodes
        for alias in node.names
        if alias.asname or isinstance(node, ast.ImportFrom)
    }


def meaning(node: ast.Name | ast.Attribute, meanings: dict[str, str]) -> str:
    first, dot, rest = ast.unparse(node).removeprefix("builtins.").partition(".")
    return meanings.get(first, first) + dot + rest


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]


def is_banned(name: str) -> bool:
    return name.partition(".")[0] in BANNED_MODULES or name in BANNED_NAMES


def banned_keywords(call: ast.Call) -> list[str]:
    return [
        f"{keyword.arg}={ast.unparse(keyword.value)}"
        for keyword in call.keywords
        if keyword.arg in BANNED_KEYWORDS and ast.unparse(keyword.value) != str(BANNED_KEYWORDS[keyword.arg])
    ]


def test_no_file_runs_code_that_comes_with_data() -> None:
    assert offences(banned_names, PRODUCT) == []


def test_a_module_is_imported_by_name_in_three_places_only() -> None:
    package = [path for path in PRODUCT if "diffsynth_lite" in path.relative_to(ROOT).parts]
    found = [offence.partition(":")[0] for offence in offences(imports_by_name, package)]
    assert found == sorted(IMPORTERS)


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (banned_names, "model.eval()", "eval('1')"),
        (banned_names, "import torch", "import pickle"),
        (banned_names, "from safetensors.torch import load_file", "from torch import load"),
        (banned_names, "yaml.safe_load(text)", "yaml.load(text)"),
        (banned_names, "torch.save", "torch.load(path, weights_only=True)"),
        (banned_names, "import torch as t\nt.save", "import torch as t\nt.load(path)"),
        (banned_names, "t.load(path)", "read = torch.load"),
        (banned_names, "load(weights_only=True)", "load(weights_only=False)"),
        (banned_names, "parse(Loader=yaml.SafeLoader)", "parse(Loader=yaml.Loader)"),
        (banned_names, "from os import path", "from os import system"),
        (banned_names, "run.exec", "builtins.exec(text)"),
        (imports_by_name, "import importlib.util", "importlib.import_module(name)"),
        (imports_by_name, "from a import b", "__import__(name)"),
        (banned_names, "np.load(path, allow_pickle=False)", "np.load(path, allow_pickle=True)"),
        (banned_names, "load(trust_remote_code=False)", "load(trust_remote_code=trust)"),
        (banned_names, "subprocess.run(command)", "subprocess.run(command, shell=True)"),
        (
            imports_by_name,
            "importlib.util.find_spec(name)",
            "from importlib import import_module as i\ni(name)",
        ),
    ],
)
def test_each_rule_passes_the_good_and_finds_the_bad(
    rule: Callable[[ast.AST], Offences], good: str, bad: str
) -> None:
    assert list(rule(ast.parse(good))) == []
    assert len(list(rule(ast.parse(bad)))) == 1


def test_ray_is_imported_in_its_room_only() -> None:
    def rays(tree: ast.AST) -> Offences:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from ((node.lineno, name) for name in imported(node) if name.split(".")[0] == "ray")

    places = {offence.partition(":")[0].rpartition("/")[0] for offence in offences(rays, PRODUCT)}
    assert places == {"diffsynth_lite/cluster"}
