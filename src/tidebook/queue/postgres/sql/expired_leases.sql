-- Expire leases. The entry keeps its row and status P, since changing the status to W could wait for an open
-- transaction that has put the same key. It is merged into the waiting entry of its key, if that one is committed and
-- not locked.
CREATE OR REPLACE FUNCTION @schema@.@table@_merge_into_waiting(
    p_queue integer, p_now bigint, p_timeouts smallint, p_slot smallint, p_ctid tid
) RETURNS boolean LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $merge$
DECLARE
    r record; w record;
BEGIN
    SELECT e.* INTO r FROM @schema@.@table@ e WHERE e.slot = p_slot AND e.ctid = p_ctid;
    SELECT e.slot, e.ctid INTO w FROM @schema@.@table@ e
        WHERE e.queue = p_queue AND e.status = 'W' AND e.keyhash = r.keyhash AND e.expires_at > p_now
        FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE @schema@.@table@ e SET id = r.id, inserted_at = r.inserted_at, timeouts = p_timeouts,
        expires_at = greatest(e.expires_at, r.expires_at), priority = least(e.priority, r.priority),
        process_at = greatest(e.process_at, r.process_at)
    WHERE e.slot = w.slot AND e.ctid = w.ctid;
    DELETE FROM @schema@.@table@ e WHERE e.slot = p_slot AND e.ctid = p_ctid;
    RETURN true;
END $merge$;

CREATE OR REPLACE FUNCTION @schema@.@table@_expire_leases(
    p_queue integer, p_max smallint, p_now bigint, OUT leases integer, OUT dead integer, OUT expired integer
) LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $expire_leases$
DECLARE
    r record;
BEGIN
    leases := 0; dead := 0; expired := 0;
    PERFORM @schema@.@table@_unpack(p_queue, ARRAY (
        SELECT e.keyhash FROM @schema@.@table@ e
        WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until BETWEEN 1 AND p_now AND e.together IS NOT NULL
        ORDER BY e.lease_until LIMIT 100 FOR UPDATE SKIP LOCKED));
    FOR r IN
        SELECT e.slot, e.ctid, e.* FROM @schema@.@table@ e
        WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until BETWEEN 1 AND p_now
            AND e.together IS NULL
        ORDER BY e.lease_until LIMIT 1000 FOR UPDATE SKIP LOCKED
    LOOP
        leases := leases + 1;
        IF r.expires_at <= p_now THEN
            expired := expired + 1;
            DELETE FROM @schema@.@table@ e WHERE e.slot = r.slot AND e.ctid = r.ctid;
            CONTINUE;
        END IF;
        IF r.timeouts >= p_max THEN
            dead := dead + 1;
            INSERT INTO @schema@.dead (queue, raised_at, inserted_at, expires_at, format, priority, timeouts, kind,
                keyhash, key, reason, data)
            VALUES (p_queue, p_now, r.inserted_at, r.expires_at, r.format, r.priority, r.timeouts + 1, r.kind,
                r.keyhash, r.key, 'its lease ran out', r.data);
            DELETE FROM @schema@.@table@ e WHERE e.slot = r.slot AND e.ctid = r.ctid;
            CONTINUE;
        END IF;
        CONTINUE WHEN r.key IS NOT NULL
            AND @schema@.@table@_merge_into_waiting(p_queue, p_now, (r.timeouts + 1)::smallint, r.slot, r.ctid);
        UPDATE @schema@.@table@ e SET lease_until = 0, timeouts = r.timeouts + 1
            WHERE e.slot = r.slot AND e.ctid = r.ctid;
    END LOOP;
END $expire_leases$;

-- Expire leases and waiting entries; called periodically.
CREATE OR REPLACE FUNCTION @schema@.@table@_sweep(
    p_queue integer, p_max smallint, OUT expired integer, OUT run_out integer, OUT dead integer, OUT next_at bigint,
    OUT now_ms bigint
) LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $sweep$
DECLARE
    v_expired integer;
BEGIN
    now_ms := @now@;
    SELECT o.leases, o.dead, o.expired INTO run_out, dead, v_expired
        FROM @schema@.@table@_expire_leases(p_queue, p_max, now_ms) o;
    -- Merge entries whose lease expired while an open transaction had put their key, if it has committed since.
    PERFORM @schema@.@table@_merge_into_waiting(p_queue, now_ms, o.timeouts, o.slot, o.place) FROM (
        SELECT e.timeouts, e.slot, e.ctid AS place FROM @schema@.@table@ e
        WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until = 0 AND e.key IS NOT NULL AND (
            SELECT true FROM @schema@.@table@ w
            WHERE w.queue = p_queue AND w.status = 'W' AND w.keyhash = e.keyhash AND w.expires_at > now_ms LIMIT 1)
        LIMIT 1000 FOR UPDATE SKIP LOCKED) AS o;
    DELETE FROM @schema@.@table@ e
        WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until = 0 AND e.expires_at <= now_ms;
    WITH picked AS MATERIALIZED (
        SELECT e.slot, e.ctid FROM @schema@.@table@ e
        WHERE e.queue = p_queue AND e.status = 'W' AND e.expires_at < 9223372036854775807 AND e.expires_at <= now_ms
        ORDER BY e.expires_at LIMIT 10000 FOR UPDATE SKIP LOCKED
    )
    DELETE FROM @schema@.@table@ e USING picked p WHERE e.slot = p.slot AND e.ctid = p.ctid;
    GET DIAGNOSTICS expired = ROW_COUNT;
    expired := expired + v_expired;
    SELECT least(
        (SELECT e.expires_at FROM @schema@.@table@ e
            WHERE e.queue = p_queue AND e.status = 'W' AND e.expires_at < 9223372036854775807
            ORDER BY e.expires_at LIMIT 1),
        (SELECT e.lease_until FROM @schema@.@table@ e
            WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until > 0 ORDER BY e.lease_until LIMIT 1),
        9223372036854775807) INTO next_at;
END $sweep$;
