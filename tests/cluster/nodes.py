"""The nodes of a Ray cluster, which are processes of this machine, and a tiny run for them."""

from pathlib import Path
from typing import Any

import psutil
from tiny_run import UNWATCHED, TinyRun, make_run


class Nodes:
    """The nodes, each with one processor; the head has none, so that no task runs there."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.nodes = list[Any]()
        self.restore()

    @property
    def address(self) -> str:
        return self.cluster.address

    def restore(self, count: int = 3) -> None:
        """Have so many nodes, whatever was lost; in the main thread, where Ray handles signals."""
        while len(self.nodes) < count:
            self.nodes.append(self.cluster.add_node(num_cpus=1, include_dashboard=False))

    def processes(self, node: Any, words: str) -> list[psutil.Process]:
        """The processes below a node whose command line has some words."""
        raylets = node.all_processes.get("raylet", [])  # none of a node that was lost
        below = [
            child
            for raylet in raylets
            for child in psutil.Process(raylet.process.pid).children(recursive=True)
        ]
        return [process for process in below if words in " ".join(_command(process))]

    def running(self, words: str) -> list[Any]:
        """The nodes with such a process."""
        return [node for node in self.nodes if self.processes(node, words)]

    def lose(self, node: Any) -> None:
        """Take a node away with all that runs on it."""
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # It has ended meanwhile.
        return []


def make_tiny_run(root: Path, model: Path) -> TinyRun:
    """A run whose steps can be shared by two processes, or be taken by one."""
    return make_run(root, model).having(*UNWATCHED, "train.micro_batch_size=1")
