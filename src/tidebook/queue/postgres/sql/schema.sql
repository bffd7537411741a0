CREATE SCHEMA IF NOT EXISTS @schema@;

CREATE TABLE IF NOT EXISTS @schema@.queue (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    table_name text NOT NULL,
    settings bytea NOT NULL,
    paused_at bigint
);

-- The state of a partitioned table: the partition that takes new entries, and those that are being drained.
CREATE TABLE IF NOT EXISTS @schema@.period (
    table_name text PRIMARY KEY,
    current_slot smallint NOT NULL,
    draining smallint[] NOT NULL,
    began_at bigint NOT NULL,
    finished bigint NOT NULL DEFAULT 0,
    version integer NOT NULL
);

-- An entry as a claim returns it, and as a bundle stores it.
DO $part$ BEGIN
    IF to_regtype('@schema@.part') IS NULL THEN
        CREATE TYPE @schema@.part AS (slot smallint, id bigint, keyhash uuid, key text, priority smallint,
            timeouts smallint, format integer, inserted_at bigint, process_at bigint, expires_at bigint, kind smallint,
            data bytea, trace text);
    END IF;
END $part$;

-- The declarations of a queue's user fields. A new declaration begins a new partition.
CREATE TABLE IF NOT EXISTS @schema@.declaration (
    queue integer NOT NULL REFERENCES @schema@.queue ON DELETE CASCADE,
    format integer NOT NULL,
    fields bytea NOT NULL,
    declared_at bigint NOT NULL,
    PRIMARY KEY (queue, format)
);

CREATE TABLE IF NOT EXISTS @schema@.dead (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue integer NOT NULL,
    raised_at bigint NOT NULL,
    inserted_at bigint NOT NULL,
    expires_at bigint NOT NULL,
    announced_at bigint,
    reserved_until bigint NOT NULL DEFAULT 0,    -- until then one process has reserved it, to run its hooks
    format integer NOT NULL,
    priority smallint NOT NULL,
    timeouts smallint NOT NULL,
    kind smallint NOT NULL,
    keyhash uuid NOT NULL,
    key text,
    reason text NOT NULL,
    trace text,
    data bytea NOT NULL
);
CREATE INDEX IF NOT EXISTS dead_by_queue ON @schema@.dead (queue, id);
CREATE INDEX IF NOT EXISTS dead_to_announce ON @schema@.dead (id) WHERE announced_at IS NULL;

-- How far each part of a source was put; a mark moves in the transaction of the put.
CREATE TABLE IF NOT EXISTS @schema@.mark (
    queue integer NOT NULL,
    source text NOT NULL,
    part integer NOT NULL,
    place text NOT NULL,
    PRIMARY KEY (queue, source, part)
);

-- Until when each process sleeps: a put that is due earlier notifies it. Unlogged, since it can be lost without harm.
CREATE UNLOGGED TABLE IF NOT EXISTS @schema@.wake (
    queue integer NOT NULL,
    sleeper uuid NOT NULL,
    until bigint NOT NULL,
    beat_at bigint NOT NULL,
    held boolean NOT NULL,
    PRIMARY KEY (queue, sleeper)
) WITH (fillfactor = 50);

-- The workers of all processes, as they last reported themselves. Unlogged: after a crash they report themselves again.
CREATE UNLOGGED TABLE IF NOT EXISTS @schema@.worker (
    queue integer NOT NULL,
    id uuid NOT NULL,
    name text NOT NULL,
    concurrency integer NOT NULL,
    running integer NOT NULL,
    done integer NOT NULL,
    failed integer NOT NULL,
    started_at bigint NOT NULL,
    reported_at bigint NOT NULL,
    PRIMARY KEY (queue, id)
) WITH (fillfactor = 50);

-- Notify only if a process sleeps past the date: commits that notify are serialized by the server.
CREATE OR REPLACE FUNCTION @schema@.notify_sleepers(p_queue integer, p_at bigint, p_now bigint) RETURNS void
LANGUAGE plpgsql AS $notify$
BEGIN
    IF EXISTS (SELECT FROM @schema@.wake w WHERE w.queue = p_queue AND w.until > p_at AND w.beat_at > p_now - 120000)
    THEN
        PERFORM pg_notify('@schema@', p_queue || ' ' || p_at);
    END IF;
END $notify$;
