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
-- What is handed out must fit into memory: no more than 64 MB are taken.
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
    v_run_out boolean := false; v_fast boolean := false; v_slot smallint; v_together integer;
    v_got @schema@.part[]; v_parts @schema@.part[]; v_keyed_here integer; v_keyed integer := 0; v_dealt integer := 0;
    v_bytes_here bigint; v_bytes bigint := 0; v_slots smallint[]; v_places tid[]; v_one_table boolean;
BEGIN
    v_limit := CASE WHEN cardinality(p_limits) = 1 THEN p_limits[1] ELSE (SELECT sum(l) FROM unnest(p_limits) AS l) END;
    v_left := v_limit;
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
            SELECT array_agg(g.part), count(g.key), coalesce(sum(g.size), 0) INTO v_got, v_keyed_here, v_bytes_here
            FROM gone g;
        ELSE
            -- Locked rows are deleted by their places: no join, and one table is opened where all lie in one.
            SELECT array_agg(p.slot), array_agg(p.ctid), count(p.key), array_agg((p.slot, p.id, p.keyhash, p.key,
                p.priority, p.timeouts, p.format, p.inserted_at, p.process_at, p.expires_at, p.kind,
                p.data)::@schema@.part), min(p.slot) = max(p.slot), coalesce(max(p.bytes), 0)
            INTO v_slots, v_places, v_keyed_here, v_got, v_one_table, v_bytes_here FROM (
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
            IF v_one_table THEN
                DELETE FROM @schema@.@table@ e WHERE e.slot = v_slots[1] AND e.ctid = ANY (v_places);
            ELSIF v_got IS NOT NULL THEN
                DELETE FROM @schema@.@table@ e USING unnest(v_slots, v_places) AS p (slot, place)
                WHERE e.slot = p.slot AND e.ctid = p.place;
            END IF;
        END IF;
        v_bytes := v_bytes + v_bytes_here;
        IF v_got IS NOT NULL THEN
            v_parts := CASE WHEN v_parts IS NULL THEN v_got ELSE v_parts || v_got END;
            v_keyed := v_keyed + v_keyed_here;
            v_left := v_limit - cardinality(v_parts);
            v_fast := v_fast OR v_priority < 200;
        END IF;
        EXIT WHEN v_left = 0 OR v_priority = 255 OR v_bytes >= 64000000;
        v_from := v_priority + 1;
    END LOOP;
    FOR i IN 1 .. cardinality(p_limits) LOOP
        EXIT WHEN v_dealt >= coalesce(cardinality(v_parts), 0);
        v_got := CASE WHEN cardinality(p_limits) = 1 THEN v_parts ELSE v_parts[v_dealt + 1 : v_dealt + p_limits[i]] END;
        v_dealt := v_dealt + cardinality(v_got);
        v_together := 0;
        IF p_together THEN
            IF v_keyed > 0 THEN
                SELECT count(*) INTO v_together FROM unnest(v_got) AS p WHERE p.key IS NULL;
            ELSE
                v_together := cardinality(v_got);
            END IF;
        END IF;
        IF v_together > 1 THEN
            v_slot := v_got[1].slot;
            INSERT INTO @schema@.@table@ (id, process_at, expires_at, inserted_at, started_at, lease_until, queue, slot,
                kind, status, keyhash, token, data, together, parts)
            VALUES (v_got[1].id, v_now, 9223372036854775807, v_now, v_now, v_now + p_lease, p_queue, v_slot, 0, 'P',
                p_tokens[i], p_tokens[i], '', v_together, CASE WHEN v_keyed = 0 THEN v_got ELSE ARRAY (
                    SELECT p::@schema@.part FROM unnest(v_got) AS p WHERE p.key IS NULL) END);
        ELSE
            v_together := 0;
        END IF;
        IF v_together < cardinality(v_got) THEN
            INSERT INTO @schema@.@table@ (id, process_at, expires_at, inserted_at, started_at, lease_until, queue,
                format, slot, priority, timeouts, kind, status, serial, keyhash, token, key, data)
            SELECT p.id, p.process_at, p.expires_at, p.inserted_at, v_now, v_now + p_lease, p_queue, p.format, p.slot,
                p.priority, p.timeouts, p.kind, 'P', nullif(p_serial, false), p.keyhash, p_tokens[i], p.key, p.data
            FROM unnest(v_got) AS p WHERE v_together = 0 OR p.key IS NOT NULL;
        END IF;
    END LOOP;
    -- A claim's entries without a key lie together where there are two or more: whoever deals them out can count them.
    RETURN QUERY SELECT p.slot, p.id, uuid_send(p.keyhash), p.key, p.priority, p.timeouts, p.format, p.inserted_at,
        p.process_at, p.expires_at, v_now, v_now + p_lease, p.kind, p.data
    FROM unnest(v_parts) AS p;
END $claim$;
