"""How long a launcher waits, told by the environment and the command line of its agent."""

import pytest
from torch.distributed.run import get_args_parser

from diffsynth_lite.cli.processes import grace_can_be_set, grace_period
from diffsynth_lite.training.stopping import GracePeriod

AGENT = {"TORCHELASTIC_RUN_ID": "none"}
SETTING = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
TORCHRUN = ["python", "torchrun", "--nproc_per_node", "2"]


def test_without_an_agent_nothing_is_known() -> None:
    assert grace_period({SETTING: "5"}, [*TORCHRUN, "--shutdown-timeout=5"], can_be_set=True) is None


@pytest.mark.parametrize(
    ("environment", "arguments", "seconds", "setting"),
    [
        ({}, [], 30, SETTING),
        ({SETTING: "120"}, [], 120, SETTING),
        ({SETTING: "120", "PET_SHUTDOWN_TIMEOUT": "60"}, [], 60, "PET_SHUTDOWN_TIMEOUT"),
        ({SETTING: "120"}, ["--shutdown-timeout", "45"], 45, "--shutdown-timeout"),
        ({SETTING: "120"}, ["--shutdown-timeout=45"], 45, "--shutdown-timeout"),
        ({SETTING: "120"}, ["--shutdown_timeout", "45"], 45, "--shutdown-timeout"),
        ({"PET_SHUTDOWN_TIMEOUT": "60"}, ["--shutdown-timeout=45"], 45, "--shutdown-timeout"),
        ({}, ["--shutdown-timeout=45", "--shutdown-timeout=46"], 46, "--shutdown-timeout"),
    ],
)
def test_the_argument_counts_before_the_variables_and_these_before_the_default(
    environment: dict[str, str], arguments: list[str], seconds: float, setting: str
) -> None:
    command = [*TORCHRUN, *arguments, "train.py", "--config", "a.yaml"]
    found = grace_period(AGENT | environment, command, can_be_set=True)
    assert found == GracePeriod(seconds=seconds, setting=setting)


@pytest.mark.parametrize("arguments", [["--shutdown-timeout"], ["--shutdown-timeout="]])
def test_what_is_no_number_is_not_guessed_at(arguments: list[str]) -> None:
    assert grace_period(AGENT, arguments, can_be_set=True) is None
    assert grace_period(AGENT | {SETTING: "a minute"}, [], can_be_set=True) is None


def test_an_agent_that_looks_at_no_setting_waits_as_it_always_did() -> None:
    command = [*TORCHRUN, "--shutdown-timeout=600"]
    found = grace_period(AGENT | {SETTING: "600"}, command, can_be_set=False)
    assert found == GracePeriod(seconds=30, setting=None)


def test_this_torch_says_whether_its_agent_does() -> None:
    assert grace_can_be_set() == ("shutdown-timeout" in get_args_parser().format_help())
