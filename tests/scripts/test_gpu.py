"""The GPU program keeps what it measured, continues where it was cut off, and writes its tables."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from gpu import prediction
from gpu.report import report_texts, write_report
from gpu.results import Machine, Result, ResultFile
from gpu.stage import Case, Measurement, Stage, run_stage
from gpu.stages import STAGES
from gpu.wheels import Target
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
MACHINE = Machine(device="Some Card", device_gib=24.0, driver="1.2", torch="2.11", num_cores=4, host_gib=32.0)
STEP = {"seconds": 0.5, "spread": [0.4, 0.6], "peak_bytes": 3 * 2**30, "host_bytes": 0, "overlap": None}


def result(stage: Stage, case: str, **fields) -> Result:
    given = {"outcome": "measured", "machine": MACHINE, "commit": "abc", "values": STEP}
    return Result(**{"stage": stage.name, "version": stage.version, "case": case} | given | fields)


def stage_of(cases: Sequence[Case], minutes: float = 1.0) -> Stage:
    return Stage(
        name="example",
        question="Does it work?",
        minutes=minutes,
        cases=lambda _rehearse: cases,
        tables=lambda results: [", ".join(each.case for each in results)],
        modules=(sys.modules[__name__],),
    )


@pytest.fixture
def measurement(tmp_path: Path) -> Callable[..., Measurement]:
    def make(cases: Sequence[Case], retry_before: str = "") -> Measurement:
        return Measurement(
            stage=stage_of(cases),
            results=ResultFile(tmp_path / "results.jsonl"),
            machine=MACHINE,
            rehearse=True,
            commit="abc",
            retry_before=retry_before,
        )

    return make


def fail() -> dict[str, int]:
    raise ValueError("no luck")


def outcomes(measurement: Measurement) -> dict[str, tuple[str, str]]:
    return {each.case: (each.outcome, each.reason) for each in measurement.results.read()}


def test_a_case_that_lacks_a_package_is_too_large_or_fails_is_a_result(measurement, tmp_path: Path) -> None:
    cases = [
        Case(name="lacks", measure=fail, packages=("no_such_package",)),
        Case(name="too large", measure=fail, device_gib=25.0),
        Case(name="works", measure=lambda: {"seconds": 2}),
        Case(name="fails", measure=fail),
    ]
    with pytest.raises(ValueError, match="no luck"):
        measurement(cases).measure_remaining(tmp_path / "at_work")
    assert outcomes(measurement(cases)) == {
        "lacks": ("skipped", "no_such_package not installed"),
        "too large": ("left out", "needs 25 GiB of 24 on the device"),
        "works": ("measured", ""),
        "fails": ("failed", "ValueError: no luck"),
    }
    # All are known then; those that failed or were skipped are tried again by the name of their stage.
    assert measurement(cases).remaining() == []
    assert [case.name for case in measurement(cases, "9999").remaining()] == ["lacks", "fails"]


def test_results_of_other_hardware_and_of_other_code_do_not_count(measurement) -> None:
    cases = [Case(name="works", measure=dict)]
    own = measurement(cases)
    own.results.append(replace(result(own.stage, "works"), machine=replace(MACHINE, device="Another")))
    own.results.append(replace(result(own.stage, "works"), version="older"))
    assert len(own.remaining()) == 1
    # Another driver or torch is the same hardware.
    own.results.append(replace(result(own.stage, "works"), machine=replace(MACHINE, driver="2")))
    assert own.remaining() == []


def test_a_line_that_was_cut_off_is_left_out_and_harms_no_other(measurement) -> None:
    own = measurement([])
    own.results.append(result(own.stage, "first"))
    with own.results.path.open("a") as file:
        file.write('{"stage": "exam')
    assert [each.case for each in own.results.read()] == ["first"]
    own.results.append(result(own.stage, "second"))
    assert [each.case for each in own.results.read()] == ["first", "second"]


CHILD = """
import os, sys, time
case, code, at_work = sys.argv[1:]
open(at_work, "w").write(case)
code == "hang" and time.sleep(60)
os._exit(int(code))
"""


@pytest.mark.parametrize(
    ("code", "minutes", "expected"),
    [
        ("9", 1.0, {"a": ("failed", "its process ended with 9; see log.log")}),
        ("hang", 1 / 60, {"a": ("failed", "not done after 1 s")}),
    ],
)
def test_a_process_that_dies_or_takes_all_the_time_has_failed_its_case(
    tmp_path: Path, measurement, code: str, minutes: float, expected
) -> None:
    own = measurement([Case(name="a", measure=fail)])
    own = replace(own, stage=stage_of(own.stage.cases(True), minutes))
    command = [sys.executable, "-c", CHILD, "a", code]
    run_stage(own, command, tmp_path / "log.log")
    assert outcomes(own) == expected


def test_a_stage_has_another_version_where_its_code_differs_and_not_where_its_words_do(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    versions = []
    for number, text in enumerate(('"""One."""\nX = 1', '"""Two."""\n# Why.\nX = 1', "X = 2")):
        (tmp_path / f"measured_{number}.py").write_text(text)
        module = importlib.import_module(f"measured_{number}")
        versions.append(replace(stage_of([]), modules=(module,)).version)
    assert versions[0] == versions[1] != versions[2]


def test_every_stage_takes_less_than_nine_minutes_and_all_less_than_45() -> None:
    assert max(stage.minutes for stage in STAGES) < 9
    assert sum(stage.minutes for stage in STAGES) < 45


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_stage_has_cases_of_distinct_names_for_a_gpu_and_for_a_rehearsal(stage: Stage) -> None:
    for rehearse in (False, True):
        names = [case.name for case in stage.cases(rehearse)]
        assert names
        assert len(set(names)) == len(names)


def test_readme_and_docs_have_the_tables_of_the_results(tmp_path: Path) -> None:
    results = ResultFile(ROOT / "scripts" / "gpu" / "results.jsonl").read()
    files = {file for file, _ in report_texts(results)}
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text((ROOT / file).read_text())
    write_report(results, tmp_path)
    for file in files:
        assert (tmp_path / file).read_text() == (ROOT / file).read_text(), "bash scripts/gpu/run.sh --report"


def test_the_report_names_hardware_commit_and_what_was_not_measured() -> None:
    stages = {stage.name: stage for stage in STAGES}
    results = [
        result(stages["upstream"], "none"),
        result(stages["upstream"], "every block", outcome="failed", reason="out of memory", values={}),
        result(stages["upstream"], "every 2nd", version="older"),
    ]
    text = report_texts(results)["README.md", "tables"]
    assert "| none | 2.000 | 3.2 | 1.680, 26.7 |" in text
    assert "Some Card, 24 GiB, driver 1.2, torch 2.11, 4 cores, 32 GiB of host memory; commit abc" in text
    assert "every block (failed: out of memory)" in text
    assert "every 2nd" not in text
    assert "Measured on Some Card, 24 GiB" in report_texts(results)["README.md", "summary"]


def test_rates_are_fitted_exactly_where_steps_follow_them() -> None:
    rows = [
        {"tflop": tflop, "moved_tb": moved, "seconds": 0.002 * tflop + 0.5 * moved}
        for tflop, moved in ((100, 0.1), (50, 1.0), (400, 0.2))
    ]
    assert prediction.fit_rates(rows) == pytest.approx((0.002, 0.5))


@pytest.mark.parametrize("text", [None, "{", "[]", '{"installed": [{}], "environment": {}}'])
def test_a_file_that_pip_did_not_print_is_refused_by_name(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "machine.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=r"machine\.json: is not what `python -m pip inspect` prints"):
        Target.described_in(file)


def test_what_a_machine_lacks_follows_from_what_it_describes(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    installed = [{"metadata": {"name": "Safetensors", "version": "0.8.0"}}]
    environment = {"python_version": "3.12", "platform_machine": "x86_64", "sys_platform": "linux"}
    file.write_text(json.dumps({"environment": environment, "installed": installed}))
    target = Target.described_in(file)
    lacks = {
        text: target.lacks(Requirement(text))
        for text in ("safetensors>=0.4", "safetensors>=0.9", "av", 'colorama; sys_platform == "win32"')
    }
    assert lacks == {
        "safetensors>=0.4": False,
        "safetensors>=0.9": True,
        "av": True,
        'colorama; sys_platform == "win32"': False,
    }


@pytest.mark.nightly
def test_a_rehearsal_that_is_cut_off_keeps_what_it_measured_and_the_next_start_does_the_rest(
    tmp_path: Path,
) -> None:
    file = ResultFile(tmp_path / "results.jsonl")
    environment = os.environ | {"PYTHON": sys.executable}
    command = ["bash", str(ROOT / "scripts" / "gpu" / "run.sh"), "--rehearse", "--results", str(file.path)]
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        while len(file.read()) < 7 and process.poll() is None:  # in the second stage
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    before = [result.case for result in file.read()]
    subprocess.run(command, env=environment, check=True)
    after = file.read()
    assert [result.case for result in after][: len(before)] == before
    expected = [(stage.name, case.name) for stage in STAGES for case in stage.cases(True)]
    assert [(result.stage, result.case) for result in after] == expected
    assert {result.outcome for result in after} == {"measured"}
