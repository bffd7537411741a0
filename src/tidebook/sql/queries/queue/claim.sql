-- Priority by priority, so that entries with later dates are never walked over. Slow ones only when nothing else came.
-- The entry that holds a key is looked for in the statement that picks: with one snapshot, a waiting entry of a key is
-- never seen without the entry that holds it. A scalar subquery, since NOT EXISTS would be planned as a join of all.
CREATE OR REPLACE FUNCTION @schema@.@table@_claim(
    p_queue integer, p_limit integer, p_lease bigint, p_token uuid, p_max smallint, p_serial boolean
) RETURNS TABLE (slot smallint, id bigint, keyhash bytea, key text, priority smallint, timeouts smallint,
    format integer, inserted_at bigint, process_at bigint, expires_at bigint, started_at bigint, lease_until bigint,
    kind smallint, data bytea)
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $claim$
#variable_conflict use_column
DECLARE
    v_now bigint := @now@; v_left integer := p_limit; v_from smallint := 0; v_priority smallint; v_out smallint;
    v_got integer; v_run_out boolean; v_fast boolean := false;
BEGIN
    IF EXISTS (SELECT FROM @schema@.@table@ e
        WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until BETWEEN 1 AND v_now)
    THEN
        PERFORM @schema@.@table@_run_out(p_queue, p_max, v_now);
    END IF;
    v_run_out := EXISTS (SELECT FROM @schema@.@table@ e
        WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until = 0);
    LOOP
        SELECT e.priority INTO v_priority FROM @schema@.@table@ e
            WHERE e.queue = p_queue AND e.status = 'W' AND e.priority >= v_from
            ORDER BY e.priority, e.process_at, e.id LIMIT 1;
        IF v_run_out THEN
            SELECT min(e.priority) INTO v_out FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until = 0 AND e.priority >= v_from;
            v_priority := least(v_priority, v_out);
        END IF;
        EXIT WHEN v_priority IS NULL OR (v_priority >= 200 AND v_fast);
        IF v_run_out AND v_priority = v_out THEN
            RETURN QUERY
            WITH out AS MATERIALIZED (
                SELECT e.slot, e.ctid, e.process_at, e.id FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until = 0 AND e.priority = v_priority
                    AND e.expires_at > v_now
                ORDER BY e.process_at, e.id LIMIT v_left FOR UPDATE SKIP LOCKED
            ), waiting AS MATERIALIZED (
                SELECT e.slot, e.ctid, e.process_at, e.id FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'W' AND e.priority = v_priority AND e.process_at <= v_now
                    AND e.expires_at > v_now
                    AND (e.key IS NULL OR NOT p_serial OR (
                        SELECT true FROM @schema@.@table@ h
                        WHERE h.queue = p_queue AND h.status = 'P' AND h.keyhash = e.keyhash LIMIT 1) IS NULL)
                ORDER BY e.process_at, e.id LIMIT v_left FOR UPDATE SKIP LOCKED
            ), picked AS MATERIALIZED (
                SELECT c.slot, c.ctid FROM (SELECT * FROM out UNION ALL SELECT * FROM waiting) AS c
                ORDER BY c.process_at, c.id LIMIT v_left
            )
            UPDATE @schema@.@table@ e SET status = 'P', token = p_token, started_at = v_now,
                lease_until = v_now + p_lease, serial = nullif(p_serial, false)
            FROM picked p WHERE e.slot = p.slot AND e.ctid = p.ctid
            RETURNING e.slot, e.id, uuid_send(e.keyhash), e.key, e.priority, e.timeouts, e.format, e.inserted_at,
                e.process_at, e.expires_at, e.started_at, e.lease_until, e.kind, e.data;
        ELSE
            RETURN QUERY
            WITH picked AS MATERIALIZED (
                SELECT e.slot, e.ctid FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'W' AND e.priority = v_priority AND e.process_at <= v_now
                    AND e.expires_at > v_now
                    AND (e.key IS NULL OR NOT p_serial OR (
                        SELECT true FROM @schema@.@table@ h
                        WHERE h.queue = p_queue AND h.status = 'P' AND h.keyhash = e.keyhash LIMIT 1) IS NULL)
                ORDER BY e.process_at, e.id LIMIT v_left FOR UPDATE SKIP LOCKED
            )
            UPDATE @schema@.@table@ e SET status = 'P', token = p_token, started_at = v_now,
                lease_until = v_now + p_lease, serial = nullif(p_serial, false)
            FROM picked p WHERE e.slot = p.slot AND e.ctid = p.ctid
            RETURNING e.slot, e.id, uuid_send(e.keyhash), e.key, e.priority, e.timeouts, e.format, e.inserted_at,
                e.process_at, e.expires_at, e.started_at, e.lease_until, e.kind, e.data;
        END IF;
        GET DIAGNOSTICS v_got = ROW_COUNT;
        v_left := v_left - v_got;
        v_fast := v_fast OR (v_got > 0 AND v_priority < 200);
        EXIT WHEN v_left = 0 OR v_priority = 255;
        v_from := v_priority + 1;
    END LOOP;
END $claim$;
