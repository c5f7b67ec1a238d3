"""Measures on one GPU what the README and docs/benchmarks.md show, in stages that can be run one by one.

    bash scripts/gpu/run.sh truth upstream        # these, in this order
    bash scripts/gpu/run.sh --next                # what has no result yet here, the most telling first
    bash scripts/gpu/run.sh --rehearse            # all of them in small on the CPU, about 5 minutes
    bash scripts/gpu/run.sh --report              # write the tables of README and docs
    bash scripts/gpu/run.sh --wheels PACKAGES     # fetch what a machine without network lacks

Each result is a line of scripts/gpu/results.jsonl, written as soon as it is known. What is cut off is
continued by the next start. A stage ends by its own clock, and one that fails does not stop the next. A stage
that is named tries again what failed before or needed a package; --next does not.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
# In place of this folder: its modules are those of the package `gpu`.
sys.path[:1] = [str(ROOT / name) for name in ("", "scripts", "scripts/benchmarks")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from gpu.report import write_report  # noqa: E402
from gpu.results import Machine, ResultFile, current_commit  # noqa: E402
from gpu.stage import Measurement, Stage, run_stage  # noqa: E402
from gpu.stages import STAGES  # noqa: E402
from gpu.wheels import Target, fetch_wheels  # noqa: E402

RESULTS = ROOT / "scripts" / "gpu" / "results.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages that are asked for."""
    parser = _parser()
    options = parser.parse_args(arguments)
    stages = {stage.name: stage for stage in STAGES}
    if options.wheels:
        try:
            target = Target.described_in(options.wheels)
        except ValueError as error:
            parser.error(str(error))
        return fetch_wheels(target, ROOT)
    if options.report:
        return write_report(ResultFile(options.results).read(), ROOT)
    if unknown := [name for name in options.stage if name not in stages]:
        parser.error(f"{', '.join(unknown)}: not a stage; stages are {', '.join(stages)}")
    if not (options.stage or options.next or options.rehearse):
        parser.error(f"name stages ({', '.join(stages)}), or give --next or --rehearse")
    if options.rehearse:
        os.environ |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --rehearse runs on the CPU")
    chosen = [stages[name] for name in options.stage] or list(STAGES)
    if options.at_work:
        _measurement(chosen[0], options, options.retry_before).measure_remaining(options.at_work)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if options.rehearse and options.results == RESULTS:
            options.results = Path(folder) / "results.jsonl"
        _run(chosen, options)
        return _summary(chosen, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bash scripts/gpu/run.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="\n".join(
            f"{stage.name:10} {stage.minutes:g} min at most: {stage.question}" for stage in STAGES
        ),
    )
    parser.add_argument("stage", nargs="*", help="to run; see below")
    parser.add_argument("--next", action="store_true", help="run what has no result yet")
    parser.add_argument("--rehearse", action="store_true", help="run in small on the CPU")
    parser.add_argument("--report", action="store_true", help="write the tables from the results")
    parser.add_argument(
        "--wheels", type=Path, metavar="PACKAGES", help="see docs/benchmarks.md: what the other machine has"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        help="file of results (default: %(default)s; of a rehearsal, one that is deleted)",
    )
    parser.add_argument(
        "--commit", default=current_commit(), help="of the repository, where git cannot be asked"
    )
    parser.add_argument("--at-work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--retry-before", default="", help=argparse.SUPPRESS)
    return parser


def _measurement(stage: Stage, options: argparse.Namespace, retry_before: str) -> Measurement:
    return Measurement(
        stage=stage,
        results=ResultFile(options.results),
        machine=Machine.here(rehearse=options.rehearse),
        rehearse=options.rehearse,
        commit=options.commit,
        retry_before=retry_before,
    )


def _run(stages: Sequence[Stage], options: argparse.Namespace) -> None:
    retry_before = datetime.now(UTC).isoformat(timespec="seconds") if options.stage else ""
    for stage in stages:
        print(f"== {stage.name}: {stage.question}", flush=True)
        command = [sys.executable, str(Path(__file__).parent), stage.name, "--results", str(options.results)]
        command += ["--commit", options.commit]
        command += ["--rehearse"] if options.rehearse else []
        command += ["--retry-before", retry_before] if retry_before else []
        log = options.results.with_name(f"{stage.name}.log")
        run_stage(_measurement(stage, options, retry_before), [*command, "--at-work"], log)


def _summary(stages: Sequence[Stage], options: argparse.Namespace) -> int:
    """Print what became of each stage; 1 where a case failed."""
    num_failed = 0
    for stage in stages:
        measurement = _measurement(stage, options, "")
        known = measurement.results.newest(stage.name, stage.version, measurement.machine.hardware)
        outcomes = [result.outcome for result in known.values()]
        counts = {outcome: outcomes.count(outcome) for outcome in dict.fromkeys(outcomes)}
        counts["remaining"] = len(measurement.remaining())
        print(f"{stage.name:10} " + ", ".join(f"{number} {name}" for name, number in counts.items()))
        num_failed += counts.get("failed", 0)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
