"""Numbers with units, in words."""

from diffsynth_lite.core.units import format_bytes


def test_bytes_are_written_in_the_unit_that_suits_them() -> None:
    sizes = (0, 512, 3 * 2**20, 1.5 * 2**30, 2048 * 2**30)
    assert [format_bytes(size) for size in sizes] == [
        "0 bytes",
        "512 bytes",
        "3.0 MiB",
        "1.5 GiB",
        "2048.0 GiB",
    ]
