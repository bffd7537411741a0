-- Put entries, each merged into the waiting entry of its key. In the current partition ON CONFLICT merges; an entry in an
-- older partition, or with an expired lease (which counts as waiting), is deleted and its values are used here.
-- The entries are sorted by keyhash, so that two puts never deadlock; `p_order` is their order in the call.
CREATE OR REPLACE FUNCTION @schema@.@table@_put(
    p_queue integer, p_inserted_at bigint, p_format integer, p_hashes uuid[], p_order smallint[], p_priorities smallint[],
    p_process bigint[], p_expires bigint[], p_kinds smallint[], p_keys text[], p_data bytea[], p_traces text[],
    OUT now_ms bigint, OUT merged bigint
) LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $put$
DECLARE
    v_slot smallint; v_draining smallint[]; v_base bigint; v_first_date bigint; v_any_expired boolean;
BEGIN
    now_ms := @now@;
    PERFORM pg_advisory_xact_lock_shared('@schema@.@table@'::regclass::oid::integer, 1);
    IF current_setting('transaction_isolation') = 'read committed' THEN
        SELECT p.current_slot, p.draining INTO STRICT v_slot, v_draining
            FROM @schema@.period p WHERE p.table_name = '@table@';
    ELSE  -- an older snapshot may miss the current partition: then this fails and is retried
        SELECT p.current_slot, p.draining INTO STRICT v_slot, v_draining
            FROM @schema@.period p WHERE p.table_name = '@table@' FOR SHARE;
    END IF;
    v_base := nextval('@schema@.@table@_id');
    v_any_expired := EXISTS (SELECT FROM @schema@.@table@ e
        WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until = 0);
    WITH older AS (
        DELETE FROM @schema@.@table@ d WHERE v_draining <> '{}' AND d.queue = p_queue AND d.status = 'W'
            AND d.slot <> v_slot AND d.keyhash = ANY (p_hashes)
        RETURNING d.keyhash, d.id, d.inserted_at, d.expires_at, d.priority, d.process_at
    ), expired AS (  -- the sum keeps the planner from using the index by lease
        DELETE FROM @schema@.@table@ d WHERE v_any_expired AND d.queue = p_queue AND d.status = 'P'
            AND d.keyhash = ANY (p_hashes) AND d.lease_until + 0 = 0
        RETURNING d.keyhash, d.id, d.inserted_at, d.expires_at, d.priority, d.process_at
    ), old AS (
        SELECT a.keyhash, min(a.id) AS id, min(a.inserted_at) AS inserted_at, max(a.expires_at) AS expires_at,
            min(a.priority) AS priority, max(a.process_at) AS process_at
        FROM (SELECT * FROM older UNION ALL SELECT * FROM expired) AS a
        WHERE a.expires_at > now_ms GROUP BY a.keyhash
    ), added AS (
        INSERT INTO @schema@.@table@ AS e (id, process_at, expires_at, inserted_at, queue, format, slot, priority,
            kind, keyhash, key, data, trace)
        SELECT coalesce(o.id, v_base + u.o), greatest(u.process_at, o.process_at, now_ms),
            greatest(u.expires_at, o.expires_at), coalesce(o.inserted_at, p_inserted_at), p_queue, p_format, v_slot,
            least(u.priority, o.priority), u.kind, u.keyhash, u.key, u.data, u.trace
        FROM unnest(p_hashes, p_order, p_priorities, p_process, p_expires, p_kinds, p_keys, p_data, p_traces)
            AS u (keyhash, o, priority, process_at, expires_at, kind, key, data, trace)
        LEFT JOIN old o ON o.keyhash = u.keyhash
        ORDER BY u.keyhash
        ON CONFLICT (queue, keyhash, slot) WHERE status = 'W' AND keyhash IS NOT NULL DO UPDATE SET
            id = CASE WHEN e.expires_at <= now_ms THEN excluded.id ELSE e.id END,
            inserted_at = CASE WHEN e.expires_at <= now_ms THEN excluded.inserted_at ELSE e.inserted_at END,
            expires_at = CASE WHEN e.expires_at <= now_ms THEN excluded.expires_at
                ELSE greatest(e.expires_at, excluded.expires_at) END,
            priority = CASE WHEN e.expires_at <= now_ms THEN excluded.priority
                ELSE least(e.priority, excluded.priority) END,
            process_at = CASE WHEN e.expires_at <= now_ms THEN excluded.process_at
                ELSE greatest(e.process_at, excluded.process_at) END,
            timeouts = 0, format = excluded.format, kind = excluded.kind, data = excluded.data,
            trace = excluded.trace
        RETURNING e.process_at, e.id NOT BETWEEN v_base AND v_base + 1023 AS was_waiting
    )
    SELECT count(*) FILTER (WHERE a.was_waiting), min(a.process_at) INTO merged, v_first_date FROM added a;
    PERFORM @schema@.notify_sleepers(p_queue, v_first_date, now_ms);
END $put$;
