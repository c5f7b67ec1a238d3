"""N2 and N3: runs on two simulated nodes, whose folders are shared or their own, and nodes that fail."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from faults.bench import PLAIN, Bench, Run, assert_same, fault, wait_for_steps, wait_until
from faults.nodes import NEEDS, PORT, Node, two_nodes

TORCHRUN = "torch.distributed.run"
STEPS = 60
STEP_TIMEOUT_S = 15.0
"""More than a step of four tiny processes takes on a busy machine."""
GONE_WITHIN_S = 45.0
"""After one node has failed, or the time of a step is over: torchrun gives its processes 30 s."""
_LIMIT_S = 600.0
_EXIT_CODE = re.compile(r"exitcode +: (-?\d+)")
"""Of a trainer, in the report of its launcher, which ends with -15 those that have not yet left."""


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """A launcher on each node, with what it and its trainers print; not every node need have one."""

    nodes: Sequence[Node]
    launchers: Sequence["subprocess.Popen[bytes]"]
    logs: Sequence[Path]

    def printed(self) -> list[str]:
        return [log.read_text(errors="replace") for log in self.logs]

    def __str__(self) -> str:
        return "\n".join(self.printed())

    def codes(self, *, within_s: float = _LIMIT_S) -> list[int]:
        """The exit codes of the launchers, after whose end no process of the run is left."""
        wait_until(lambda: None not in [one.poll() for one in self.launchers], str(self), within_s)
        wait_until(lambda: not any(node.processes() for node in self.nodes), "the end of all", within_s)
        return [launcher.returncode for launcher in self.launchers]

    def assert_logged(self, words: str) -> None:
        """It is in the log of each node."""
        for printed in self.printed():
            assert words in printed, printed

    def assert_refused(self, words: str) -> None:
        """The trainers of all nodes ended with exit code 2, and the log of each node says why."""
        assert set(self.codes()) == {1}
        self.assert_logged(words)
        for printed in self.printed():
            assert set(_EXIT_CODE.findall(printed)) - {"-15"} == {"2"}, printed


@dataclass(frozen=True, kw_only=True)
class _Setup:
    """A run that is started on nodes, and its folder there: the same path on each."""

    run: Run
    nodes: tuple[Node, Node]
    disk: Path

    @property
    def folder(self) -> Path:
        return self.disk / "run"

    def start(
        self, *settings: str, nodes: Sequence[Node] | None = None, rendezvous: str = "", late_s: float = 0.0
    ) -> _Launch:
        """Start the run on some nodes, or on both, the second one so much later."""
        started: list[subprocess.Popen[bytes]] = []
        logs = []
        chosen = self.nodes if nodes is None else nodes
        for node in chosen:
            time.sleep(late_s if started else 0)
            logs.append(self.run.root / f"{node.name} {time.monotonic()}")
            started.append(node.start(self._command(settings, rendezvous), logs[-1]))
        return _Launch(nodes=chosen, launchers=started, logs=logs)

    def finish(self, *settings: str, late_s: float = 0.0) -> _Launch:
        """Start the run on both nodes, where it ends well."""
        launch = self.start(*settings, late_s=late_s)
        assert launch.codes() == [0, 0], str(launch)
        return launch

    def start_and_wait(self, *settings: str, after: int) -> _Launch:
        """Start the run on both nodes, and wait until it has taken a step."""
        launch = self.start(*settings)
        wait_for_steps(self.folder, after)
        return launch

    def _command(self, settings: Sequence[str], rendezvous: str) -> tuple[str, ...]:
        return (
            *(sys.executable, "-m", TORCHRUN, "--nnodes", "2", "--nproc_per_node", "2", "--rdzv_id", "run"),
            *("--rdzv_backend", "c10d", "--rdzv_endpoint", f"{self.nodes[0].name}:{PORT}"),
            *(("--rdzv_conf", rendezvous) if rendezvous else ()),
            *("train.py", *self.run.arguments, f"data.cache_dir={self.disk / 'cache'}"),
            *(f"output.dir={self.folder}", *settings),
        )


def _set_up(bench: Bench, nodes: tuple[Node, Node], name: str, *settings: str) -> _Setup:
    run = bench.images(name=name)
    run = run.having(*PLAIN, "train.micro_batch_size=1", f"train.steps={STEPS}")
    disk = run.root / "disk"
    disk.mkdir()
    return _Setup(run=run.having(*settings), nodes=nodes, disk=disk)


@fault(
    "N2",
    "equal bit for bit; what is refused is on both, exit code 2; each node's log says how it ended",
    needs=NEEDS,
)
def run_on_two_nodes(bench: Bench) -> str:
    """2 simulated nodes of 2 processes by torchrun, with shared folders and with own ones under one path:
    started, started again when finished, stopped by SIGTERM, continued with one node late; settings that
    differ, a node whose disk is read-only, a first node without the run that the second has.
    """
    late_s = bench.pick(5.0, 30.0, 30.0)
    with two_nodes(bench.root) as nodes:
        shared = _set_up(bench, nodes, "shared")
        shared.finish().assert_logged(f"Finished after {STEPS} steps")
        shared.finish().assert_logged(f"This run is finished (step {STEPS})")

        own = _set_up(bench, nodes, "own")
        disks = [own.run.root / node.name for node in nodes]
        for node, disk in zip(nodes, disks, strict=True):
            disk.mkdir()
            node.mount(disk, own.disk)
        first = replace(own, disk=disks[0])  # as this machine finds it
        launch = own.start()
        wait_for_steps(first.folder, 5)
        for node in nodes:
            node.signal(signal.SIGTERM, TORCHRUN)
        assert launch.codes() == [1, 1]
        launch.assert_logged("saved; the same command continues it")
        status = json.loads((first.folder / "status.json").read_text())
        assert status["state"] == "interrupted", status
        assert 5 <= status["step"] < STEPS, status
        launch = own.finish(late_s=late_s)
        assert f"step-{status['step']:08d}" in launch.printed()[0], str(launch)
        launch.assert_logged(f"Finished after {STEPS} steps")
        own.finish().assert_logged(f"This run is finished (step {STEPS})")
        assert_same(shared.folder, first.folder, STEPS)
        assert not (disks[1] / "run").exists()

        _refuse_on_both(own, nodes, disks)
    return f"5 starts, stopped after step {status['step']} and continued {late_s:.0f} s late; 4 refused"


def _refuse_on_both(own: _Setup, nodes: tuple[Node, Node], disks: Sequence[Path]) -> None:
    """What one node cannot do is refused on both: settings of its own, a full disk, no run."""
    one, other = (own.start("train.seed=1", nodes=nodes[:1]), own.start("train.seed=2", nodes=nodes[1:]))
    both = _Launch(nodes=nodes, launchers=[*one.launchers, *other.launchers], logs=[*one.logs, *other.logs])
    both.assert_refused("train.seed is 1 on process 0, 1 (node-a), 2 on process 2, 3 (node-b)")
    for node, words in ((nodes[1], "node-b: "), (nodes[0], "")):
        disk = disks[nodes.index(node)]
        node.mount(disk, own.disk, read_only=True)
        launch = own.start("data.width=48", "output.dir=" + str(own.disk / "another"))
        assert launch.codes() == [1, 1]
        launch.assert_logged("Read-only file system")
        assert words in launch.printed()[0]
        node.unmount(own.disk)
    for node, disk in zip(nodes, reversed(disks), strict=True):
        node.mount(disk, own.disk)
    own.start().assert_refused(f"has a checkpoint of step {STEPS} in its own")


@fault(
    "N3",
    "all trainers gone within the time-outs, each node's log says what happened; continued bit for bit",
    needs=NEEDS,
)
def fail_on_two_nodes(bench: Bench) -> str:
    """A simulated node never comes; its processes are killed; its network is cut."""
    seconds = {}
    with two_nodes(bench.root) as nodes:
        whole = _set_up(bench, nodes, "whole")
        whole.finish()
        failing = _set_up(bench, nodes, "failing", "output.checkpoint_every_steps=5")
        for name, node, rendezvous, error in (
            ("the second never comes", nodes[0], "join_timeout=5", "RendezvousTimeoutError"),
            ("the first never comes", nodes[1], "read_timeout=5", "RendezvousConnectionError"),
        ):
            started_at = time.monotonic()
            launch = failing.start(nodes=[node], rendezvous=rendezvous)
            assert launch.codes() == [1], str(launch)
            launch.assert_logged(error)
            seconds[name] = time.monotonic() - started_at
            assert not failing.folder.exists()
        for name, killed, left in (("the second killed", 1, 0), ("the first killed", 0, 1)):
            launch = failing.start_and_wait(after=7)
            nodes[killed].signal(signal.SIGKILL)
            seconds[name] = _ended(launch, left=[left], within_s=GONE_WITHIN_S)
            failing.finish()
            assert_same(whole.folder, failing.folder, STEPS)
            shutil.rmtree(failing.folder)
        # Not in a save: while one process does something that may take long, the others wait longer.
        steps = f"train.step_timeout_minutes={STEP_TIMEOUT_S / 60}", "output.checkpoint_every_steps=20"
        launch = failing.start_and_wait(*steps, after=23)
        nodes[1].cut()
        began_at = time.monotonic()
        limit_s = STEP_TIMEOUT_S + GONE_WITHIN_S
        wait_until(lambda: not any(map(_trainers, nodes)), str(launch), limit_s)
        seconds["cut off"] = time.monotonic() - began_at
        nodes[1].join()  # The launcher that lost the store waits for an answer as long as the kernel does.
        _ended(launch, left=[0, 1], within_s=_LIMIT_S)
        failing.finish()
        assert_same(whole.folder, failing.folder, STEPS)
    return "; ".join(f"{name}: all gone after {took:.0f} s" for name, took in seconds.items())


def _trainers(node: Node) -> set[int]:
    return set(node.processes("train.py")) - set(node.processes(TORCHRUN))


def _ended(launch: _Launch, *, left: Sequence[int], within_s: float) -> float:
    """Seconds until all processes are gone; the logs of the nodes that were left say what happened."""
    began_at = time.monotonic()
    launch.codes(within_s=within_s)
    for place in left:
        printed = launch.printed()[place]
        assert "the processes of this run could not reach each other" in printed, printed
        assert "continues the run from its newest checkpoint" in printed, printed
    return time.monotonic() - began_at
