"""What may be lost with a connection: told once, for a while, within bounds."""

from __future__ import annotations

from transom.under_way import UnderWay


def test_what_was_sent_to_a_lost_peer_lately_is_told_once() -> None:
    sent = UnderWay(keep_s=60)
    sent.add("p", "old", "g", 0.0)
    sent.add("p", "a", "g", 30.0)
    sent.add("q", "b", "g", 40.0)
    sent.add("p", "c", "h", 50.0)
    assert sent.lost("p", 61.0) == {("a", "g"), ("c", "h")}
    assert sent.lost("p", 61.0) == set()
    assert sent.lost("q", 61.0) == {("b", "g")}


def test_the_oldest_is_forgotten() -> None:
    sent = UnderWay(limit=3)
    for number in range(5):
        sent.add("p", str(number), "g", 0.0)
    assert sent.lost("p", 0.0) == {("2", "g"), ("3", "g"), ("4", "g")}
    for number in range(5):
        sent.add("p", str(number), "g", 0.0)
    assert len(sent.lost("p", 0.0)) == 3
