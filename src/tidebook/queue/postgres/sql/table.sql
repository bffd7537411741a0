CREATE SEQUENCE IF NOT EXISTS @schema@.@table@_id INCREMENT 1024;

CREATE TABLE IF NOT EXISTS @schema@.@table@ (
    id bigint NOT NULL,
    process_at bigint NOT NULL,
    expires_at bigint NOT NULL,
    inserted_at bigint NOT NULL,
    started_at bigint,
    lease_until bigint,          -- 0: it expired, and the timeout was counted
    queue integer NOT NULL,
    format integer NOT NULL DEFAULT 0,
    slot smallint NOT NULL,
    priority smallint,
    timeouts smallint NOT NULL DEFAULT 0,
    kind smallint NOT NULL,
    status "char" NOT NULL DEFAULT 'W',
    serial boolean,              -- true while it holds its key exclusively, else null
    keyhash uuid,
    token uuid,
    key text,
    data bytea NOT NULL,
    together integer,            -- the number of entries of a bundle; null if the row is one entry
    trace text,                  -- the trace context of the put
    parts @schema@.part[]        -- the entries of a bundle, whose keyhash is its token
) PARTITION BY LIST (slot);
-- A bundle is short-lived: compressing it costs more than it saves.
ALTER TABLE @schema@.@table@ ALTER COLUMN parts SET STORAGE EXTERNAL;

-- Exactly one index must fit each statement, because the statistics of a table that is empty now and full in a second
-- mislead the planner. Hence predicates that only a condition on that column implies, and columns that are never null
-- but not declared NOT NULL, since the declaration would imply the predicate for every statement.
-- Within a partition the slot is constant, so these are unique per queue and key; across partitions `put` ensures it.
CREATE UNIQUE INDEX IF NOT EXISTS @table@_waiting ON @schema@.@table@ (queue, keyhash, slot)
    WHERE status = 'W' AND keyhash IS NOT NULL;
CREATE UNIQUE INDEX IF NOT EXISTS @table@_held ON @schema@.@table@ (queue, keyhash, slot, serial)
    WHERE status = 'P' AND keyhash IS NOT NULL;
CREATE INDEX IF NOT EXISTS @table@_order ON @schema@.@table@ (queue, priority, process_at, id)
    WHERE status = 'W' AND priority IS NOT NULL;
CREATE INDEX IF NOT EXISTS @table@_lease ON @schema@.@table@ (queue, lease_until)
    WHERE status = 'P' AND lease_until IS NOT NULL;
CREATE INDEX IF NOT EXISTS @table@_expiry ON @schema@.@table@ (queue, expires_at)
    WHERE status = 'W' AND expires_at < 9223372036854775807;
