"""This file ends the processes that read ahead: not before their trainer, and not after it."""

import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from typing import TypeVar

_Batch = TypeVar("_Batch")

_SECONDS_AFTER_SIGTERM = 600


def outlive_stop_signals(worker_id: int) -> None:
    """Stop signals reach a whole process group, and the main process needs its workers to finish its step.

    SIGTERM is also how a stuck worker is ended at exit, so it starts a countdown that ends the worker.
    """
    for name in ("SIGINT", "SIGUSR1"):
        if hasattr(signal, name):  # Windows has no SIGUSR1
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_SECONDS_AFTER_SIGTERM))


def patient_iteration(loader: Iterable[_Batch]) -> Iterator[_Batch]:
    """What a loader yields; once torch gives up on its workers, none of them is left.

    One that hangs in a read does not hear SIGTERM, and the trainer would wait for it at its own exit.

    Raises:
        RuntimeError: torch's; a worker died, or gave nothing for the loader's timeout.
    """
    others = multiprocessing.active_children()
    batches = iter(loader)
    workers = [child for child in multiprocessing.active_children() if child not in others]
    given_up = None
    while given_up is None:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            if not is_lost_worker(error):
                raise
            given_up = str(error)
        else:
            yield batch
    # With the error gone torch forgets its workers here; before that it raises one for each that dies.
    del batches
    for worker in workers:
        worker.kill()
    raise RuntimeError(given_up)


def is_lost_worker(error: RuntimeError) -> bool:
    """Whether torch says that a worker died or hangs, for which it has no class."""
    return str(error).startswith("DataLoader ")
