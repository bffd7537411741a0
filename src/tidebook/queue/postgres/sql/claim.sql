-- Claim due entries for callers that share this call, by priority, process date and age: the entries from number
-- p_places[i] on are for the caller with p_tokens[i]. Slow priorities (200 and above) are claimed only if nothing else
-- was; a call returns at most 64 MB. The statement that picks entries also checks whether their keys are held: within
-- one snapshot a waiting entry is never visible without the entry that holds its key. The check is a scalar subquery,
-- because NOT EXISTS would be planned as a join.
-- A claim of a paused queue returns nothing. The lock orders each claim before the pause, which waits for it, or after.
-- If a key may be held several times, a call returns one entry of it, identified by its hash and the call's token.
CREATE OR REPLACE FUNCTION @schema@.@table@_claim(
    p_queue integer, p_limit integer, p_places bigint[], p_tokens uuid[], p_lease bigint, p_max smallint,
    p_serial boolean, p_together boolean
) RETURNS TABLE (slot smallint, id bigint, keyhash bytea, key text, priority smallint, timeouts smallint, format integer,
    inserted_at bigint, process_at bigint, expires_at bigint, started_at bigint, lease_until bigint, kind smallint,
    data bytea, token bytea, together integer, trace text)
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $claim$
#variable_conflict use_column
DECLARE
    v_now bigint := @now@; v_first smallint;
BEGIN
    PERFORM pg_advisory_xact_lock_shared('@schema@.queue'::regclass::oid::integer, p_queue);
    IF EXISTS (SELECT FROM @schema@.queue q WHERE q.id = p_queue AND q.paused_at IS NOT NULL) THEN
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM @schema@.@table@ e
        WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until BETWEEN 1 AND v_now) THEN
        PERFORM @schema@.@table@_expire_leases(p_queue, p_max, v_now);
    END IF;
    FOREACH v_first IN ARRAY '{0, 200}'::smallint[] LOOP
        RETURN QUERY WITH RECURSIVE priorities AS (  -- each priority with waiting entries, and its first date
            (SELECT e.priority, e.process_at FROM @schema@.@table@ e WHERE e.queue = p_queue AND e.status = 'W'
                AND e.priority >= v_first AND e.priority < v_first + 200 ORDER BY e.priority, e.process_at, e.id LIMIT 1)
            UNION ALL SELECT n.priority, n.process_at FROM priorities p, LATERAL (
                SELECT e.priority, e.process_at FROM @schema@.@table@ e WHERE e.queue = p_queue AND e.status = 'W'
                AND e.priority > p.priority AND e.priority < v_first + 200
                ORDER BY e.priority, e.process_at, e.id LIMIT 1) AS n
        ), waiting AS MATERIALIZED (
            SELECT w.* FROM priorities p, LATERAL (
                SELECT e.slot, e.ctid, e.priority, e.process_at, e.id, octet_length(e.data) AS size
                FROM @schema@.@table@ e WHERE e.queue = p_queue AND e.status = 'W' AND e.priority = p.priority
                    AND e.process_at BETWEEN p.process_at AND v_now AND e.expires_at > v_now
                    AND (e.key IS NULL OR (SELECT true FROM @schema@.@table@ h WHERE h.queue = p_queue
                        AND h.status = 'P' AND h.keyhash = e.keyhash AND (p_serial OR h.lease_until = 0) LIMIT 1) IS NULL)
                ORDER BY e.process_at, e.id LIMIT p_limit FOR UPDATE SKIP LOCKED) AS w LIMIT p_limit
        ), expired AS MATERIALIZED (
            SELECT e.slot, e.ctid, e.priority, e.process_at, e.id, octet_length(e.data) AS size
            FROM @schema@.@table@ e WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until = 0
                AND e.priority >= v_first AND e.priority < v_first + 200 AND e.expires_at > v_now
                AND (p_serial OR (SELECT true FROM @schema@.@table@ h WHERE h.queue = p_queue AND h.status = 'P'
                    AND h.keyhash = e.keyhash AND h.lease_until + 0 = 0 AND h.expires_at > v_now
                    AND (h.priority, h.process_at, h.id) < (e.priority, e.process_at, e.id) LIMIT 1) IS NULL)
            ORDER BY e.priority, e.process_at, e.id LIMIT p_limit FOR UPDATE SKIP LOCKED
        ), picked AS (
            SELECT c.slot, c.ctid, width_bucket(row_number() OVER age, p_places) AS caller,
                sum(c.size) OVER age - c.size AS bytes_before
            FROM (SELECT * FROM waiting UNION ALL SELECT * FROM expired) AS c
            WINDOW age AS (ORDER BY c.priority, c.process_at, c.id ROWS UNBOUNDED PRECEDING) LIMIT p_limit
        ), removed AS (
            DELETE FROM @schema@.@table@ e USING picked p
            WHERE p.bytes_before < 64000000 AND e.slot = p.slot AND e.ctid = p.ctid
            RETURNING p.caller, p_together AND e.key IS NULL AS bundled, (e.slot, e.id, e.keyhash, e.key, e.priority,
                e.timeouts, e.format, e.inserted_at, e.process_at, e.expires_at, e.kind, e.data, e.trace)::@schema@.part AS part
        ), dealt AS MATERIALIZED (
            SELECT p_tokens[r.caller] AS token, r.bundled, count(*)::integer AS size, array_agg(r.part) AS parts
            FROM removed r GROUP BY r.caller, r.bundled
        ), bundles AS (
            INSERT INTO @schema@.@table@ (id, process_at, expires_at, inserted_at, started_at, lease_until, queue, slot,
                kind, status, keyhash, token, data, together, parts)
            SELECT (d.parts)[1].id, v_now, 9223372036854775807, v_now, v_now, v_now + p_lease, p_queue,
                (d.parts)[1].slot, 0, 'P', d.token, d.token, '', d.size, d.parts FROM dealt d WHERE d.bundled
        ), singles AS (
            INSERT INTO @schema@.@table@ (id, process_at, expires_at, inserted_at, started_at, lease_until, queue, slot,
                kind, status, keyhash, token, data, key, format, priority, timeouts, serial, trace)
            SELECT p.id, p.process_at, p.expires_at, p.inserted_at, v_now, v_now + p_lease, p_queue, p.slot,
                p.kind, 'P', p.keyhash, d.token, p.data, p.key, p.format, p.priority, p.timeouts, nullif(p_serial, false),
                p.trace
            FROM dealt d, unnest(d.parts) AS p WHERE NOT d.bundled
        ) SELECT p.slot, p.id, uuid_send(p.keyhash), p.key, p.priority, p.timeouts, p.format, p.inserted_at,
            p.process_at, p.expires_at, v_now, v_now + p_lease, p.kind, p.data, uuid_send(d.token),
            CASE WHEN d.bundled THEN d.size ELSE 0 END, p.trace FROM dealt d, unnest(d.parts) AS p;
        EXIT WHEN FOUND;
    END LOOP;
END $claim$;
