"""Clips slower than asked for: the doctor counts the frames that they repeat."""

import pytest
from messy_data import Workplace, advice_with, scene

from diffsynth_lite.data.video import write_video
from diffsynth_lite.doctor.examination import Examination, examine


def examined(workplace: Workplace, *, file_fps: int, wanted_fps: float, num_frames: int) -> Examination:
    """A clip of 3 seconds, of which so many frames are taken at another rate."""
    (workplace.root / "clips").mkdir()
    frames = [scene(frame, (64, 48)) for frame in range(3 * file_fps)]
    write_video(workplace.root / "clips/slow.mp4", frames, fps=file_fps)
    (workplace.root / "clips/slow.txt").write_text("a clip")
    config = workplace.config(
        *(f"data.path={workplace.root}/clips", f"data.frame_counts=[{num_frames}]", "data.resolutions=[48]"),
        *(f"data.fps={wanted_fps}", "train.micro_batch_size=1"),
        family="wan",
    )
    return examine(config, sheet_size=5)


def num_repeats(examination: Examination) -> int:
    """As they are decoded."""
    [item] = examination.data[0].items
    shown = [frame.tobytes() for frame in item.load().frames]
    return len(shown) - len(set(shown))


@pytest.mark.parametrize(("file_fps", "repeats"), [(10, 8), (8, 10), (15, 4), (19, 1)])
def test_frames_that_repeat_are_counted_as_they_are_decoded(
    workplace: Workplace, file_fps: int, repeats: int
) -> None:
    examination = examined(workplace, file_fps=file_fps, wanted_fps=20, num_frames=17)
    assert num_repeats(examination) == repeats
    remark = f"{repeats} of 17 frames are repeats: it has {file_fps} a second"
    [entry] = examination.findings.sheet
    assert entry.remarks == [remark]
    assert "slow.mp4" in advice_with(examination.findings, remark)


@pytest.mark.parametrize(("wanted_fps", "num_frames", "repeats"), [(20, 17, 0), (10, 17, 0), (20.5, 41, 1)])
def test_one_frame_in_many_is_no_matter(
    workplace: Workplace, wanted_fps: float, num_frames: int, repeats: int
) -> None:
    examination = examined(workplace, file_fps=20, wanted_fps=wanted_fps, num_frames=num_frames)
    assert num_repeats(examination) == repeats
    assert examination.findings.sheet[0].remarks == []
    assert examination.findings.advice == []
