"""The outbox's tables on MariaDB 10.6 and MySQL 8, and later."""

from __future__ import annotations

from tidebook.outbox.port import ORDER_SLOTS

_TOPIC = "VARCHAR(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL"

# Clustered by (topic, id): a batch is one range of the clustered index.
_MESSAGES = f"""\
CREATE TABLE IF NOT EXISTS kafka_messages (
    id BIGINT NOT NULL AUTO_INCREMENT,
    topic {_TOPIC},
    `key` MEDIUMBLOB,
    partition_key MEDIUMBLOB,
    payload LONGBLOB,
    headers MEDIUMBLOB,
    tries SMALLINT NOT NULL DEFAULT 0,
    created_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (topic, id),
    KEY kafka_messages_id (id)
) ENGINE=InnoDB"""

_TOPIC_INFO = f"""\
CREATE TABLE IF NOT EXISTS kafka_topic_info (
    topic {_TOPIC} PRIMARY KEY,
    locked_by BINARY(16),
    locked_at DATETIME(6),
    owner VARCHAR(200),
    previous_owner VARCHAR(200),
    error SMALLINT NOT NULL DEFAULT 0,
    retries INT NOT NULL DEFAULT 0,
    retry_at DATETIME(6),
    reason TEXT,
    session_id BINARY(16),
    session_ids MEDIUMBLOB,
    session_at DATETIME(6),
    session_fence VARCHAR(20),
    topic_uuid VARCHAR(60),
    rewinds BIGINT NOT NULL DEFAULT 0,
    notice_cause VARCHAR(20),
    notice TEXT,
    notice_at DATETIME(6),
    relayed BIGINT NOT NULL DEFAULT 0,
    minute BIGINT NOT NULL DEFAULT 0,
    minute_relayed BIGINT NOT NULL DEFAULT 0,
    minute_before BIGINT NOT NULL DEFAULT 0
) ENGINE=InnoDB CHARACTER SET utf8mb4"""

_TOPIC_OFFSET = f"""\
CREATE TABLE IF NOT EXISTS kafka_topic_offset (
    topic {_TOPIC},
    `partition` INT NOT NULL,
    scan_from BIGINT NOT NULL,
    PRIMARY KEY (topic, `partition`)
) ENGINE=InnoDB"""

_PARKED = f"""\
CREATE TABLE IF NOT EXISTS kafka_parked (
    topic {_TOPIC},
    id BIGINT NOT NULL,
    state SMALLINT NOT NULL,
    order_key MEDIUMBLOB,
    `key` MEDIUMBLOB,
    partition_key MEDIUMBLOB,
    payload LONGBLOB,
    headers MEDIUMBLOB,
    tries SMALLINT NOT NULL,
    created_at DATETIME(6) NOT NULL,
    parked_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    retry_at DATETIME(6),
    reason TEXT NOT NULL,
    PRIMARY KEY (topic, id),
    KEY kafka_parked_state (topic, state, id),
    KEY kafka_parked_due (state, retry_at)
) ENGINE=InnoDB CHARACTER SET utf8mb4"""

_SLOTS = ", ".join(f"({slot})" for slot in range(ORDER_SLOTS))

STATEMENTS = (
    _MESSAGES,
    _TOPIC_INFO,
    _TOPIC_OFFSET,
    _PARKED,
    "CREATE TABLE IF NOT EXISTS kafka_outbox (one SMALLINT PRIMARY KEY, uuid BINARY(16) NOT NULL, "
    "version INT NOT NULL) ENGINE=InnoDB",
    "INSERT IGNORE INTO kafka_outbox (one, uuid, version) VALUES (1, UNHEX(REPLACE(UUID(), '-', '')), 1)",
    # The rows that ordered=True locks until the transaction ends; GET_LOCK is not bound to a transaction.
    "CREATE TABLE IF NOT EXISTS kafka_order_lock (slot SMALLINT PRIMARY KEY) ENGINE=InnoDB",
    f"INSERT IGNORE INTO kafka_order_lock (slot) VALUES {_SLOTS}",
)

DROP = (
    "DROP TABLE IF EXISTS kafka_messages, kafka_topic_info, kafka_topic_offset, kafka_parked, kafka_outbox, "
    "kafka_order_lock",
)
