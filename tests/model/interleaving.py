"""Replicators and a reader, in every order: a read returns the journal as of one position, or raises an error."""

from __future__ import annotations

from tests.model.lattice import Lattice
from tests.model.reading import Node, Question, Reading
from tests.model.world import CONFIG, Seen, World
from tidebook.core.segments import event_segment


def violation(lattice: Lattice, world: World, reading: Reading) -> str | None:
    """Return a read whose result the journal never had at or after the read's barrier, or None."""
    visible = [tuple(each for each in truth.seen if reading.start <= each[0] <= reading.to) for truth in world.truth[0]]
    first = (world.empty, reading.first)
    met = {(world.empty, reading.first.number)}
    todo = [first]
    while todo:
        at, node = todo.pop()
        following = [(later, node) for later in lattice.edges[at]]
        steps = {step.number: step for seen in lattice.visible(at) for step in _steps(world, seen, reading, node)}
        for after in steps.values():
            wrong = _wrong(world, at, after, visible)
            if wrong is not None:
                return f"{wrong}; answers {after.answers}"
            if after.question is not None:
                following.append((at, after))
        for each in following:
            name = (each[0], each[1].number)
            if name not in met:
                met.add(name)
                todo.append(each)
    return None


def _steps(world: World, at: int, reading: Reading, node: Node) -> list[Node]:
    question = node.question
    assert question is not None
    store = world.stores[at]
    match question.what:
        case "end":
            # Every position in the store is in the log already; later records may be too.
            least = max(store.top, node.last_barrier, node.seen_offset)
            return [reading.answered(node, end) for end in range(least, world.size)]
        case "pointer":
            return [reading.answered(node, store.pointer)]
        case "head":
            head = store.keys[0].head
            return [reading.answered(node, -1 if head is None else head.head)]
        case "segments":
            listed = tuple(
                sorted(segment for incarnation, segment in world.listed(at, 0) if incarnation == question.incarnation)
            )
            return [reading.answered(node, listed)]
        case _:
            return [reading.answered(node, _page(world, at, question))]


def _page(world: World, at: int, question: Question) -> tuple[int, ...]:
    rows = []
    for cell in world.stores[at].keys[0].rows:
        segment = event_segment(cell.seq_nr, CONFIG.segment_size)
        if question.after < cell.seq_nr <= question.to and (
            segment >= question.run_start or segment in question.listed
        ):
            rows.append(cell.row)
    return tuple(rows[: question.limit])


def _wrong(world: World, at: int, node: Node, visible: list[Seen]) -> str | None:
    if node.end == "truncated" or (node.question is not None and not node.yielded):
        return None
    known = max(world.stores[at].top, node.last_barrier, node.seen_offset)
    journals = visible[node.first_barrier + 1 : known + 2]
    if node.end == "whole":
        if node.yielded not in journals:
            return f"the read returned {node.yielded}; from {node.first_barrier} to {known} the journal was {journals}"
    elif node.end:
        return f"the read failed with {node.end}"
    elif all(journal[: len(node.yielded)] != node.yielded for journal in journals):
        return f"the read has yielded {node.yielded}; from {node.first_barrier} to {known} the journal was {journals}"
    return None
