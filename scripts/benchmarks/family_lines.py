"""How long the families' files are, those of a folder taken together, and what two families say alike.

Lines are lines of code: no blank lines, comments or docstrings. Alike are runs of at least six of them,
imports left out, that are equal to the letter but for their indentation and stand in the same order in both.

    python scripts/benchmarks/family_lines.py
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import combinations
from pathlib import Path
from typing import Any

from meters import print_table

FAMILIES = Path(__file__).parents[2] / "diffsynth_lite" / "pipelines"
MIN_RUN = 6

_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def code_lines(source: str, *, with_imports: bool = True) -> list[str]:
    """The lines of code of ``source``, without their indentation."""
    nodes: list[Any] = [node for node in ast.walk(ast.parse(source)) if _is_left_out(node, with_imports)]
    left_out = {line for node in nodes for line in range(node.lineno, node.end_lineno + 1)}
    used = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _NO_CODE and token.string
        for line in range(token.start[0], token.end[0] + 1)
    }
    lines = source.splitlines()
    return [lines[line - 1].strip() for line in sorted(used - left_out)]


def shared_runs(first: list[str], second: list[str]) -> Iterator[list[str]]:
    """Runs of lines that both have, in the same order."""
    for match in SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks():
        if match.size >= MIN_RUN:
            yield first[match.a : match.a + match.size]


def _is_left_out(node: ast.AST, with_imports: bool) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return not with_imports
    # A string that is a statement of its own is documentation.
    value = getattr(node, "value", None) if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def main() -> None:
    """Print both tables, and each run once."""
    sources: dict[str, str] = {}
    for path in sorted(FAMILIES.rglob("[!_]*.py")):
        family = path.relative_to(FAMILIES).with_suffix("").parts[0]
        if family != "base":
            sources[family] = sources.get(family, "") + path.read_text()
    rows = [
        {
            "family": name,
            "lines of code": str(len(code_lines(source))),
            "of the file": str(source.count("\n")),
        }
        for name, source in sources.items()
    ]
    print_table("Lines of each family's file.", rows)
    bodies = {name: code_lines(source, with_imports=False) for name, source in sources.items()}
    runs: dict[tuple[str, ...], set[str]] = {}
    for first, second in combinations(bodies, 2):
        for run in shared_runs(bodies[first], bodies[second]):
            runs.setdefault(tuple(run), set()).update((first, second))
    for run, names in sorted(runs.items(), key=lambda item: -len(item[0])):
        print(f"\n{len(run)} lines in {', '.join(sorted(names))}:")
        print("\n".join(f"    {line}" for line in run))


if __name__ == "__main__":
    main()
