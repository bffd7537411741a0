-- A bundle is one row with all the entries without a key of one claim, so that finishing them deletes one row.
-- To handle only some of its entries, or to expire its lease, unpack it first into one row for each entry.
-- The columns are added here for tables of an older version.
ALTER TABLE @schema@.@table@ ADD COLUMN IF NOT EXISTS together integer;
ALTER TABLE @schema@.@table@ ADD COLUMN IF NOT EXISTS parts @schema@.part[];

CREATE OR REPLACE FUNCTION @schema@.@table@_unpack(p_queue integer, p_tokens uuid[]) RETURNS void
LANGUAGE sql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $unpack$
    WITH bundle AS (
        DELETE FROM @schema@.@table@ e
        WHERE e.queue = p_queue AND e.status = 'P' AND e.keyhash = ANY (p_tokens) AND e.together IS NOT NULL
        RETURNING e.slot, e.token, e.started_at, e.lease_until, e.parts
    )
    INSERT INTO @schema@.@table@ (id, process_at, expires_at, inserted_at, started_at, lease_until, queue, format, slot,
        priority, timeouts, kind, status, keyhash, token, data)
    SELECT p.id, p.process_at, p.expires_at, p.inserted_at, b.started_at, b.lease_until, p_queue, p.format, b.slot,
        p.priority, p.timeouts, p.kind, 'P', p.keyhash, b.token, p.data
    FROM bundle b, unnest(b.parts) AS p
$unpack$;

CREATE OR REPLACE FUNCTION @schema@.@table@_finish(p_queue integer, p_hashes uuid[], p_tokens uuid[])
RETURNS SETOF uuid
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $finish$
BEGIN
    PERFORM @schema@.@table@_unpack(p_queue, p_tokens);
    -- A hash and its token have the same position in the two arrays; both must match.
    RETURN QUERY DELETE FROM @schema@.@table@ e
    WHERE e.queue = p_queue AND e.status = 'P' AND e.keyhash = ANY (p_hashes)
        AND e.token = p_tokens[array_position(p_hashes, e.keyhash)]
    RETURNING e.keyhash;
END $finish$;

CREATE OR REPLACE FUNCTION @schema@.@table@_heartbeat(p_queue integer, p_lease bigint, p_hashes uuid[], p_tokens uuid[])
RETURNS TABLE (keyhash uuid, token uuid, lease_until bigint)
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $heartbeat$
BEGIN
    PERFORM @schema@.@table@_unpack(p_queue, p_tokens);
    RETURN QUERY UPDATE @schema@.@table@ e SET lease_until = @now@ + p_lease
    WHERE e.queue = p_queue AND e.status = 'P' AND e.keyhash = ANY (p_hashes)
        AND e.token = p_tokens[array_position(p_hashes, e.keyhash)]
    RETURNING e.keyhash, e.token, e.lease_until;
END $heartbeat$;
