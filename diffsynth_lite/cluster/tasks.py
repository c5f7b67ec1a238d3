"""This file has a cluster run many commands, each as a task, and reports how they end."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from diffsynth_lite.cluster.node import Ended, TaskFailedError, run_command

_MOST_PENDING = 1024
"""Tasks that are handed to Ray at once: it holds each, and ``ray.wait`` looks at all of them."""
_RETRIES = 2
"""Of a task that was killed or lost its node."""


def run_tasks(
    ray: Any,
    tasks: Iterable[tuple[str, Sequence[str]]],
    folder: str,
    needs: Mapping[str, float],
    *,
    work: Callable[[str, Sequence[str], str], Ended] = run_command,
) -> Iterator[Ended]:
    """Run commands on a cluster, and yield how each ended, in the order of their ends.

    Ray tries again what was killed, ran out of memory or lost its node, and not what has wrong input.

    Args:
        ray: the module, in a scope of :func:`~diffsynth_lite.cluster.session.connected`.
        tasks: names and commands, the words after the name of the program, with paths that all nodes see;
            in the order in which they are to begin. Only some are taken at a time.
        folder: that they are started in.
        needs: of each, by the names that the cluster gave them.
        work: what a node does with a task: its name, words and folder.
    """
    rest = dict(needs)
    remote = ray.remote(
        num_cpus=rest.pop("CPU"),
        num_gpus=rest.pop("GPU", 0),
        memory=rest.pop("memory", None),
        resources=rest,
        max_retries=_RETRIES,
        retry_exceptions=[TaskFailedError],
    )(work)
    coming, pending = iter(tasks), dict[Any, str]()
    while True:
        for name, words in islice(coming, _MOST_PENDING - len(pending)):
            pending[remote.remote(name, list(words), folder)] = name
        if not pending:
            return
        [done], _ = ray.wait(list(pending))
        yield _ended(ray, done, pending.pop(done))


def _ended(ray: Any, done: Any, name: str) -> Ended:
    try:
        ended: Ended = ray.get(done)
    except ray.exceptions.RayError as error:  # all tries failed, or the node was lost with each of them
        reason = str(getattr(error, "cause", None) or error).strip().partition("\n")[0]
        return Ended(name=name, node="", exit_code=1, last_line=reason)
    return ended
