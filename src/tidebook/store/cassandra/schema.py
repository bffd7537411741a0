"""The tables, as migrations that run once, in order, under a lock. `docs/reference/tables.md` describes the tables."""

from __future__ import annotations

from typing import Final, NamedTuple


class Migration(NamedTuple):
    """One step of the schema. Its statements must be idempotent: they may run twice after a crash."""

    name: str
    statements: tuple[str, ...]


#: Created before a lock can be taken or a version read.
BOOTSTRAP: Final = (
    # One partition per row, because compare-and-sets and serial reads contend within a partition.
    "CREATE TABLE IF NOT EXISTS setting (section text, name text, value text, PRIMARY KEY ((section, name)))",
    "CREATE TABLE IF NOT EXISTS locks (name text PRIMARY KEY, holder text)",
)

#: Stamps come from log positions, so time-window compaction would mix old and new data.
_LEVELED: Final = "compaction = {'class': 'LeveledCompactionStrategy'}"
_TIERED: Final = "compaction = {'class': 'SizeTieredCompactionStrategy'}"
#: Ten days: a replicator that is presumed dead must really be dead before the tombstones of what it could resurrect are
#: dropped.
_GRACE: Final = "gc_grace_seconds = 864000"

MIGRATIONS: Final = (
    Migration(
        "journals",
        (
            "CREATE TABLE IF NOT EXISTS metajournal ("
            "topic text, segment int, id text, head blob, live boolean, seq_nr bigint, delete_to bigint, "
            "epoch int, log_offset bigint, expires_at_ms bigint, "
            f"PRIMARY KEY ((topic, segment), id)) WITH {_LEVELED} AND {_GRACE}",
            "CREATE TABLE IF NOT EXISTS journal ("
            "id text, topic text, segment bigint, seq_nr bigint, event blob, "
            f"PRIMARY KEY ((id, topic, segment), seq_nr)) WITH {_TIERED} AND {_GRACE}",
            "CREATE TABLE IF NOT EXISTS pointer ("
            "topic text, partition int, epoch int, log_offset bigint, time_ms bigint, "
            f"PRIMARY KEY ((topic), partition)) WITH {_LEVELED} AND {_GRACE}",
            "CREATE TABLE IF NOT EXISTS snapshot ("
            "topic text, id text, epoch int, log_offset bigint, seq_nr bigint, "
            "payload_type int, payload blob, timestamp_ms bigint, "
            "PRIMARY KEY ((topic, id), epoch, log_offset, seq_nr)) "
            "WITH CLUSTERING ORDER BY (epoch DESC, log_offset DESC, seq_nr DESC) "
            f"AND {_LEVELED} AND {_GRACE}",
            "CREATE TABLE IF NOT EXISTS parked ("
            "topic text, partition int, epoch int, log_offset bigint, "
            "timestamp_ms bigint, id text, reason text, value blob, "
            f"PRIMARY KEY ((topic, partition), epoch, log_offset)) WITH {_TIERED} AND {_GRACE}",
        ),
    ),
    Migration(
        "tags",
        (
            "CREATE TABLE IF NOT EXISTS tag_views ("
            "tag text, bucket bigint, log_ms bigint, topic text, partition int, log_offset bigint, idx int, epoch int, "
            "event blob, PRIMARY KEY ((tag, bucket), log_ms, topic, partition, log_offset, idx, epoch)) "
            f"WITH {_TIERED} AND {_GRACE}",
            "CREATE TABLE IF NOT EXISTS tag_buckets ("
            f"tag text, bucket bigint, PRIMARY KEY ((tag), bucket)) WITH {_LEVELED} AND {_GRACE}",
        ),
    ),
    Migration(
        "tag progress by head segment",
        (
            # The old table had one partition per journal. Dropping it is safe: nothing is decided from it, and the next
            # event of a journal writes its progress again.
            "DROP TABLE IF EXISTS tag_views_progress",
            # The partitions are those of `metajournal`, so that a write to both is one mutation.
            "CREATE TABLE IF NOT EXISTS tag_views_progress ("
            "topic text, segment int, id text, tag text, tag_seq_nr bigint, seq_nr bigint, epoch int, "
            f"log_offset bigint, PRIMARY KEY ((topic, segment), id, tag)) WITH {_LEVELED} AND {_GRACE}",
        ),
    ),
    Migration(
        "lists of segments",
        (
            # Epoch and offset are the incarnation: an earlier incarnation must not affect the next one.
            "CREATE TABLE IF NOT EXISTS journal_segments ("
            "id text, topic text, epoch int, log_offset bigint, segment bigint, "
            f"PRIMARY KEY ((id, topic, epoch, log_offset), segment)) WITH {_LEVELED} AND {_GRACE}",
        ),
    ),
    Migration(
        "sizes of parked records",
        ("ALTER TABLE parked ADD IF NOT EXISTS size_bytes int",),
    ),
)
