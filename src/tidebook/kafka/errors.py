"""Translate the errors of Kafka into those of Tidebook: nothing written, outcome unknown, not found, or rejected."""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException

from tidebook.core.errors import InvalidInput, NotFound, OutcomeUnknown, TidebookError, Unavailable

UNKNOWN_TOPIC = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.UNKNOWN_TOPIC_ID,
        KafkaError.INCONSISTENT_TOPIC_ID,
    }
)
TOO_LARGE = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
OUT_OF_RANGE = frozenset({KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET})
#: A fetched batch has a wrong checksum, or cannot be decompressed or parsed.
DAMAGED = frozenset({KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION})
#: A topic that was just created, or a leader election in progress: a retry will succeed.
TRANSIENT = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.NOT_CONTROLLER,
    }
)
#: Wrong credentials, an untrusted certificate, or a missing permission.
REFUSED = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError._AUTHENTICATION,
        KafkaError._SSL,
    }
)
#: The leader rejects such a record on every attempt, so it is not in the log. A revoked permission and a deleted topic
#: are not among these errors: an earlier attempt, whose acknowledgement was lost, may have written the record.
_INVALID = frozenset(
    {
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.INVALID_CONFIG,
        KafkaError.INVALID_PARTITIONS,
        KafkaError.INVALID_REPLICATION_FACTOR,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.POLICY_VIOLATION,
        KafkaError.INVALID_REQUEST,
        KafkaError._INVALID_ARG,
    }
)


def kafka_error(error: KafkaException | KafkaError) -> KafkaError:
    """Return the KafkaError of an exception."""
    return error.args[0] if isinstance(error, KafkaException) else error


def failed(error: KafkaException | KafkaError, operation: str) -> TidebookError:
    """Return the Tidebook error for a failed request that writes no record, such as a read or a topic change."""
    error = kafka_error(error)
    code = error.code()
    if code in UNKNOWN_TOPIC:
        return NotFound(f"{operation}: there is no such topic or partition")
    if code in _INVALID:
        return InvalidInput(f"{operation}: Kafka rejected it: {error.str()}")
    if code in REFUSED:
        return Unavailable(f"{operation}: Kafka denied access ({error.str()}): check user, password, CA and ACLs")
    return Unavailable(f"{operation}: Kafka is unavailable ({error.name()}: {error.str()}); the next call reconnects")


def not_sent(error: KafkaException | KafkaError, topic: str, partition: int) -> TidebookError:
    """Return the error of a record that the client did not accept."""
    return failed(error, f"sending to {topic}/{partition}")


def not_acknowledged(error: KafkaError, topic: str, partition: int) -> TidebookError:
    """Return the error of a record that the client accepted: only a rejection proves that it was not written."""
    if error.code() in _INVALID:
        return not_sent(error, topic, partition)
    hint = ""
    if error.code() in UNKNOWN_TOPIC:
        hint = "; does the topic still exist?"
    elif error.code() in REFUSED:
        hint = "; check user, password, CA and ACLs"
    return OutcomeUnknown(
        f"sending to {topic}/{partition}: no acknowledgement ({error.name()}: {error.str()}{hint}): "
        "the record may be in the log; retry with the same append id",
        partition=partition,
    )
