-- Claim due entries for one or more callers. Each caller has its own limit and token; the rows of the first caller come
-- first, as many as its limit, then those of the next.
-- 1. Find the next priority that has waiting entries, and its first date. This index scan passes the dead versions of
--    finished entries; it begins at the priority's watermark (watermarks.sql), before which nothing waits.
-- 2. Pick due entries of that priority, from that date on, so that entries with later dates are never scanned. An entry
--    that is committed between the two steps with an earlier date is left to the next claim. Slow priorities are picked
--    only if nothing else was.
-- 3. Delete the picked rows, and insert them again as being processed: one bundle (bundle.sql) for the entries without
--    a key if the caller wants them together, and one row for each of the others.
-- The statement that picks also checks whether a key is held, because within one snapshot a waiting entry is never
-- visible without the entry that holds its key. The check is a scalar subquery, since NOT EXISTS would be planned as a
-- join with the whole table.
-- A call returns at most 64 MB. The running sum of sizes is computed only if an entry is large, which is rare.
-- The picked entries are in a record, since a plain array variable would be expanded and copied in every iteration.
-- The watermarks have a default, because an older version beside this one does not pass them.
DROP FUNCTION IF EXISTS @schema@.@table@_claim(integer, integer, bigint, uuid, smallint, boolean);
DROP FUNCTION IF EXISTS @schema@.@table@_claim(integer, integer[], bigint, uuid[], smallint, boolean, boolean);
DROP FUNCTION IF EXISTS @schema@.@table@_claim(
    integer, integer[], bigint, uuid[], smallint, boolean, boolean, smallint[], bigint[]
);
CREATE OR REPLACE FUNCTION @schema@.@table@_claim(
    p_queue integer, p_limits integer[], p_lease bigint, p_tokens uuid[], p_max smallint, p_serial boolean,
    p_together boolean, p_priorities smallint[] DEFAULT '{}', p_watermarks bigint[] DEFAULT '{}'
) RETURNS TABLE (slot smallint, id bigint, keyhash bytea, key text, priority smallint, timeouts smallint,
    format integer, inserted_at bigint, process_at bigint, expires_at bigint, started_at bigint, lease_until bigint,
    kind smallint, data bytea)
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $claim$
#variable_conflict use_column
DECLARE
    v_now bigint := @now@; v_limit integer; v_remaining integer; v_min_priority smallint := 0; v_scan_from smallint;
    v_priority smallint; v_expired_priority smallint; v_first_date bigint;
    v_any_expired boolean := false; v_has_fast boolean := false; v_slot smallint; v_bundle_size integer; batch record;
    v_share @schema@.part[]; v_keyed bigint := 0; v_offset integer := 0; v_share_size integer; v_count integer := 0;
    v_bytes bigint := 0; v_bytes_each bigint;
BEGIN
    v_limit := CASE WHEN cardinality(p_limits) = 1 THEN p_limits[1] ELSE (SELECT sum(l) FROM unnest(p_limits) AS l) END;
    v_remaining := v_limit;
    SELECT NULL::@schema@.part[] AS parts, 0::bigint AS found, 0::bigint AS keyed, 0::bigint AS bytes, 0 AS largest,
        NULL::tid[] AS places, 0::smallint AS slot, 0::smallint AS last_slot INTO batch;
    PERFORM FROM @schema@.@table@ e WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until <= v_now LIMIT 1;
    IF FOUND THEN
        PERFORM @schema@.@table@_expire_leases(p_queue, p_max, v_now);
        p_watermarks := '{}';  -- an expired entry may have been merged into one of another priority
        v_any_expired := EXISTS (SELECT FROM @schema@.@table@ e
            WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until = 0);
    END IF;
    LOOP
        v_priority := NULL;
        v_scan_from := v_min_priority;
        FOR i IN 1 .. cardinality(p_watermarks) LOOP
            CONTINUE WHEN p_priorities[i] < v_scan_from;
            IF v_scan_from < p_priorities[i] THEN
                SELECT e.priority, e.process_at INTO v_priority, v_first_date FROM @schema@.@table@ e
                    WHERE e.queue = p_queue AND e.status = 'W' AND e.priority >= v_scan_from
                        AND e.priority < p_priorities[i]
                    ORDER BY e.priority, e.process_at, e.id LIMIT 1;
                EXIT WHEN FOUND;
            END IF;
            SELECT e.priority, e.process_at INTO v_priority, v_first_date FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'W' AND e.priority = p_priorities[i]
                    AND e.process_at >= p_watermarks[i]
                ORDER BY e.priority, e.process_at, e.id LIMIT 1;
            EXIT WHEN FOUND;
            v_scan_from := p_priorities[i] + 1;
        END LOOP;
        IF v_priority IS NULL THEN
            SELECT e.priority, e.process_at INTO v_priority, v_first_date FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'W' AND e.priority >= v_scan_from
                ORDER BY e.priority, e.process_at, e.id LIMIT 1;
        END IF;
        IF v_any_expired THEN
            SELECT min(e.priority) INTO v_expired_priority FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until = 0 AND e.priority >= v_min_priority;
            IF v_expired_priority < v_priority THEN
                v_first_date := 0;
            END IF;
            v_priority := least(v_priority, v_expired_priority);
        END IF;
        EXIT WHEN v_priority IS NULL OR (v_priority >= 200 AND v_has_fast);
        IF v_any_expired AND v_priority = v_expired_priority THEN
            WITH expired AS MATERIALIZED (
                SELECT e.slot, e.ctid, e.process_at, e.id, octet_length(e.data) AS size FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until = 0 AND e.priority = v_priority
                    AND e.expires_at > v_now
                ORDER BY e.process_at, e.id LIMIT v_remaining FOR UPDATE SKIP LOCKED
            ), waiting AS MATERIALIZED (
                SELECT e.slot, e.ctid, e.process_at, e.id, octet_length(e.data) AS size FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'W' AND e.priority = v_priority
                    AND e.process_at BETWEEN v_first_date AND v_now AND e.expires_at > v_now
                    AND (e.key IS NULL OR NOT p_serial OR (
                        SELECT true FROM @schema@.@table@ h
                        WHERE h.queue = p_queue AND h.status = 'P' AND h.keyhash = e.keyhash LIMIT 1) IS NULL)
                ORDER BY e.process_at, e.id LIMIT v_remaining FOR UPDATE SKIP LOCKED
            ), picked AS MATERIALIZED (
                SELECT s.slot, s.ctid FROM (
                    SELECT c.slot, c.ctid, sum(c.size) OVER (ORDER BY c.process_at, c.id) - c.size AS before
                    FROM (SELECT * FROM expired UNION ALL SELECT * FROM waiting) AS c
                    ORDER BY c.process_at, c.id LIMIT v_remaining) AS s
                WHERE v_bytes + s.before < 64000000
            ), deleted AS (
                DELETE FROM @schema@.@table@ e USING picked p WHERE e.slot = p.slot AND e.ctid = p.ctid
                RETURNING e.key, octet_length(e.data) AS size, (e.slot, e.id, e.keyhash, e.key, e.priority, e.timeouts,
                    e.format, e.inserted_at, e.process_at, e.expires_at, e.kind, e.data)::@schema@.part AS part
            )
            SELECT batch.parts || array_agg(g.part) AS parts, count(*) AS found, count(g.key) AS keyed,
                coalesce(sum(g.size), 0)::bigint AS bytes, 0 AS largest, NULL::tid[] AS places, 0::smallint AS slot,
                0::smallint AS last_slot
            INTO batch FROM deleted g;
        ELSE
            -- Locked rows are deleted by ctid: without a join, and in one partition only if it has all of them.
            v_bytes_each := (64000000 - v_bytes) / v_remaining;
            SELECT CASE WHEN max(octet_length(p.data)) > v_bytes_each THEN batch.parts ELSE batch.parts ||
                array_agg((p.slot, p.id, p.keyhash, p.key, p.priority,
                p.timeouts, p.format, p.inserted_at, p.process_at, p.expires_at, p.kind, p.data)::@schema@.part)
                FILTER (WHERE octet_length(p.data) <= v_bytes_each) END AS parts,
                count(*) AS found, count(p.key) AS keyed,
                coalesce(sum(octet_length(p.data)), 0) AS bytes, coalesce(max(octet_length(p.data)), 0) AS largest,
                array_agg(p.ctid) AS places, min(p.slot) AS slot, max(p.slot) AS last_slot
            INTO batch FROM (
                SELECT e.slot, e.ctid, e.id, e.keyhash, e.key, e.priority, e.timeouts, e.format, e.inserted_at,
                    e.process_at, e.expires_at, e.kind, e.data
                FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'W' AND e.priority = v_priority
                    AND e.process_at BETWEEN v_first_date AND v_now AND e.expires_at > v_now
                    AND (e.key IS NULL OR NOT p_serial OR (
                        SELECT true FROM @schema@.@table@ h
                        WHERE h.queue = p_queue AND h.status = 'P' AND h.keyhash = e.keyhash LIMIT 1) IS NULL)
                ORDER BY e.process_at, e.id LIMIT v_remaining FOR UPDATE SKIP LOCKED) AS p;
            IF batch.largest > v_bytes_each THEN  -- pick the locked rows again, as many as fit
                SELECT batch.parts || array_agg((p.slot, p.id, p.keyhash, p.key, p.priority,
                p.timeouts, p.format, p.inserted_at, p.process_at, p.expires_at, p.kind, p.data)::@schema@.part)
                    AS parts, count(*) AS found, count(p.key) AS keyed, coalesce(max(p.bytes), 0)::bigint AS bytes,
                    0 AS largest, array_agg(p.ctid) AS places, min(p.slot) AS slot, max(p.slot) AS last_slot
                INTO batch FROM (
                SELECT l.*, sum(octet_length(l.data)) OVER (ROWS UNBOUNDED PRECEDING) AS bytes FROM (
                SELECT e.slot, e.ctid, e.id, e.keyhash, e.key, e.priority, e.timeouts, e.format, e.inserted_at,
                    e.process_at, e.expires_at, e.kind, e.data
                FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'W' AND e.priority = v_priority
                    AND e.process_at BETWEEN v_first_date AND v_now AND e.expires_at > v_now
                    AND (e.key IS NULL OR NOT p_serial OR (
                        SELECT true FROM @schema@.@table@ h
                        WHERE h.queue = p_queue AND h.status = 'P' AND h.keyhash = e.keyhash LIMIT 1) IS NULL)
                ORDER BY e.process_at, e.id LIMIT v_remaining FOR UPDATE SKIP LOCKED) AS l) AS p
                WHERE v_bytes + p.bytes - octet_length(p.data) < 64000000;
            END IF;
            IF batch.slot = batch.last_slot THEN
                DELETE FROM @schema@.@table@ e WHERE e.slot = batch.slot AND e.ctid = ANY (batch.places);
            ELSIF batch.found > 0 THEN
                DELETE FROM @schema@.@table@ e
                USING unnest(batch.parts[v_count + 1 :], batch.places) AS p (slot, id, keyhash, key, priority, timeouts,
                    format, inserted_at, process_at, expires_at, kind, data, place)
                WHERE e.slot = p.slot AND e.ctid = p.place;
            END IF;
        END IF;
        v_bytes := v_bytes + batch.bytes;
        IF batch.found > 0 THEN
            v_keyed := v_keyed + batch.keyed;
            v_count := v_count + batch.found;
            v_remaining := v_limit - v_count;
            v_has_fast := v_has_fast OR v_priority < 200;
        END IF;
        EXIT WHEN v_remaining = 0 OR v_priority = 255 OR v_bytes >= 64000000;
        v_min_priority := v_priority + 1;
    END LOOP;
    FOR i IN 1 .. cardinality(p_limits) LOOP
        v_share_size := least(p_limits[i], v_count - v_offset);
        EXIT WHEN v_share_size <= 0;
        IF p_together AND v_keyed = 0 AND v_share_size > 1 THEN
            INSERT INTO @schema@.@table@ (id, process_at, expires_at, inserted_at, started_at, lease_until, queue, slot,
                kind, status, keyhash, token, data, together, parts)
            VALUES ((batch.parts)[v_offset + 1].id, v_now, 9223372036854775807, v_now, v_now, v_now + p_lease, p_queue,
                (batch.parts)[v_offset + 1].slot, 0, 'P', p_tokens[i], p_tokens[i], '', v_share_size,
                CASE WHEN v_share_size = v_count THEN batch.parts
                    ELSE (batch.parts)[v_offset + 1 : v_offset + v_share_size] END);
        ELSE
            v_share := (batch.parts)[v_offset + 1 : v_offset + v_share_size];
            v_bundle_size := 0;
            IF p_together THEN
                SELECT count(*) INTO v_bundle_size FROM unnest(v_share) AS p WHERE p.key IS NULL;
            END IF;
            IF v_bundle_size > 1 THEN
                v_slot := v_share[1].slot;
                INSERT INTO @schema@.@table@ (id, process_at, expires_at, inserted_at, started_at, lease_until, queue,
                    slot, kind, status, keyhash, token, data, together, parts)
                VALUES (v_share[1].id, v_now, 9223372036854775807, v_now, v_now, v_now + p_lease, p_queue, v_slot, 0,
                    'P', p_tokens[i], p_tokens[i], '', v_bundle_size, ARRAY (
                        SELECT p::@schema@.part FROM unnest(v_share) AS p WHERE p.key IS NULL));
            ELSE
                v_bundle_size := 0;
            END IF;
            IF v_bundle_size < v_share_size THEN
                INSERT INTO @schema@.@table@ (id, process_at, expires_at, inserted_at, started_at, lease_until, queue,
                    format, slot, priority, timeouts, kind, status, serial, keyhash, token, key, data)
                SELECT p.id, p.process_at, p.expires_at, p.inserted_at, v_now, v_now + p_lease, p_queue, p.format,
                    p.slot, p.priority, p.timeouts, p.kind, 'P', nullif(p_serial, false), p.keyhash, p_tokens[i],
                    p.key, p.data
                FROM unnest(v_share) AS p WHERE v_bundle_size = 0 OR p.key IS NOT NULL;
            END IF;
        END IF;
        v_offset := v_offset + v_share_size;
    END LOOP;
    -- Two or more entries without a key of one caller form a bundle: the client derives the bundle's size from that.
    RETURN QUERY SELECT p.slot, p.id, uuid_send(p.keyhash), p.key, p.priority, p.timeouts, p.format, p.inserted_at,
        p.process_at, p.expires_at, v_now, v_now + p_lease, p.kind, p.data
    FROM unnest(batch.parts) AS p;
END $claim$;
