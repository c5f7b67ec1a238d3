"""The page of a run is renewed for a small part of the run's time, and never ends the run."""

from pathlib import Path

import pytest

from diffsynth_lite.errors import DifferentRunError, RunInterrupted
from diffsynth_lite.report import renewal
from diffsynth_lite.report.renewal import PageRenewal


class Pages:
    """Stands for what writes pages: takes seconds, of a clock that it moves itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, seconds: float, error: Exception | None) -> None:
        self.now, self.written_at = 1000.0, []
        self._seconds, self._error = seconds, error
        monkeypatch.setattr(renewal, "write_report", self._write)

    def renewal(self, *, is_main: bool = True) -> PageRenewal:
        return PageRenewal(Path(), is_main=is_main, clock=lambda: self.now)

    def _write(self, folder: Path) -> None:
        assert folder == Path()
        self.written_at.append(self.now)
        self.now += self._seconds
        if self._error:
            raise self._error


def test_a_page_takes_a_hundredth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(monkeypatch, seconds=0.5, error=None)
    page, began = pages.renewal(), pages.now
    for _ in range(1000):
        pages.now += 1.0
        page.renew()
    assert [at - began for at in pages.written_at[:3]] == [20.0, 70.5, 121.0]
    assert 0.5 * len(pages.written_at) <= 0.01 * (pages.now - began)


def test_a_page_that_costs_nothing_is_renewed_every_20_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(monkeypatch, seconds=0.0, error=None)
    page = pages.renewal()
    for _ in range(61):
        page.renew()
        pages.now += 1.0
    assert pages.written_at == [1020.0, 1040.0, 1060.0]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), TypeError("a bug")])
def test_a_page_that_cannot_be_written_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    pages = Pages(monkeypatch, seconds=0.0, error=error)
    page = pages.renewal()
    with page.concluded():
        for _ in range(3):
            pages.now += 100
            page.renew()
    assert len(pages.written_at) == 4
    [line] = caplog.messages
    assert str(error) in line
    assert bool(caplog.records[0].exc_info) == isinstance(error, TypeError)


def test_a_run_that_fails_has_a_page_and_keeps_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = Pages(monkeypatch, seconds=0.0, error=OSError("no page either"))
    with pytest.raises(RunInterrupted, match="asked to"), pages.renewal().concluded():
        raise RunInterrupted("asked to")
    assert len(pages.written_at) == 1


def test_who_must_not_write_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(monkeypatch, seconds=0.0, error=None)
    with pytest.raises(DifferentRunError), pages.renewal().concluded():
        raise DifferentRunError("other data")
    other_process = pages.renewal(is_main=False)
    with other_process.concluded():
        pages.now += 100
        other_process.renew()
    assert pages.written_at == []


def test_the_page_of_a_run_that_has_ended_is_written_where_it_is_missing_or_old(tmp_path: Path) -> None:
    page, file = PageRenewal(tmp_path, is_main=True), tmp_path / "report.html"
    page.restore()
    written = file.read_text()
    page.restore()
    assert file.read_text() == written
    file.write_text(written.replace("diffsynth_lite", "another", 1))
    page.restore()
    assert "diffsynth_lite" in file.read_text()[:1000]
