"""Plot of a result: bandwidth by bytes read, and the roofline."""

from pathlib import Path
from typing import Any

from .goals import PADDED

MARKERS = "o^sphvD*x+"
# Sections in the roofline, with the size of their points.
ROOFLINE = {"decode": 22, "others": 60, "extend": 60}


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Write a PNG with the bandwidth by bytes read, and the roofline."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # pyplot would look for a window system, and keep the figure.
    figure = Figure(figsize=(14, 6.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    rows = [row for row in result["rows"] if "failed" not in row and "gb_per_s" in row]
    top = result["ceilings"]
    for place, name in enumerate(dict.fromkeys(row["name"] for row in rows)):
        look = {
            "color": f"C{place % 10}", "marker": MARKERS[(place + place // 10) % len(MARKERS)],
            "label": name,
        }  # fmt: skip
        own = [row for row in rows if row["name"] == name]
        decode = sorted(
            (row["moved"] / 2**20, row["gb_per_s"])
            for row in own
            if row["section"] in ("decode", "other kernels")
        )
        # Rows with padding or without masks lie close to the rows that they vary.
        if decode and not name.endswith((PADDED, " no mask")):
            left.plot(*zip(*decode, strict=True), ":", **look)
        points = [
            (row["flops"] / row["moved"], row["tflops"], ROOFLINE[row["section"]])
            for row in own
            if row["section"] in ROOFLINE and "tflops" in row
        ]
        if points:
            x, y, sizes = zip(*points, strict=True)
            right.scatter(x, y, s=sizes, **look, alpha=0.8)
    for name, style in (("read", "-"), ("copy", "--")):
        if rate := top[f"{name}_gb_per_s"]:
            label = f"{name} bandwidth: {rate:.0f} GB/s"
            left.axhline(rate, color="black", linestyle=style, linewidth=1, label=label)
    if (read := top["read_gb_per_s"]) and (peak := top["matmul_tflops"]):
        ridge, label = 1e3 * peak / read, f"read {read:.0f} GB/s, bf16 matmul {peak:.0f} TFLOP/s"
        rates = [read / 1e3, peak, peak]
        right.plot([1, ridge, 8 * ridge], rates, color="black", linewidth=1, label=label)
    left.set_xscale("log", base=2)
    left.set_ylim(bottom=0)
    left.set(xlabel="MiB of codes and scales that a decode step reads", ylabel="GB/s",
             title="decode: bandwidth reached")  # fmt: skip
    right.set(
        xscale="log", yscale="log", ylabel="TFLOP/s",
        xlabel="arithmetic intensity, FLOP per byte of K and V",
        title="roofline: decode (small), other shapes and extend (large)",
    )  # fmt: skip
    for axes in (left, right):
        axes.grid(visible=True, alpha=0.25)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, loc="lower right")
    device = result["hardware"].get("gpu", result["settings"]["device"])
    dry = "DRY RUN, not a measurement: " if result["settings"]["dry"] else ""
    figure.suptitle(f"{dry}attention to stored tokens, one layer, {device}, {result['date'][:10]}")
    figure.savefig(path, dpi=120)
