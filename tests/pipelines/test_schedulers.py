"""Which samplers are taken for those of flow matching."""

from typing import Any

import pytest
from diffusers import (
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)

from diffsynth_lite.pipelines.base.samplers import matches_flows

FLOWS = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


@pytest.mark.parametrize(
    ("scheduler_class", "settings", "expected"),
    [
        (FlowMatchEulerDiscreteScheduler, {}, True),
        (UniPCMultistepScheduler, FLOWS, True),
        (DPMSolverMultistepScheduler, FLOWS, True),
        (UniPCMultistepScheduler, {}, False),
        (EulerDiscreteScheduler, {}, False),
        (EulerDiscreteScheduler, {"prediction_type": "v_prediction"}, False),
    ],
)
def test_a_sampler_matches_flows_where_its_class_does_or_is_told_to(
    scheduler_class: Any, settings: dict[str, Any], expected: bool
) -> None:
    assert matches_flows(scheduler_class.from_config(settings)) is expected


def test_a_setting_that_the_class_does_not_take_says_nothing() -> None:
    left_from_another = EulerDiscreteScheduler().config | {"prediction_type": "epsilon"}
    assert matches_flows(FlowMatchEulerDiscreteScheduler.from_config(left_from_another))
