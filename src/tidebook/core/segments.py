"""Assign heads and events to partitions of the store. Both sizes are part of the topic's frozen configuration."""

from __future__ import annotations

from tidebook.core.lowercase import lower


def head_segment(id: str, segments: int) -> int:
    """Return the `metajournal` segment of a journal: abs(JavaHash(lower(id)) % segments), with the frozen `lower`."""
    h = 0
    units = lower(id).encode("utf-16-be")
    for i in range(0, len(units), 2):
        h = (31 * h + (units[i] << 8 | units[i + 1])) & 0xFFFFFFFF
    return abs(h - (1 << 32) if h >= 1 << 31 else h) % segments


def event_segment(seq_nr: int, segment_size: int) -> int:
    """Return the `journal` segment of an event, counted from 0."""
    return (seq_nr - 1) // segment_size
