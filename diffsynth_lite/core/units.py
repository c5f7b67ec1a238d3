"""This file puts numbers with units into words."""


def format_bytes(num_bytes: float) -> str:
    """A number of bytes in the binary unit that suits it, such as ``1.5 GiB``."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
