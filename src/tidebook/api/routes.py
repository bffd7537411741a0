"""The table of all routes. The server, the OpenAPI document, the tests of roles and remote books are made from it."""

from __future__ import annotations

from typing import Any, Final

from tidebook.api import access, health, journals, monitoring, outbox, pipeline, queues, tags, wal
from tidebook.api.access import Role
from tidebook.api.route import Route

_ID = "/v1/journals/{topic}/{id}"
_QUEUE = "/v1/queues/{queue}"
_REGION = "/v1/wal/{namespace}/{region}"


def _read(name: str, path: str, summary: str, *, role: Role = Role.VIEWER, **more: Any) -> Route:
    return Route(name=name, method="GET", path=path, role=role, summary=summary, **more)


def _write(name: str, method: Any, path: str, summary: str, *, role: Role = Role.OPERATOR, **more: Any) -> Route:
    return Route(name=name, method=method, path=path, role=role, summary=summary, mutates=True, **more)


def _destroy(name: str, method: Any, path: str, summary: str, **more: Any) -> Route:
    return _write(name, method, path, summary, role=Role.ADMIN, destructive=True, **more)


ROUTES: Final[tuple[Route, ...]] = (
    # ---- health and documentation
    _read("health.live", "/v1/health/live", "Whether the process responds.", role=Role.PUBLIC, scope="none",
          response=health.LiveResponse),
    _read("health.ready", "/v1/health/ready", "Whether requests should be sent here, with reasons; 503 if not.",
          role=Role.PUBLIC, scope="none", response=health.ReadyResponse),
    _read("openapi.document", "/v1/openapi.json", "This API as an OpenAPI 3.1 document.", role=Role.PUBLIC,
          scope="none"),
    # ---- monitoring
    _read("monitoring.metrics", "/metrics", "The metrics of the server's process, for Prometheus.", scope="book",
          form="text"),
    _read("monitoring.history", "/v1/history", "The last hours of some metrics, for charts.", scope="book",
          query=monitoring.HistoryQuery, response=monitoring.HistoryResponse),
    # ---- topics
    _read("topics.list", "/v1/topics", "List the topics that hold journals.", scope="items",
          response=journals.TopicsResponse),
    _read("topics.describe", "/v1/topics/{topic}", "Describe a topic: offsets, epoch and replication lag.",
          scope="topic", response=journals.TopicResponse),
    _read("topics.config", "/v1/topics/{topic}/config", "Return the configuration of a topic of journals.",
          scope="topic", response=journals.TopicConfigResponse),
    _write("topics.create", "PUT", "/v1/topics/{topic}", "Create a topic of journals, if it does not exist.",
           scope="topic", response=journals.TopicConfigResponse),
    _destroy("topics.delete", "DELETE", "/v1/topics/{topic}", "Delete a topic and all its data.", scope="topic",
             form="none", status=204),
    # ---- journals
    _read("journals.ids", "/v1/journals/{topic}", "List the ids of a topic's journals.", scope="topic",
          query=journals.IdsQuery, response=journals.IdLine, form="lines"),
    _write("journals.append_batch", "POST", "/v1/journals/{topic}", "Append to many journals of a topic in one call.",
           scope="topic", body=journals.AppendBatchBody, response=journals.AppendBatchResponse),
    _read("journals.pointer", _ID, "Return the last number of a journal; 404 if there is no journal.", scope="topic",
          query=journals.PointerQuery, response=journals.PointerResponse),
    _destroy("journals.purge", "DELETE", _ID, "Remove a journal with all its events.", scope="topic", form="none",
             status=204),
    _write("journals.append", "POST", _ID + "/events", "Append events atomically.", scope="topic",
           body=journals.AppendBody, response=journals.AppendResponse),
    _read("journals.read", _ID + "/events", "Read the events of a journal; follow it with server-sent events.",
          scope="topic", query=journals.ReadQuery, response=journals.EventLine, form="events"),
    _destroy("journals.delete", "DELETE", _ID + "/events", "Delete the events up to and including a number.",
             scope="topic", query=journals.DeleteQuery, form="none", status=204),
    _read("journals.load_snapshot", _ID + "/snapshot", "Return the newest snapshot; 404 if there is none.",
          scope="topic", query=journals.SnapshotQuery, response=journals.SnapshotResponse),
    _write("journals.save_snapshot", "PUT", _ID + "/snapshots/{seq_nr}", "Save the state as of a number.",
           scope="topic", body=journals.SnapshotBody, form="none", status=204),
    _write("journals.delete_snapshots", "DELETE", _ID + "/snapshots", "Delete the snapshots up to a number.",
           scope="topic", query=journals.SnapshotsToQuery, form="none", status=204),
    # ---- tags
    _read("tags.list", "/v1/tags", "List the tags that have events.", scope="book", query=tags.TagsQuery,
          response=tags.TagLine, form="lines"),
    _read("tags.read", "/v1/tags/{tag}/events", "Read the events of a tag; follow it with server-sent events.",
          scope="items", query=tags.TagReadQuery, response=tags.TaggedEventLine, form="events"),
    _read("tags.horizon", "/v1/horizon", "Return the time below which streams by tag are complete.", scope="book",
          query=tags.HorizonQuery, response=tags.HorizonResponse),
    _write("tags.rebuild", "POST", "/v1/tags/{tag}/rebuild", "Rewrite a tag's rows from the journals.",
           role=Role.ADMIN, scope="book", body=tags.TagRebuildBody, response=tags.TagRebuildResponse,
           body_optional=True),
    # ---- queues
    _read("queues.list", "/v1/queues", "List all queues with their numbers of entries.", scope="items",
          response=queues.QueuesResponse),
    _read("queues.status", _QUEUE, "Return the numbers of entries of a queue.", scope="queue",
          response=queues.QueueResponse),
    _read("queues.workers", _QUEUE + "/workers", "List the workers of a queue with their last heartbeats.",
          scope="queue", query=queues.WorkersQuery, response=queues.WorkersResponse),
    _write("queues.report_worker", "PUT", _QUEUE + "/workers/{worker}", "Report that a worker is alive.", scope="queue",
           body=queues.WorkerBody, form="none", status=204),
    _write("queues.remove_worker", "DELETE", _QUEUE + "/workers/{worker}", "Remove a worker that has ended.",
           scope="queue", form="none", status=204),
    _write("queues.pause", "POST", _QUEUE + "/pause", "Prevent claims until the queue is resumed; puts continue.",
           scope="queue", form="none", status=204),
    _write("queues.resume", "POST", _QUEUE + "/resume", "Allow claims of a paused queue again.", scope="queue",
           form="none", status=204),
    _write("queues.put", "POST", _QUEUE + "/entries", "Put entries; those of a waiting key are merged.", scope="queue",
           body=queues.PutBody, response=queues.PutResponse),
    _read("queues.entries", _QUEUE + "/entries", "List the first entries, in claim order.", scope="queue",
          query=queues.EntriesQuery, response=queues.EntriesResponse),
    _write("queues.claim", "POST", _QUEUE + "/claims", "Claim due entries, or wait for some.", scope="queue",
           body=queues.ClaimBody, response=queues.ClaimResponse, body_optional=True),
    _write("queues.heartbeat", "POST", _QUEUE + "/heartbeats", "Extend leases.", scope="queue",
           body=queues.HeartbeatBody, response=queues.HeartbeatResponse),
    _write("queues.done", "POST", _QUEUE + "/done", "Finish jobs: their entries are deleted.", scope="queue",
           body=queues.DoneBody, form="none", status=204),
    _write("queues.fail", "POST", _QUEUE + "/failures", "Return the entries of failed jobs to the queue.",
           scope="queue", body=queues.FailBody, response=queues.FailResponse),
    _read("queues.listen", _QUEUE + "/due", "Follow, with server-sent events, when work becomes due.", scope="queue",
          response=queues.DueLine, form="events"),
    _read("queues.dead_letters", _QUEUE + "/dead-letters", "List dead letters, newest first.", scope="queue",
          query=queues.EntriesQuery, response=queues.DeadLettersResponse),
    _write("queues.retry", "POST", _QUEUE + "/dead-letters/{dead_letter}/retry", "Put a dead letter back.",
           scope="queue", form="none", status=204),
    _write("queues.edit", "PUT", _QUEUE + "/dead-letters/{dead_letter}/data", "Replace the data of a dead letter.",
           scope="queue", body=queues.DataBody, form="none", status=204),
    _destroy("queues.drop", "DELETE", _QUEUE + "/dead-letters/{dead_letter}", "Delete a dead letter.", scope="queue",
             form="none", status=204),
    # ---- outbox
    _read("outbox.status", "/v1/outbox", "Return the status of every topic of the outbox.", scope="book",
          response=outbox.OutboxResponse),
    _read("outbox.parked", "/v1/outbox/parked", "List parked messages.", scope="book", query=outbox.ParkedQuery,
          response=outbox.ParkedMessagesResponse),
    _write("outbox.retry", "POST", "/v1/outbox/parked/retry", "Retry parked messages.", scope="book",
           body=outbox.ParkedBody, response=outbox.CountResponse),
    _destroy("outbox.drop", "POST", "/v1/outbox/parked/drop", "Delete parked messages.", scope="book",
             body=outbox.ParkedBody, response=outbox.CountResponse),
    # ---- write-ahead logs
    _read("wal.regions", "/v1/wal/{namespace}", "List the regions of a namespace.", scope="namespace",
          response=wal.RegionsResponse),
    _read("wal.status", _REGION, "Return the status of a region and its tables.", scope="namespace",
          response=wal.RegionResponse),
    _destroy("wal.delete_region", "DELETE", _REGION, "Delete a region and all its entries.", scope="namespace",
             form="none", status=204),
    _write("wal.open_session", "POST", _REGION + "/sessions", "Claim a region for writing; an earlier claim is fenced.",
           scope="namespace", body=wal.RegionOpenBody, response=wal.RegionSessionResponse, body_optional=True,
           status=201),
    _write("wal.close_session", "DELETE", _REGION + "/sessions/{session}", "Release a claim.", scope="namespace",
           form="none", status=204),
    _write("wal.write", "POST", _REGION + "/entries", "Write payloads to tables, atomically.", scope="namespace",
           body=wal.RegionWriteBody, response=wal.RegionWriteResponse),
    _read("wal.read", _REGION + "/entries", "Read the entries of a region or of one table.", scope="namespace",
          query=wal.RegionReadQuery, response=wal.WalEntryLine, form="lines"),
    _write("wal.mark_deleted", "POST", _REGION + "/marks", "Mark a table's older entries as deleted.",
           scope="namespace", body=wal.MarkBody, form="none", status=204),
    _write("wal.request_flush", "POST", _REGION + "/flush-requests", "Ask the owner to flush a table, or all.",
           scope="namespace", body=wal.FlushBody, response=wal.FlushResponse, body_optional=True),
    _destroy("wal.drop_table", "DELETE", _REGION + "/tables/{table}", "Drop a table.", scope="namespace", form="none",
             status=204),
    _write("wal.clean", "POST", _REGION + "/clean", "Remove the entries that no table needs.", scope="namespace",
           response=wal.CleanResponse),
    _write("wal.snapshot", "POST", _REGION + "/snapshots", "Write a snapshot of the region's state.",
           scope="namespace", response=wal.RegionSnapshotResponse),
    # ---- pipeline
    _read("pipeline.status", "/v1/pipeline", "Return how far each partition is replicated.", scope="book",
          query=pipeline.PipelineQuery, response=pipeline.PipelineResponse),
    _read("pipeline.parked", "/v1/pipeline/parked", "List the log's records that cannot be read.", scope="book",
          query=pipeline.ParkedRecordsQuery, response=pipeline.ParkedRecordsResponse),
    _read("pipeline.jobs", "/v1/pipeline/jobs", "List the jobs that this server has started.", scope="book",
          response=pipeline.PipelineJobsResponse),
    _write("pipeline.start", "POST", "/v1/pipeline/jobs", "Start verify, rebuild or export.", role=Role.ADMIN,
           scope="book", body=pipeline.JobBody, response=pipeline.PipelineJobResponse, status=202, destructive=True),
    _read("pipeline.job", "/v1/pipeline/jobs/{job}", "Return a job's progress and result.", scope="book",
          query=pipeline.JobQuery, response=pipeline.PipelineJobResponse),
    _write("pipeline.cancel", "DELETE", "/v1/pipeline/jobs/{job}", "Cancel a job.", role=Role.ADMIN, scope="book",
           form="none", status=204),
    # ---- access
    Route(name="access.sign_in", method="POST", path="/v1/session", role=Role.PUBLIC, scope="none", mutates=True,
          summary="Sign a browser in with a token: sets a cookie.", body=access.SignInBody,
          response=access.SessionResponse, returns_secret=True),
    _read("access.session", "/v1/session", "Return the signed-in user.", scope="none", response=access.SessionResponse),
    _write("access.sign_out", "DELETE", "/v1/session", "Sign a browser out.", role=Role.VIEWER, scope="none",
           form="none", status=204),
    _read("access.tokens", "/v1/tokens", "List tokens without their secrets.", role=Role.ADMIN, scope="book",
          response=access.TokensResponse),
    _destroy("access.create_token", "POST", "/v1/tokens", "Create a token; its secret is shown once.", scope="book",
             body=access.TokenBody, response=access.NewTokenResponse, status=201, returns_secret=True),
    _destroy("access.revoke_token", "DELETE", "/v1/tokens/{token}", "Revoke a token.", scope="book", form="none",
             status=204),
    _read("access.audit_verify", "/v1/audit/verify", "Check the hash chains of the audit.", role=Role.ADMIN,
          scope="book", response=access.AuditVerifyResponse),
)  # fmt: skip

BY_NAME: Final = {route.name: route for route in ROUTES}
