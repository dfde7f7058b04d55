"""Format sizes for the terminal."""

from rich.filesize import pick_unit_and_suffix


def format_size(size: float) -> str:
    """Return a number of bytes with a binary unit."""
    unit, suffix = pick_unit_and_suffix(int(size), ["B", "KiB", "MiB", "GiB"], 1024)
    return f"{size / unit:.{2 * (unit > 1)}f} {suffix}"
