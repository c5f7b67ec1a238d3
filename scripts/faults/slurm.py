"""N4: the scripts of examples/slurm under a SLURM of two simulated nodes."""

import json
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tiny_run import REPOSITORY

from faults.bench import PLAIN, Bench, Run, assert_same, fault, wait_until
from faults.clusters import SLURM_NEEDS, Cluster, simulated_slurm

EXAMPLES = REPOSITORY / "examples" / "slurm"
NUM_PARTS = 3
ENDLESS = 100_000
TWO_GPUS = ("--gpus-per-node=2", "--cpus-per-task=2")
TWO_NODES = ("--nodes=2", *TWO_GPUS)
SHARDED = "memory.shard_base=node"
TIME_LIMIT = ("--time=4", "--signal=B:USR1@60")
"""Minutes, and seconds before their end; SLURM looks twice a minute."""
LOST = "the processes of this run could not reach each other"
_STEP = re.compile(r"^0: \S+ step \d+/", re.MULTILINE)
_LIMIT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class _Jobs:
    """Jobs of a run on a cluster."""

    cluster: Cluster
    run: Run

    def train(self, *settings: str, options: tuple[str, ...] = TWO_NODES) -> str:
        """Submit the script that trains; the number of the job."""
        return self.cluster.submit(*options, str(EXAMPLES / "train.sh"), *self.run.arguments, *settings)

    def log(self, job: str) -> str:
        """What a training job printed."""
        path = self.cluster.root / f"train-{job}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def num_steps(self, job: str) -> int:
        """How many steps a job has logged, in all starts of it."""
        return len(_STEP.findall(self.log(job)))

    def wait_for_steps(self, job: str, num_steps: int) -> None:
        """Wait until a job has logged so many steps."""
        wait_until(lambda: self.num_steps(job) >= num_steps, f"{num_steps} steps of job {job}", _LIMIT_S)

    def wait_until_queued_again(self, job: str) -> None:
        """Wait until SLURM has taken a job back into the queue."""

        def is_queued() -> bool:
            state = self.cluster.shown(job, "JobState")
            assert state in ("PENDING", "RUNNING", "COMPLETING"), self.log(job)
            return self.cluster.shown(job, "Restarts") != "0"

        wait_until(is_queued, f"job {job} in the queue again", _LIMIT_S)

    def start_now(self, job: str) -> None:
        """Start a job that is queued again: SLURM would wait for two minutes."""
        self.cluster.output_of("scontrol", "update", f"JobId={job}", "StartTime=now")

    def ended(self, job: str, state: str) -> str:
        """Wait until a job has ended so; its log, in which each of its nodes says how the run ended."""
        self.cluster.wait_until(job, state, limit_s=_LIMIT_S)
        assert self.cluster.shown(job, "Restarts") == "0"
        return self.log(job)

    def finished(self, *settings: str) -> str:
        """Train on two nodes to the end; the log."""
        log = self.ended(self.train(*settings), "COMPLETED")
        assert {line[0] for line in log.splitlines() if "Finished after" in line} == {"0", "1"}, log
        return log


@fault(
    "N4",
    "after the time limit, and where SLURM misses a node, queued again and continued without anybody, "
    "else not; bit for bit; each node's log says how it ended",
    needs=SLURM_NEEDS,
)
def run_the_examples(bench: Bench) -> str:
    """Examples/slurm under a SLURM of 2 simulated nodes: cache by parts, trained on 1 and 2 nodes, started
    again when finished, the time limit, a step cancelled, processes of a node killed, a node that dies.
    """
    run = bench.images()
    # Steps that take a while: the time limit comes after minutes.
    steady = ("train.micro_batch_size=1", "train.global_batch_size=32", "output.checkpoint_every_steps=4")
    run = run.having(*PLAIN, *steady)
    folder = bench.root / "slurm"
    folder.mkdir()
    with simulated_slurm(folder) as cluster:
        jobs = _Jobs(cluster=cluster, run=run)
        _fill_the_cache(jobs)
        log = jobs.ended(jobs.train("train.steps=4", options=("--nodes=1", *TWO_GPUS)), "COMPLETED")
        assert "Runs in 2 processes" in log, log
        assert "that the cache does not hold" not in log, log
        steps = _reach_the_time_limit(jobs, run.root / "limited")
        log = jobs.finished(f"train.steps={steps + 2}", f"output.dir={run.root / 'limited'}", SHARDED)
        assert f"step-{steps:08d}" in log, log
        whole = f"train.steps={steps + 2}", f"output.dir={run.root / 'whole'}"
        jobs.finished(*whole)
        assert_same(run.root / "whole", run.root / "limited", steps + 2)
        again = jobs.ended(jobs.train(*whole), "COMPLETED")
        assert {line[0] for line in again.splitlines() if "This run is finished" in line} == {"0", "1"}, again
        seconds = _end_early(jobs, run.root / "ended")
        _lose_a_node(jobs, run.root / "lost")
    return (
        f"{NUM_PARTS} parts of a cache, 10 jobs that train, {steps + 2} steps; processes of a node "
        f"killed: its job ended {seconds:.0f} s later"
    )


def _fill_the_cache(jobs: _Jobs) -> None:
    array = f"--array=0-{NUM_PARTS - 1}", "--cpus-per-task=1"
    fill = str(EXAMPLES / "fill.sh")
    job = jobs.cluster.submit(*array, fill, str(NUM_PARTS), *jobs.run.arguments)
    for part in range(NUM_PARTS):
        jobs.cluster.wait_until(f"{job}_{part}", "COMPLETED", limit_s=_LIMIT_S)


def _reach_the_time_limit(jobs: _Jobs, folder: Path) -> int:
    """The step after which a run was stopped, in the job that SLURM started again when the time was up."""
    settings = f"train.steps={ENDLESS}", f"output.dir={folder}", SHARDED
    job = jobs.train(*settings, options=(*TWO_NODES, *TIME_LIMIT))
    jobs.wait_until_queued_again(job)
    status = folder / "status.json"
    saved = json.loads(status.read_text())
    assert saved["state"] == "interrupted", saved
    assert saved["step"] > 0, saved
    jobs.start_now(job)
    jobs.wait_for_steps(job, jobs.num_steps(job) + 2)
    (folder / "STOP").touch()
    jobs.cluster.wait_until(job, "FAILED", limit_s=_LIMIT_S)
    log = jobs.log(job)
    assert f"the time of job {job} is up" in log, log
    assert f"step-{saved['step']:08d}" in log, log
    stopped = re.findall(r"^(\d): .*stopped after step (\d+) of", log, re.MULTILINE)
    step = int(json.loads(status.read_text())["step"])
    assert {(node, int(at)) for node, at in stopped} == {
        (node, at) for node in "01" for at in (saved["step"], step)
    }
    return step


def _end_early(jobs: _Jobs, folder: Path) -> float:
    """End jobs by signals of four kinds; none is queued again.

    Returns:
        Seconds from the moment when the processes of one node are killed until its job has ended.
    """
    settings = f"train.steps={ENDLESS}", f"output.dir={folder}"
    for words, state, is_saved in (
        (("--signal=TERM", "{}"), "FAILED", True),
        (("{}",), "CANCELLED", True),
        (("{}.0",), "FAILED", False),
    ):
        job = jobs.train(*settings)
        jobs.wait_for_steps(job, 2)
        jobs.cluster.output_of("scancel", *(word.format(job) for word in words))
        log = jobs.ended(job, state)
        status = {line[0] for line in log.splitlines() if "stopped after step" in line}
        assert status == ({"0", "1"} if is_saved else set()), log

    job = jobs.train(*settings)
    jobs.wait_for_steps(job, 2)
    jobs.cluster.nodes[1].signal(signal.SIGKILL, "diffsynth_lite.cli.train")
    began_at = time.monotonic()
    log = jobs.ended(job, "FAILED")
    assert [line for line in log.splitlines() if line.startswith("0: ") and LOST in line], log
    return time.monotonic() - began_at


def _lose_a_node(jobs: _Jobs, folder: Path) -> None:
    """All processes of a node end, SLURM's too: SLURM queues the job again, and the run continues."""
    job = jobs.train(f"train.steps={ENDLESS}", f"output.dir={folder}")
    jobs.wait_for_steps(job, 6)
    node = jobs.cluster.nodes[1]
    node.signal(signal.SIGKILL)
    jobs.wait_until_queued_again(job)
    num_steps = jobs.num_steps(job)
    jobs.cluster.start_slurmd(node)
    # A job that began while the node was coming back was given one node, and waited for ever for the other.
    jobs.cluster.wait_until_ready()
    jobs.start_now(job)
    jobs.wait_for_steps(job, num_steps + 1)
    assert "DUE TO NODE FAILURE" in jobs.log(job), jobs.log(job)
    assert "step-00000004" in jobs.log(job), jobs.log(job)
    jobs.cluster.output_of("scancel", job)
