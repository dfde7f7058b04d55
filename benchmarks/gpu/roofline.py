"""Roofline plot: what was measured, below what the device can do."""

from pathlib import Path
from typing import Any

from .goals import PADDED
from .shapes import KINDS

# name -> color and marker; of any other contender, `_OTHER`
_OTHER = ("#d2691e", "*")
_LOOKS = {
    "e4m3": ("#0b6e4f", "o"),
    "e4m3 static": ("#5cb85c", "^"),
    "e3m4": ("#7b2d8b", "s"),
    "e2m5": ("#a569bd", "p"),
    "int8": ("#2e86c1", "h"),
    "e5m2 static": ("#c49bd1", "v"),
    "bf16 pages": ("#1f4e9c", "D"),
    "sdpa flash": ("#d1495b", "x"),
    "sdpa flash folded": ("#d1495b", "+"),
    "sdpa cudnn": ("#edae49", "x"),
    "sdpa cudnn folded": ("#edae49", "+"),
    "flex": ("#8c564b", "x"),
    "flashinfer xqa bf16": ("#444444", "1"),
    "flashinfer xqa e4m3": ("#444444", "2"),
    "vllm triton bf16": ("#17becf", "1"),
    "vllm triton e4m3": ("#17becf", "2"),
    "sdpa math": ("#999999", "."),
}


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Write a PNG of what `run_gpu_suite` returned: bandwidth by bytes read, and the roofline."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot: no window system is looked for, and no global figure is kept.
    figure = Figure(figsize=(14, 6.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    rows = [row for row in result["rows"] if "failed" not in row and "gb_per_s" in row]
    _bandwidth(left, rows, result["ceilings"])
    _roofline(right, rows, result["ceilings"])
    device = result["hardware"].get("gpu", result["settings"]["device"])
    dry = "DRY RUN, not a measurement: " if result["settings"]["dry"] else ""
    figure.suptitle(
        f"{dry}attention over stored tokens, one layer, on {device}, {result['date'][:10]}"
    )
    figure.savefig(path, dpi=120)


def _looks(rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return the name, color and marker of every contender that has rows."""
    names = {row["name"] for row in rows}
    ordered = [*(name for name in _LOOKS if name in names), *sorted(names - _LOOKS.keys())]
    return [(name, *_LOOKS.get(name, _OTHER)) for name in ordered]


def _bandwidth(axes: Any, rows: list[dict[str, Any]], ceilings: dict[str, Any]) -> None:
    # Rows with padding or without masks are variants of others, in the same place or close to it.
    decode = [
        row
        for row in rows
        if row["section"] in ("decode", "other kernels")
        and not row["name"].endswith((PADDED, " no mask"))
    ]
    for name, color, marker in _looks(decode):
        own = [row for row in decode if row["name"] == name]
        points = sorted((row["moved"] / 2**20, row["gb_per_s"]) for row in own)
        is_ours = name in {kind.name for kind in KINDS}
        axes.plot(
            *zip(*points, strict=True), "-" if is_ours else ":", color=color,
            marker=marker, label=name, linewidth=1, markersize=6, alpha=0.9,
        )  # fmt: skip
    for name, style in (("read", "-"), ("copy", "--")):
        if top := ceilings[f"{name}_gb_per_s"]:
            label = f"{name} bandwidth: {top:.0f} GB/s"
            axes.axhline(top, color="black", linestyle=style, linewidth=1, label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(
        lambda x, _place: f"{x:g} MiB" if x < 1024 else f"{x / 1024:g} GiB"
    )
    xlabel = "K and V that a decode step reads (codes and scales)"
    axes.set(xlabel=xlabel, ylabel="GB/s", title="decode: bandwidth reached")
    _add_grid_and_legend(axes)


def _roofline(axes: Any, rows: list[dict[str, Any]], ceilings: dict[str, Any]) -> None:
    sections = {"decode": 22, "others": 60, "extend": 60}
    drawn = [row for row in rows if row["section"] in sections and "tflops" in row]
    xs = [row["flops"] / row["moved"] for row in drawn]
    for name, color, marker in _looks(drawn):
        points = [
            (row["flops"] / row["moved"], row["tflops"], sections[row["section"]])
            for row in drawn
            if row["name"] == name
        ]
        x, y, sizes = zip(*points, strict=True)
        axes.scatter(x, y, s=sizes, color=color, marker=marker, label=name, alpha=0.8)
    read, peak = ceilings["read_gb_per_s"], ceilings["matmul_tflops"]
    if xs and read and peak:
        low, high = min(xs) / 2, max(*xs, 4e3 * peak / read) * 2
        ridge = 1e3 * peak / read
        label = f"read {read:.0f} GB/s, bf16 matmul {peak:.0f} TFLOP/s"
        rates = [low * read / 1e3, peak, peak]
        axes.plot([low, ridge, high], rates, color="black", linewidth=1, label=label)
    axes.set(
        xscale="log",
        yscale="log",
        ylabel="TFLOP/s",
        xlabel="arithmetic intensity, FLOP per byte of K and V",
        title="roofline: decode (small), other shapes and extend (large)",
    )
    _add_grid_and_legend(axes)


def _add_grid_and_legend(axes: Any) -> None:
    axes.grid(visible=True, alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="lower right")
