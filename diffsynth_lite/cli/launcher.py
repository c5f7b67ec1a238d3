"""This file knows how long a launcher waits for the processes that it stops."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

from diffsynth_lite.cli.processes import argument
from diffsynth_lite.training.stopping import GracePeriod

_DEFAULT_S = 30.0
"""Of torch's elastic agent, which is torchrun and stands in `accelerate launch` with several processes."""
_ARGUMENTS = ("--shutdown-timeout", "--shutdown_timeout")
_VARIABLES = ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
"""The first one stands for the argument, as torchrun has one for each of them."""


def grace_period(
    environment: Mapping[str, str], launcher: Sequence[str], *, can_be_set: bool
) -> GracePeriod | None:
    """What the elastic agent that started this process gives it; None where it was started in another way.

    Args:
        environment: of this process, which has it from the agent.
        launcher: command line of the parent process: the agent tells its arguments to nobody.
        can_be_set: whether the agent of this torch looks at any setting.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    if not can_be_set:
        return GracePeriod(seconds=_DEFAULT_S, setting=None)
    given = argument(launcher, _ARGUMENTS)
    if given is not None:
        return _grace(given, _ARGUMENTS[0])
    for name in _VARIABLES:
        if name in environment:
            return _grace(environment[name], name)
    return GracePeriod(seconds=_DEFAULT_S, setting=_VARIABLES[-1])


def grace_can_be_set() -> bool:
    """Whether torch's elastic agent can be told how long to wait; older ones always wait 30 s."""
    from torch.distributed.launcher.api import LaunchConfig

    return any(field.name == "shutdown_timeout" for field in fields(LaunchConfig))


def _grace(text: str, setting: str) -> GracePeriod | None:
    return GracePeriod(seconds=float(text), setting=setting) if text.strip().isdecimal() else None
