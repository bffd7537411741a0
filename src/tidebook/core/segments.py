"""How heads and events are spread over the store's partitions. Both counts are facts of a topic, never settings."""

from __future__ import annotations


def head_segment(id: str, segments: int) -> int:
    """The `metajournal` segment of a journal: abs(JavaHash(lower(id)) % segments)."""
    h = 0
    units = id.lower().encode("utf-16-be")
    for i in range(0, len(units), 2):
        h = (31 * h + (units[i] << 8 | units[i + 1])) & 0xFFFFFFFF
    return abs(h - (1 << 32) if h >= 1 << 31 else h) % segments


def event_segment(seq_nr: int, segment_size: int) -> int:
    """The `journal` segment of an event, counted from 0."""
    return (seq_nr - 1) // segment_size
