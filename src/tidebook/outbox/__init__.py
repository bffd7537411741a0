"""Publish messages in the application's SQL transaction; a relay sends them to Kafka, in order and once.

from tidebook import outbox

with Session(engine) as s, s.begin():
    outbox.publish(s, topic="orders", key=b"1", payload=b"...", headers={})
"""

from tidebook.outbox.message import Message
from tidebook.outbox.publish import Backend, TestBackend, configure, create_tables, publish, publish_list, use

__all__ = ["Backend", "Message", "TestBackend", "configure", "create_tables", "publish", "publish_list", "use"]
