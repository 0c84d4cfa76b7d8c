"""The worked example of docs/engine.md: drawn anew by the engine, and compared with the page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transom.kernels.native_ops import NativeOps
from transom.llm.model.fused import fused
from transom.llm.radix.node import Node
from transom.llm.worker import LlmStage

Make = Callable[..., Any]

PAGE, CHUNK, TURN_END = 2, 8, 94
DOC = Path(__file__).parents[3] / "docs" / "engine.md"
SYSTEM = [10, 11, 12, 13, 14, TURN_END]


def test_the_drawings_are_what_the_engine_does(make_model: Make, make_harness: Make) -> None:
    """What an unfinished prompt has moved past is a tombstone, and drawn as such."""
    model = make_model(sliding_window=3)
    assert model.config.layers[1].window == 4
    harness = make_harness(
        model, full=20, swa=16, page_size=PAGE, batch_tokens=CHUNK, cached=True, answers=True, margin=2 * PAGE
    )
    text = DOC.read_text(encoding="utf-8")

    def check(title: str) -> None:
        drawing = draw(harness)
        assert f"```\n{title}\n\n{drawing}\n```" in text, f"{title}\n\n{drawing}"

    harness.submit("A", [*SYSTEM, *range(20, 37)], hands_off=True)
    for step in range(3):
        harness.engine.step()
        if step:
            check(f"after step {step + 1}")
    harness.submit("B", [*SYSTEM, 30, 31, 32], hands_off=True)
    harness.engine.step()
    check("after B")
    assert harness.engine.load()["computed_tokens"] == 23 + 3
    assert harness.prefilled["A"].return_from == 22


def draw(harness: Any) -> str:
    """Show the tree: a bar between nodes, a dot for pages without SWA slots, further children below."""
    swa_of = harness.pools.swa_of
    (root,) = harness.cache._tree.roots.values()
    blocks: list[str] = []

    def block(node: Node, indent: int) -> None:
        rows = ["positions ", "full page ", "SWA page  "]
        rows = [row + " " * indent for row in rows]
        later: list[tuple[Node, int]] = []
        while True:
            for page, at in zip(node.pages.tolist(), range(node.start, node.end, PAGE), strict=True):
                cells = f"{at}-{at + PAGE - 1}", str(page), str(swa_of[page] or ".")
                rows = [f"{row}{cell:>6}" for row, cell in zip(rows, cells, strict=True)]
            children = list(node.children.values())
            later += [(child, len(rows[0]) - len("positions ") + 2) for child in children[1:]]
            if not children:
                break
            rows = [f"{row} |" for row in rows]
            node = children[0]
        blocks.append("\n".join(rows))
        for child, at in later:
            block(child, at)

    block(next(iter(root.children.values())), 0)
    return "\n\n".join(blocks)


def test_every_figure_is_explained(make_model: Make, make_harness: Make, native_ops: NativeOps) -> None:
    """What an engine tells as its load stands in the table of metrics, counters with their ending."""
    model = fused(make_model(), native_ops)
    load = make_harness(model, cached=True, padded=4).engine.load()
    table = DOC.read_text(encoding="utf-8").split("\n## Metrics\n")[1]
    shown = {name: LlmStage.labelled[name].name if name in LlmStage.labelled else name for name in load}
    names = {shown[name] + "_total" * (name in LlmStage.totals) for name in load}
    assert {"graph_steps_total", "pool_used_slots"} <= names
    assert not {name for name in names if f"`{name}`" not in table}
