"""This file writes the tables of the results into the README and docs/benchmarks.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from gpu.results import Machine, Result
from gpu.stage import Stage
from gpu.stages import STAGES

END = "<!-- end of gpu -->"
IN_README = ("truth", "upstream", "offload")
"""Stages whose tables the README has."""
_UNUSED = (
    "**No released weights and no GPU have been used yet**: everything is tested on CPUs with tiny models\n"
    "of the real classes ([what is missing](#limits))."
)
_MEASURED = (
    "**Measured on {machines}** with random weights ([tables](#on-a-gpu)). No released weights have been\n"
    "used yet: everything is tested with tiny models of the real classes ([what is missing](#limits))."
)
_NO_TABLES = "Nothing was measured on a GPU yet; `bash scripts/gpu/run.sh --next` does that on one."


def begin(block: str) -> str:
    """The mark before what is written into a block."""
    return f"<!-- gpu {block}: written by scripts/gpu/run.sh --report -->"


def write_report(results: Sequence[Result], root: Path) -> int:
    """Write what the results say between its marks in both files."""
    for (file, block), text in report_texts(results).items():
        path = root / file
        before, _, rest = path.read_text().partition(begin(block))
        _, found, after = rest.partition(END)
        if not found:
            raise ValueError(f"{file} lacks the marks {begin(block)} and {END}")
        path.write_text(f"{before}{begin(block)}\n\n{text}\n\n{END}{after}")
    return 0


def report_texts(results: Sequence[Result]) -> Mapping[tuple[str, str], str]:
    """The text between the marks of each block, by file and block."""
    machines = dict.fromkeys(result.machine.hardware for result in results)
    summary = _MEASURED.format(machines=" and ".join(machines)) if machines else _UNUSED
    return {
        ("README.md", "summary"): summary,
        ("README.md", "tables"): _tables(results, [stage for stage in STAGES if stage.name in IN_README]),
        ("docs/benchmarks.md", "tables"): _tables(results, STAGES),
    }


def _tables(results: Sequence[Result], stages: Sequence[Stage]) -> str:
    machines = dict.fromkeys(result.machine.hardware for result in results)
    found = [_of_machine(results, machine, stages) for machine in machines]
    return "\n\n".join(filter(None, found)) or _NO_TABLES


def _of_machine(results: Sequence[Result], hardware: str, stages: Sequence[Stage]) -> str:
    """The tables of one kind of machine; results of an earlier version of a stage do not count."""
    parts = []
    for stage in stages:
        own = [
            result
            for result in results
            if (result.stage, result.version, result.machine.hardware)
            == (stage.name, stage.version, hardware)
        ]
        newest = list({result.case: result for result in own}.values())
        if tables := stage.tables(newest):
            parts += [f"### {stage.question}", *tables, _origin(newest)]
    return "\n\n".join(parts)


def _origin(results: Sequence[Result]) -> str:
    machines = dict.fromkeys(_described(result.machine) for result in results)
    commits = dict.fromkeys(result.commit for result in results if result.commit)
    days = dict.fromkeys(result.at[:10] for result in results)
    not_measured = [
        f"{result.case} ({result.outcome}: {result.reason})"
        for result in results
        if result.outcome != "measured"
    ]
    lines = [f"{'; '.join(machines)}; commit {', '.join(commits) or 'unknown'}; {', '.join(days)}."]
    if not_measured:
        lines.append(f"Not measured: {'; '.join(not_measured)}.")
    return " ".join(lines)


def _described(machine: Machine) -> str:
    driver = f", driver {machine.driver}" if machine.driver else ""
    return (
        f"{machine.device}, {machine.device_gib:.0f} GiB{driver}, torch {machine.torch}, "
        f"{machine.num_cores} cores, {machine.host_gib:.0f} GiB of host memory"
    )
