"""Picture of the README: bytes per token and KL of each cache, from the cards in the repository.

python -m benchmarks.overview docs/images/overview.png
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

CARDS = Path(__file__).parents[1] / "docs" / "benchmarks" / "cards"
# Colors that the color-blind can tell apart (Okabe and Ito).
COLORS = ("#0072b2", "#009e73", "#d55e00")


def draw(cards: list[dict[str, Any]]) -> Figure:
    """Return bars of bytes relative to bfloat16, and of the divergence at the last position."""
    titles = {name: of["title"] for card in cards for name, of in card["caches"].items()}
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    memory, quality = figure.subplots(1, 2, sharey=True)
    height = 0.8 / len(cards)
    for number, card in enumerate(cards):
        for row, name in enumerate(titles):
            if (cache := card["caches"].get(name)) is None:
                continue
            place = row + (number - (len(cards) - 1) / 2) * height
            far = [of for of in cache["predictions"] if of["kind"] == "all"][-1]
            label = card["settings"]["model"].partition(" ")[0] if row == 0 else None
            share = cache["bytes_per_token"] / card["bf16_bytes_per_token"]
            memory.barh(place, share, height, color=COLORS[number], label=label)
            quality.barh(place, 1e3 * far["kl"], height, color=COLORS[number])
    memory.set_yticks(range(len(titles)), [*titles.values()])
    memory.invert_yaxis()
    memory.set_xlabel("bytes per token, relative to bfloat16")
    position = cards[0]["settings"]["positions"][-1]
    quality.set_xlabel(f"mean KL at {position:,} tokens, 1e-3")
    quality.set_xscale("log")
    for axes in (memory, quality):
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=len(cards), frameon=False)
    return figure


if __name__ == "__main__":
    draw([json.loads(path.read_text()) for path in sorted(CARDS.glob("*.json"))]).savefig(
        sys.argv[1], dpi=100
    )
