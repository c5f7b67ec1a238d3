"""This file checks sizes and frame counts, and names the nearest that would do."""

from diffsynth_lite.errors import UserError


def require_divisible(width: int, height: int, divisor: int, *, keys: str) -> None:
    """Check that both sides of a picture are multiples of ``divisor``.

    Raises:
        UserError: naming ``keys`` and the nearest size that would do.
    """
    if width % divisor or height % divisor:
        fit = [max(divisor, round(side / divisor) * divisor) for side in (width, height)]
        raise UserError(
            f"{keys}: {width}x{height} is not divisible by {divisor}; the nearest size is {fit[0]}x{fit[1]}"
        )


def require_frames(num_frames: int, frame_step: int | None, *, key: str) -> None:
    """Check that a number of frames is k * ``frame_step`` + 1, or 1 where that is None.

    Raises:
        UserError: naming ``key`` and the nearest numbers that would do.
    """
    if frame_step is None:
        if num_frames != 1:
            raise UserError(f"{key}: {num_frames} frames; this family makes pictures, of 1 frame")
        return
    steps, rest = divmod(num_frames - 1, frame_step)
    if num_frames < 1 or rest:
        fit = [max(0, steps + extra) * frame_step + 1 for extra in (0, 1)]
        raise UserError(
            f"{key}: {num_frames} frames; this family needs {frame_step} k + 1, such as "
            f"{' or '.join(map(str, fit))}"
        )
