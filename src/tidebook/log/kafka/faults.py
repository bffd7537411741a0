"""What the broker and the client say, as errors of Tidebook: nothing written, outcome unknown, not found, too large."""

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
#: What a consumer was sent has another checksum than it says, or cannot be taken apart.
DAMAGED = frozenset({KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION})
#: A topic that was just made, or a leader that is just moving: asking again will do.
PASSING = frozenset(
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
#: Wrong credentials, an unknown certificate, a missing permission.
REFUSED = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError._AUTHENTICATION,
        KafkaError._SSL,
    }
)
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
#: A bad record: the leader refuses it however often it is sent, so it is in no log. A permission that was taken away,
#: or a topic that is gone, tells nothing of an earlier attempt whose answer was lost.
_NEVER_WRITTEN = _INVALID


def kafka_error(error: KafkaException | KafkaError) -> KafkaError:
    """The error inside the exception."""
    return error.args[0] if isinstance(error, KafkaException) else error


def failed(error: KafkaException | KafkaError, doing: str) -> TidebookError:
    """An error of a request that writes no record."""
    error = kafka_error(error)
    code = error.code()
    if code in UNKNOWN_TOPIC:
        return NotFound(f"{doing}: there is no such topic or partition")
    if code in _INVALID:
        return InvalidInput(f"{doing}: Kafka refuses it: {error.str()}")
    if code in REFUSED:
        return Unavailable(f"{doing}: Kafka does not let us in ({error.str()}): check user, password, CA and ACLs")
    return Unavailable(
        f"{doing}: Kafka does not answer ({error.name()}: {error.str()}): it is tried again on the next use"
    )


def not_sent(error: KafkaException | KafkaError, topic: str, partition: int) -> TidebookError:
    """An error of a record that the client would not even take."""
    return failed(error, f"sending to {topic}/{partition}")


def not_acknowledged(error: KafkaError, topic: str, partition: int) -> TidebookError:
    """An error of a record that was handed to the client: only a refusal proves that it is nowhere."""
    if error.code() in _NEVER_WRITTEN:
        return not_sent(error, topic, partition)
    look = ""
    if error.code() in UNKNOWN_TOPIC:
        look = "; is the topic still there?"
    elif error.code() in REFUSED:
        look = "; check user, password, CA and ACLs"
    return OutcomeUnknown(
        f"sending to {topic}/{partition}: no acknowledgement ({error.name()}: {error.str()}{look}): "
        "the record may be in the log; retry with the same append id",
        partition=partition,
    )
