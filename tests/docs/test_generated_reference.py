"""The reference pages of all settings and of the API match the source.

`python -m tests.docs.test_generated_reference` writes them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import pytest

import tidebook
from tidebook.runtime.secret import Secret
from tidebook.wiring.settings import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
#: The section of `tidebook.toml` that each class reads.
SETTINGS = {
    "log": "tidebook.kafka.settings:KafkaSettings",
    "store": "tidebook.store.cassandra.settings:CassandraSettings",
    "journal": "tidebook.journal.settings:JournalSettings",
    "tags": "tidebook.tags.settings:TagSettings",
    "wal": "tidebook.wal.settings:WalSettings",
    "outbox": "tidebook.outbox.settings:OutboxSettings",
    "queue": "tidebook.queue.port:QueueSettings",
    "pipeline": "tidebook.pipeline.session:PipelineSettings",
    "server": "tidebook.server.settings:ServerSettings",
}
NOTES = {
    "log": 'On Kafka, with `url = "kafka://host:9092"`. An embedded log has no options.',
    "store": 'On Cassandra, with `url = "cassandra://host:9042/keyspace"`. An embedded store has no options.',
    "queue": "Of one queue, in a table of its name.",
}
#: Fields that a URL holds.
FROM_URL = {"servers", "hosts", "port", "keyspace"}
#: The names of types in TOML.
TOML_TYPES = {str: "string", Secret: "string", int: "integer", float: "number", bool: "boolean"}
#: Options that a section has besides those of its class: the tables [queue.NAME] are within [queue].
SHARED = {"queue": "tidebook.wiring.queue:QueueOptions"}
#: Sections that are described by hand in the reference: one has only a URL, the other names of topics and fields.
BY_HAND = {"sql", "mask"}
#: The objects that users of the API make or receive, besides the errors.
CLASSES = (
    "tidebook.wiring.book:Book",
    "tidebook.wiring.sync:SyncBook",
    "tidebook.runtime.supervisor:Supervisor",
    "tidebook.runtime.supervisor:RunStatus",
    "tidebook.wiring.running:Health",
    "tidebook.wiring.topics:TopicDescription",
    "tidebook.replication.inline:InlineReplication",
    "tidebook.replication.inline:InlineStatus",
    "tidebook.core.event:Event",
    "tidebook.core.event:ReadEvent",
    "tidebook.journal.journal:Journal",
    "tidebook.journal.outcome:Appended",
    "tidebook.journal.journal:Snapshot",
    "tidebook.core.topic_config:TopicConfig",
    "tidebook.core.position:Position",
    "tidebook.domain.typed_journal:TypedJournal",
    "tidebook.domain.typed_event:TypedEvent",
    "tidebook.domain.decider:Decider",
    "tidebook.domain.decider:Loaded",
    "tidebook.domain.decider:Done",
    "tidebook.domain.projection:Projection",
    "tidebook.domain.projection:ProjectionStatus",
    "tidebook.domain.process:ProcessManager",
    "tidebook.tags.tags:Tags",
    "tidebook.tags.event:TaggedEvent",
    "tidebook.tags.subscription:Subscription",
    "tidebook.tags.horizon:Horizon",
    "tidebook.tags.horizon:HorizonStatus",
    "tidebook.tags.rebuild:Rebuilt",
    "tidebook.core.buckets:Buckets",
    "tidebook.core.buckets:BucketSizeChange",
    "tidebook.wal.wal:Wal",
    "tidebook.wal.region:Region",
    "tidebook.wal.record:WalEntry",
    "tidebook.wal.record:Written",
    "tidebook.wal.meta:Pinned",
    "tidebook.wal.region:Cleaned",
    "tidebook.wal.region:RegionStatus",
    "tidebook.outbox.outbox:Outbox",
    "tidebook.outbox.outbox:AsyncOutbox",
    "tidebook.outbox.message:Message",
    "tidebook.outbox.publish:Backend",
    "tidebook.outbox.publish:TestBackend",
    "tidebook.outbox.relay:Relay",
    "tidebook.wiring.running:OutboxRelay",
    "tidebook.outbox.port:OutboxTopicStatus",
    "tidebook.outbox.port:NoticeCause",
    "tidebook.outbox.port:ParkedMessage",
    "tidebook.outbox.log_topic:LogTopic",
    "tidebook.outbox.log_topic:LogMessage",
    "tidebook.queue.queue:Queue",
    "tidebook.queue.queues:Queues",
    "tidebook.queue.entry:Entry",
    "tidebook.queue.port:Put",
    "tidebook.queue.job:Job",
    "tidebook.queue.worker:Worker",
    "tidebook.queue.retry:Retry",
    "tidebook.queue.port:QueueSettings",
    "tidebook.queue.views:QueueStatus",
    "tidebook.queue.views:EntryView",
    "tidebook.queue.views:DeadLetter",
    "tidebook.queue.views:WorkerView",
    "tidebook.wiring.feed:Feed",
    "tidebook.domain.scenario:Scenario",
    "tidebook.testing.clock:ManualClock",
)
FUNCTIONS = {
    "tidebook": (
        "tidebook.wiring.book:open",
        "tidebook.wiring.sync:open_sync",
        "tidebook.domain.event_type:event_type",
        "tidebook.pipeline.session:spark",
    ),
    "tidebook.outbox": (
        "tidebook.outbox.publish:publish",
        "tidebook.outbox.publish:publish_list",
        "tidebook.outbox.publish:configure",
        "tidebook.outbox.publish:use",
        "tidebook.outbox.publish:create_tables",
    ),
    "tidebook.testing": ("tidebook.domain.scenario:scenario",),
}
#: Classes in signatures that only adapters, the server and the pipeline use: ports, rows of tables, and their parts.
INTERNAL = {
    "tidebook.core.head:Head",
    "tidebook.core.replication_plan:TagPosition",
    "tidebook.core.replication_plan:TagRow",
    "tidebook.domain.decider:HasInitial",
    "tidebook.domain.projection:StoredProjection",
    "tidebook.domain.projection_tables:BuildState",
    "tidebook.log.port:Log",
    "tidebook.queue.browse:BoundBrowser",
    "tidebook.queue.port:Counts",
    "tidebook.queue.port:DeadLetterRow",
    "tidebook.queue.port:LeasedEntry",
    "tidebook.queue.port:QueueRef",
    "tidebook.queue.port:Step",
    "tidebook.queue.port:WaitingEntry",
    "tidebook.queue.port:WorkerReport",
    "tidebook.queue.port:WorkerRow",
    "tidebook.store.port:StoreWriter",
    "tidebook.store.port:StoredSnapshot",
    "tidebook.wal.meta:RegionMeta",
    "tidebook.wal.reading:EntryPage",
    "tidebook.wal.snapshot:RegionSnapshot",
}


def load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@cache
def source_of(module: str) -> tuple[ast.Module, list[str]]:
    text = inspect.getsource(importlib.import_module(module))
    return ast.parse(text), text.splitlines()


def node_of(name: str) -> tuple[Any, list[str]]:
    module, _, attribute = name.partition(":")
    tree, lines = source_of(module)
    named = [node for node in tree.body if getattr(node, "name", None) == attribute]
    return named[-1], lines  # the last one, because overloads come first


def comment_before(line: int, lines: list[str]) -> str:
    """Return the `#:` comment directly above a line."""
    found: list[str] = []
    for text in reversed(lines[: line - 1]):
        if not text.strip().startswith("#:"):
            break
        found.insert(0, text.strip().removeprefix("#:").strip())
    return " ".join(found)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def fields_of(name: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield the name, type, default and comment of each field of a struct."""
    node, lines = node_of(name)
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            default = "" if each.value is None else ast.unparse(each.value)
            yield each.target.id, ast.unparse(each.annotation), default, comment_before(each.lineno, lines)


def toml_type(type_: Any) -> str:
    """Return the values that an option may have, in words."""
    arguments, origin = get_args(type_), get_origin(type_)
    if type_ in TOML_TYPES:
        return TOML_TYPES[type_]
    if origin is Annotated:
        bounds = [f"from {arguments[1].ge:,}" if arguments[1].ge is not None else ""]
        bounds += [f"above {arguments[1].gt:,}" if arguments[1].gt is not None else ""]
        bounds += [f"up to {arguments[1].le:,}" if arguments[1].le is not None else ""]
        return " ".join([toml_type(arguments[0]), *filter(None, bounds)])
    if origin is Literal:
        return ", ".join(f'`"{each}"`' for each in arguments)
    if origin in (Union, UnionType):
        return " or ".join(toml_type(each) for each in arguments if each is not NoneType)
    if origin is tuple:
        return f"array of {toml_type(arguments[0])}s"
    assert origin is dict, type_
    return f"table of {toml_type(arguments[1])}s"


def toml_value(field: Any) -> str:
    """Return the default of an option as it would be written in `tidebook.toml`."""
    if field.name in FROM_URL:
        return "in `url`"
    assert not field.required
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return "none" if default is None else f"`{json.dumps(default)}`"


def settings_table(name: str) -> Iterator[str]:
    comments = {field: comment for field, _, _, comment in fields_of(name)}
    yield from ("| name | value | default | meaning |", "|---|---|---|---|")
    for each in msgspec.structs.fields(load(name)):
        yield f"| `{each.name}` | {cell(toml_type(each.type))} | {toml_value(each)} | {cell(comments[each.name])} |"


def settings_page() -> str:
    parts = [
        "# All settings",
        "",
        "Every option of `tidebook.toml` by section, generated from the classes that read them. How the sections work",
        "together: [Settings](settings.md). `[sql]` has only a `url`; `[mask]` has the names of fields.",
    ]
    for section, name in SETTINGS.items():
        title = section
        if section in SHARED:
            parts += ["", f"## [{section}] options", "", *settings_table(SHARED[section])]
            title = f"{section}.NAME"
        parts += ["", f"## [{title}] options", ""]
        parts += [NOTES[section], ""] if section in NOTES else []
        parts += settings_table(name)
    return "\n".join([*parts, ""])


def first_sentence(node: Any) -> str:
    text = ast.get_docstring(node) or ""
    return " ".join(text.split("\n\n")[0].split())


def signature(node: Any) -> str:
    arguments = ast.unparse(node.args)
    arguments = re.sub(r"^self(, /)?(, )?", "", arguments)
    result = f" → {ast.unparse(node.returns)}" if node.returns is not None else ""
    awaited = "await " if isinstance(node, ast.AsyncFunctionDef) and not yields(node) else ""
    return f"{awaited}{node.name}({arguments}){result}"


def yields(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(node))


def members(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id[0] != "_":
            yield f"- `{each.target.id}: {ast.unparse(each.annotation)}`"
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]).isupper():  # of an enumeration
            yield f"- `{ast.unparse(each)}`"
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) or each.name.startswith("_"):
            continue
        decorators = {ast.unparse(decorator) for decorator in each.decorator_list}
        if "overload" in decorators:
            continue
        shown = (
            f"{each.name}: {ast.unparse(each.returns)}"
            if "property" in decorators and each.returns
            else signature(each)
        )
        yield f"- `{shown}`: {first_sentence(each)}".removesuffix(": ")


def api_page() -> str:
    parts = [
        "# The API, name by name",
        "",
        "Signatures and first sentences, generated from the source. Each page of the reference explains its part in",
        "full; the blocking forms (`tidebook.open_sync`) have the same names without `await`.",
        "",
    ]
    for module, names in FUNCTIONS.items():
        parts += [f"## {module}", ""]
        for name in names:
            node, _ = node_of(name)
            parts.append(f"- `{module}.{signature(node)}`: {first_sentence(node)}")
        if module == "tidebook":
            parts.append("- `tidebook.NEVER`: the `expire_after` that removes an expiry")
        parts.append("")
    parts.pop()
    for name in CLASSES:
        node, _ = node_of(name)
        parts += ["", f"## {node.name}", "", first_sentence(node), "", *members(node)]
    return "\n".join([*parts, ""])


PAGES = {"all-settings.md": settings_page, "api.md": api_page}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_matches_the_source(name: str) -> None:
    assert (REFERENCE / name).read_text() == PAGES[name](), "run: python -m tests.docs.test_generated_reference"


def test_every_section_has_its_class() -> None:
    assert {*SETTINGS} | BY_HAND == {*SECTIONS}
    text = (REFERENCE / "settings.md").read_text()
    assert [each for each in BY_HAND if f"[{each}]" not in text] == []


@pytest.mark.parametrize("section", SETTINGS)
def test_every_option_that_is_read_is_on_the_page(section: str) -> None:
    read = [field.encode_name for field in msgspec.structs.fields(load(SETTINGS[section]))]
    assert [name for name, *_ in fields_of(SETTINGS[section])] == read


@pytest.mark.parametrize("name", [*SETTINGS.values(), *SHARED.values()])
def test_every_option_has_a_meaning(name: str) -> None:
    assert [field for field, _, _, comment in fields_of(name) if not comment] == []


def classes_in_signatures(name: str) -> Iterator[str]:
    """Yield each class of Tidebook that a public member of a class has in its signature or type."""
    module, _, _ = name.partition(":")
    tree, _ = source_of(module)
    known = {each.name: f"{module}:{each.name}" for each in tree.body if isinstance(each, ast.ClassDef)}
    for each in ast.walk(tree):
        if isinstance(each, ast.ImportFrom) and (each.module or "").startswith("tidebook"):
            known |= {alias.asname or alias.name: f"{each.module}:{alias.name}" for alias in each.names}
    for member in node_of(name)[0].body:
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and not member.name.startswith("_"):
            arguments = [*member.args.posonlyargs, *member.args.args, *member.args.kwonlyargs]
            types = [*(each.annotation for each in arguments), member.returns]
        elif isinstance(member, ast.AnnAssign) and not ast.unparse(member.target).startswith("_"):
            types = [member.annotation]
        else:
            continue
        for each in (part for annotation in types if annotation is not None for part in ast.walk(annotation)):
            text = ast.unparse(each) if isinstance(each, ast.Name | ast.Attribute) else ""
            first, _, rest = text.partition(".")
            if first in known:
                found = load(known[first])
                found = getattr(found, rest) if rest else found
                if isinstance(found, type) and found.__module__.startswith("tidebook."):
                    yield f"{found.__module__}:{found.__name__}"


def test_every_class_in_a_signature_is_on_the_page() -> None:
    used = {each for name in CLASSES for each in classes_in_signatures(name)}
    errors = {each for each in used if issubclass(load(each), tidebook.TidebookError)}
    blocking = {each for each in used if each.partition(":")[2].startswith("Sync")}
    missing = used - errors - blocking - {*CLASSES} - INTERNAL
    assert missing == set()
    assert used >= INTERNAL


@pytest.mark.parametrize("module", ["tidebook", "tidebook.queue", "tidebook.outbox", "tidebook.testing"])
def test_every_exported_name_is_on_the_page(module: str) -> None:
    text, found = api_page(), importlib.import_module(module)
    names = [each for each in found.__all__ if not each.startswith("__")]
    errors = {each for each in names if isinstance(getattr(found, each), type)}
    errors = {each for each in errors if issubclass(getattr(found, each), tidebook.TidebookError)}
    missing = [each for each in names if not re.search(rf"^## {each}$|^- `{module}\.{each}\b", text, re.M)]
    assert {*missing} == errors


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_member_is_on_the_page(name: str) -> None:
    text = api_page()
    public = [each for each in vars(load(name)) if not each.startswith("_")]
    assert [each for each in public if not re.search(rf"^- `(await )?{each}\b", text, re.M)] == []


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    names = [each for each in tidebook.__all__ if not each.startswith("__")]
    assert [each for each in names if not re.search(rf"[`.]{each}\b", text)] == []


if __name__ == "__main__":
    for page, make in PAGES.items():
        (REFERENCE / page).write_text(make())
