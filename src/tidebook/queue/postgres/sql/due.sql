-- Return when the queue next has work: a loose index scan over the priorities, with a probe and the next dates of each.
CREATE OR REPLACE FUNCTION @schema@.@table@_due(
    p_queue integer, p_serial boolean, OUT now_ms bigint, OUT lease_end bigint, OUT ready boolean, OUT held boolean,
    OUT upcoming bigint[], OUT paused boolean
) LANGUAGE plpgsql STABLE SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $due$
DECLARE
    v_min_priority smallint := 0; v_priority smallint; v_first_date bigint;
BEGIN
    now_ms := @now@;
    held := false;
    upcoming := '{}';
    paused := EXISTS (SELECT FROM @schema@.queue q WHERE q.id = p_queue AND q.paused_at IS NOT NULL);
    IF paused THEN
        lease_end := 9223372036854775807;
        ready := false;
        RETURN;
    END IF;
    SELECT e.lease_until INTO lease_end FROM @schema@.@table@ e
        WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until IS NOT NULL
            AND (e.lease_until > 0 OR e.expires_at > now_ms)
        ORDER BY e.lease_until LIMIT 1;
    lease_end := coalesce(lease_end, 9223372036854775807);
    ready := lease_end <= now_ms;
    LOOP
        SELECT e.priority, e.process_at INTO v_priority, v_first_date FROM @schema@.@table@ e
            WHERE e.queue = p_queue AND e.status = 'W' AND e.priority >= v_min_priority
            ORDER BY e.priority, e.process_at, e.id LIMIT 1;
        EXIT WHEN NOT FOUND;
        IF v_first_date <= now_ms AND NOT ready THEN
            ready := EXISTS (SELECT FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'W' AND e.priority = v_priority AND e.process_at <= now_ms
                AND e.expires_at > now_ms AND (e.key IS NULL OR NOT p_serial OR (
                    SELECT true FROM @schema@.@table@ h
                    WHERE h.queue = p_queue AND h.status = 'P' AND h.keyhash = e.keyhash LIMIT 1) IS NULL));
            held := held OR NOT ready AND EXISTS (SELECT FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'W' AND e.priority = v_priority AND e.process_at <= now_ms
                AND e.expires_at > now_ms);
        END IF;
        upcoming := upcoming || ARRAY (SELECT e.process_at FROM @schema@.@table@ e
            WHERE e.queue = p_queue AND e.status = 'W' AND e.priority = v_priority AND e.process_at > now_ms
            ORDER BY e.priority, e.process_at, e.id LIMIT 200);
        EXIT WHEN v_priority = 255;
        v_min_priority := v_priority + 1;
    END LOOP;
END $due$;
