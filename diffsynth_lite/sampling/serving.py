"""This file answers the requests of another program with one session.

A request has the arguments of ``diffsynth-lite sample`` by their names, such as ``{"id": 1, "prompt": ["a
red star"], "scale": [0, 1]}``.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from diffsynth_lite.config import Config
from diffsynth_lite.errors import UserError
from diffsynth_lite.progress_log import watched
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.sampling.request import SampleArguments, SampleRequest
from diffsynth_lite.sampling.session import SampleSession
from diffsynth_lite.serving import Request, Requests
from diffsynth_lite.training.planning.phases import Phase


class AskedSamples(SampleArguments, Request):
    """A line that came in.

    Attributes:
        ask: "count" for the memory that "generate" would take.
    """

    ask: Literal["generate", "count"] = "generate"
    cancels: bool = False


def serve_samples(
    requests: Requests[AskedSamples],
    config: Config,
    run: RunFolder | None,
    request_of: Callable[[dict[str, Any]], SampleRequest],
    kept: Path | None = None,
) -> None:
    """Answer requests until they end.

    Args:
        config: of the session, as is ``run``.
        request_of: makes a request of its arguments.
        kept: folder of the counts of earlier plans; None is none.
    """
    try:
        opened = SampleSession.open(config, run)
    except UserError as error:
        requests.fail(None, error)
        raise
    with closing(opened) as session:
        requests.answer(None, "ready")
        for asked in requests:
            with requests.answering(asked, outdated="cancelled"), watched(_watcher(requests, asked)):
                given = asked.model_dump(include=set(SampleArguments.model_fields), exclude_none=True)
                state, found = _answer(session, request_of(given), asked, kept)
                requests.answer(asked, state, **found)


def _answer(
    session: SampleSession, request: SampleRequest, asked: AskedSamples, kept: Path | None
) -> tuple[str, dict[str, Any]]:
    if asked.ask == "count":
        return "counted", _counted(session.count_bytes(request, kept), session.device)
    return "done", asdict(session.generate(request))


def _watcher(requests: Requests[AskedSamples], asked: AskedSamples) -> Callable[[str, int, int], None]:
    last, ticks = None, 0

    def watch(phase: str, done: int, total: int) -> None:
        nonlocal last, ticks
        requests.require_wanted()
        ticks = ticks + 1 if last == (phase, done) else 0
        last = phase, done
        requests.answer(asked, "working", phase=phase, done=done, total=total, ticks=ticks)

    return watch


def _counted(needs: Phase, device: torch.device) -> dict[str, int | None]:
    return {
        "device_bytes": needs.device,
        "least_device_bytes": needs.least_device,
        "host_bytes": needs.host,
        "free_device_bytes": torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None,
    }
