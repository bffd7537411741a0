-- Priority by priority, so that entries with later dates are never walked over. Slow ones only when nothing else came.
-- The look for the next priority walks over what was finished and could not be cleared away yet; the pick begins at the
-- date that it found. What was committed between the two with an earlier date is the next claim's.
-- Below a floor (floor.sql) nothing waits: there the look begins, where the priority has one.
-- The entry that holds a key is looked for in the statement that picks: with one snapshot, a waiting entry of a key is
-- never seen without the entry that holds it. A scalar subquery, since NOT EXISTS would be planned as a join of all.
-- What was picked is deleted, and inserted again as being processed: one row for all entries without a key, a bundle,
-- where the claim asks for them together (see bundle.sql), and a row for each of the others.
-- Claims that come at the same time share a call: each has its own limit and token, and they are served in turn; the
-- rows of the first come first, as many as its limit, then those of the next.
-- The floors have a default: an older Tidebook that runs beside a newer one does not give them.
-- What is handed out must fit into memory: no more than 64 MB are taken. Where none is large, as almost always, that
-- needs no running sum.
-- What was picked is kept in a record: an array that is a variable of its own is taken apart and copied at every turn.
DROP FUNCTION IF EXISTS @schema@.@table@_claim(integer, integer, bigint, uuid, smallint, boolean);
DROP FUNCTION IF EXISTS @schema@.@table@_claim(integer, integer[], bigint, uuid[], smallint, boolean, boolean);
CREATE OR REPLACE FUNCTION @schema@.@table@_claim(
    p_queue integer, p_limits integer[], p_lease bigint, p_tokens uuid[], p_max smallint, p_serial boolean,
    p_together boolean, p_priorities smallint[] DEFAULT '{}', p_floors bigint[] DEFAULT '{}'
) RETURNS TABLE (slot smallint, id bigint, keyhash bytea, key text, priority smallint, timeouts smallint,
    format integer, inserted_at bigint, process_at bigint, expires_at bigint, started_at bigint, lease_until bigint,
    kind smallint, data bytea)
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $claim$
#variable_conflict use_column
DECLARE
    v_now bigint := @now@; v_limit integer; v_left integer; v_from smallint := 0; v_next smallint; v_priority smallint;
    v_out smallint; v_first bigint;
    v_run_out boolean := false; v_fast boolean := false; v_slot smallint; v_together integer; got record;
    v_got @schema@.part[]; v_keyed bigint := 0; v_dealt integer := 0; v_found integer; v_all integer := 0;
    v_bytes bigint := 0; v_each bigint;
BEGIN
    v_limit := CASE WHEN cardinality(p_limits) = 1 THEN p_limits[1] ELSE (SELECT sum(l) FROM unnest(p_limits) AS l) END;
    v_left := v_limit;
    SELECT NULL::@schema@.part[] AS parts, 0::bigint AS found, 0::bigint AS keyed, 0::bigint AS bytes, 0 AS largest,
        NULL::tid[] AS places, 0::smallint AS slot, 0::smallint AS last_slot INTO got;
    PERFORM FROM @schema@.@table@ e WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until <= v_now LIMIT 1;
    IF FOUND THEN
        PERFORM @schema@.@table@_run_out(p_queue, p_max, v_now);
        p_floors := '{}';  -- it may have merged what ran out into an entry that waits at another priority
        v_run_out := EXISTS (SELECT FROM @schema@.@table@ e
            WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until = 0);
    END IF;
    LOOP
        v_priority := NULL;
        v_next := v_from;
        FOR i IN 1 .. cardinality(p_floors) LOOP
            CONTINUE WHEN p_priorities[i] < v_next;
            IF v_next < p_priorities[i] THEN
                SELECT e.priority, e.process_at INTO v_priority, v_first FROM @schema@.@table@ e
                    WHERE e.queue = p_queue AND e.status = 'W' AND e.priority >= v_next AND e.priority < p_priorities[i]
                    ORDER BY e.priority, e.process_at, e.id LIMIT 1;
                EXIT WHEN FOUND;
            END IF;
            SELECT e.priority, e.process_at INTO v_priority, v_first FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'W' AND e.priority = p_priorities[i]
                    AND e.process_at >= p_floors[i]
                ORDER BY e.priority, e.process_at, e.id LIMIT 1;
            EXIT WHEN FOUND;
            v_next := p_priorities[i] + 1;
        END LOOP;
        IF v_priority IS NULL THEN
            SELECT e.priority, e.process_at INTO v_priority, v_first FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'W' AND e.priority >= v_next
                ORDER BY e.priority, e.process_at, e.id LIMIT 1;
        END IF;
        IF v_run_out THEN
            SELECT min(e.priority) INTO v_out FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until = 0 AND e.priority >= v_from;
            IF v_out < v_priority THEN
                v_first := 0;
            END IF;
            v_priority := least(v_priority, v_out);
        END IF;
        EXIT WHEN v_priority IS NULL OR (v_priority >= 200 AND v_fast);
        IF v_run_out AND v_priority = v_out THEN
            WITH out AS MATERIALIZED (
                SELECT e.slot, e.ctid, e.process_at, e.id, octet_length(e.data) AS size FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until = 0 AND e.priority = v_priority
                    AND e.expires_at > v_now
                ORDER BY e.process_at, e.id LIMIT v_left FOR UPDATE SKIP LOCKED
            ), waiting AS MATERIALIZED (
                SELECT e.slot, e.ctid, e.process_at, e.id, octet_length(e.data) AS size FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'W' AND e.priority = v_priority
                    AND e.process_at BETWEEN v_first AND v_now AND e.expires_at > v_now
                    AND (e.key IS NULL OR NOT p_serial OR (
                        SELECT true FROM @schema@.@table@ h
                        WHERE h.queue = p_queue AND h.status = 'P' AND h.keyhash = e.keyhash LIMIT 1) IS NULL)
                ORDER BY e.process_at, e.id LIMIT v_left FOR UPDATE SKIP LOCKED
            ), picked AS MATERIALIZED (
                SELECT s.slot, s.ctid FROM (
                    SELECT c.slot, c.ctid, sum(c.size) OVER (ORDER BY c.process_at, c.id) - c.size AS before
                    FROM (SELECT * FROM out UNION ALL SELECT * FROM waiting) AS c
                    ORDER BY c.process_at, c.id LIMIT v_left) AS s
                WHERE v_bytes + s.before < 64000000
            ), gone AS (
                DELETE FROM @schema@.@table@ e USING picked p WHERE e.slot = p.slot AND e.ctid = p.ctid
                RETURNING e.key, octet_length(e.data) AS size, (e.slot, e.id, e.keyhash, e.key, e.priority, e.timeouts, e.format, e.inserted_at,
                    e.process_at, e.expires_at, e.kind, e.data)::@schema@.part AS part
            )
            SELECT got.parts || array_agg(g.part) AS parts, count(*) AS found, count(g.key) AS keyed,
                coalesce(sum(g.size), 0)::bigint AS bytes, 0 AS largest, NULL::tid[] AS places, 0::smallint AS slot,
                0::smallint AS last_slot
            INTO got FROM gone g;
        ELSE
            -- Locked rows are deleted by their places: no join, and one table is opened where all lie in one.
            v_each := (64000000 - v_bytes) / v_left;
            SELECT CASE WHEN max(octet_length(p.data)) > v_each THEN got.parts ELSE got.parts ||
                array_agg((p.slot, p.id, p.keyhash, p.key, p.priority,
                p.timeouts, p.format, p.inserted_at, p.process_at, p.expires_at, p.kind, p.data)::@schema@.part)
                FILTER (WHERE octet_length(p.data) <= v_each) END AS parts, count(*) AS found, count(p.key) AS keyed,
                coalesce(sum(octet_length(p.data)), 0) AS bytes, coalesce(max(octet_length(p.data)), 0) AS largest,
                array_agg(p.ctid) AS places, min(p.slot) AS slot, max(p.slot) AS last_slot
            INTO got FROM (
                SELECT e.slot, e.ctid, e.id, e.keyhash, e.key, e.priority, e.timeouts, e.format, e.inserted_at,
                    e.process_at, e.expires_at, e.kind, e.data
                FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'W' AND e.priority = v_priority
                    AND e.process_at BETWEEN v_first AND v_now AND e.expires_at > v_now
                    AND (e.key IS NULL OR NOT p_serial OR (
                        SELECT true FROM @schema@.@table@ h
                        WHERE h.queue = p_queue AND h.status = 'P' AND h.keyhash = e.keyhash LIMIT 1) IS NULL)
                ORDER BY e.process_at, e.id LIMIT v_left FOR UPDATE SKIP LOCKED) AS p;
            IF got.largest > v_each THEN  -- what is locked here already is picked again, as far as it fits
                SELECT got.parts || array_agg((p.slot, p.id, p.keyhash, p.key, p.priority,
                p.timeouts, p.format, p.inserted_at, p.process_at, p.expires_at, p.kind, p.data)::@schema@.part)
                    AS parts, count(*) AS found, count(p.key) AS keyed, coalesce(max(p.bytes), 0)::bigint AS bytes,
                    0 AS largest, array_agg(p.ctid) AS places, min(p.slot) AS slot, max(p.slot) AS last_slot
                INTO got FROM (
                SELECT l.*, sum(octet_length(l.data)) OVER (ROWS UNBOUNDED PRECEDING) AS bytes FROM (
                SELECT e.slot, e.ctid, e.id, e.keyhash, e.key, e.priority, e.timeouts, e.format, e.inserted_at,
                    e.process_at, e.expires_at, e.kind, e.data
                FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'W' AND e.priority = v_priority
                    AND e.process_at BETWEEN v_first AND v_now AND e.expires_at > v_now
                    AND (e.key IS NULL OR NOT p_serial OR (
                        SELECT true FROM @schema@.@table@ h
                        WHERE h.queue = p_queue AND h.status = 'P' AND h.keyhash = e.keyhash LIMIT 1) IS NULL)
                ORDER BY e.process_at, e.id LIMIT v_left FOR UPDATE SKIP LOCKED) AS l) AS p
                WHERE v_bytes + p.bytes - octet_length(p.data) < 64000000;
            END IF;
            IF got.slot = got.last_slot THEN
                DELETE FROM @schema@.@table@ e WHERE e.slot = got.slot AND e.ctid = ANY (got.places);
            ELSIF got.found > 0 THEN
                DELETE FROM @schema@.@table@ e
                USING unnest(got.parts[v_all + 1 :], got.places) AS p (slot, id, keyhash, key, priority, timeouts,
                    format, inserted_at, process_at, expires_at, kind, data, place)
                WHERE e.slot = p.slot AND e.ctid = p.place;
            END IF;
        END IF;
        v_bytes := v_bytes + got.bytes;
        IF got.found > 0 THEN
            v_keyed := v_keyed + got.keyed;
            v_all := v_all + got.found;
            v_left := v_limit - v_all;
            v_fast := v_fast OR v_priority < 200;
        END IF;
        EXIT WHEN v_left = 0 OR v_priority = 255 OR v_bytes >= 64000000;
        v_from := v_priority + 1;
    END LOOP;
    FOR i IN 1 .. cardinality(p_limits) LOOP
        v_found := least(p_limits[i], v_all - v_dealt);
        EXIT WHEN v_found <= 0;
        IF p_together AND v_keyed = 0 AND v_found > 1 THEN
            INSERT INTO @schema@.@table@ (id, process_at, expires_at, inserted_at, started_at, lease_until, queue, slot,
                kind, status, keyhash, token, data, together, parts)
            VALUES ((got.parts)[v_dealt + 1].id, v_now, 9223372036854775807, v_now, v_now, v_now + p_lease, p_queue,
                (got.parts)[v_dealt + 1].slot, 0, 'P', p_tokens[i], p_tokens[i], '', v_found,
                CASE WHEN v_found = v_all THEN got.parts ELSE (got.parts)[v_dealt + 1 : v_dealt + v_found] END);
        ELSE
            v_got := (got.parts)[v_dealt + 1 : v_dealt + v_found];
            v_together := 0;
            IF p_together THEN
                SELECT count(*) INTO v_together FROM unnest(v_got) AS p WHERE p.key IS NULL;
            END IF;
            IF v_together > 1 THEN
                v_slot := v_got[1].slot;
                INSERT INTO @schema@.@table@ (id, process_at, expires_at, inserted_at, started_at, lease_until, queue,
                    slot, kind, status, keyhash, token, data, together, parts)
                VALUES (v_got[1].id, v_now, 9223372036854775807, v_now, v_now, v_now + p_lease, p_queue, v_slot, 0,
                    'P', p_tokens[i], p_tokens[i], '', v_together, ARRAY (
                        SELECT p::@schema@.part FROM unnest(v_got) AS p WHERE p.key IS NULL));
            ELSE
                v_together := 0;
            END IF;
            IF v_together < v_found THEN
                INSERT INTO @schema@.@table@ (id, process_at, expires_at, inserted_at, started_at, lease_until, queue,
                    format, slot, priority, timeouts, kind, status, serial, keyhash, token, key, data)
                SELECT p.id, p.process_at, p.expires_at, p.inserted_at, v_now, v_now + p_lease, p_queue, p.format,
                    p.slot, p.priority, p.timeouts, p.kind, 'P', nullif(p_serial, false), p.keyhash, p_tokens[i],
                    p.key, p.data
                FROM unnest(v_got) AS p WHERE v_together = 0 OR p.key IS NOT NULL;
            END IF;
        END IF;
        v_dealt := v_dealt + v_found;
    END LOOP;
    -- A claim's entries without a key lie together where there are two or more: whoever deals them out can count them.
    RETURN QUERY SELECT p.slot, p.id, uuid_send(p.keyhash), p.key, p.priority, p.timeouts, p.format, p.inserted_at,
        p.process_at, p.expires_at, v_now, v_now + p_lease, p.kind, p.data
    FROM unnest(got.parts) AS p;
END $claim$;
