-- Return entries to the queue, in the current partition. If an open transaction has put the same key, the entry stays
-- in its row without a token until its delay is over: then a claim finds its lease expired.
CREATE OR REPLACE FUNCTION @schema@.@table@_fail(
    p_queue integer, p_max smallint, p_hashes uuid[], p_tokens uuid[], p_delays bigint[], p_reasons text[]
) RETURNS text[]
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET lock_timeout = '50ms' AS $fail$
DECLARE
    v_now bigint; v_slot smallint; v_timeouts smallint; v_at bigint; v_outcome text; v_outcomes text[] := '{}';
    r record; w record;
BEGIN
    PERFORM pg_current_xact_id();  -- before the clock is read, as in put.sql
    v_now := @later@;
    PERFORM pg_advisory_xact_lock_shared('@schema@.@table@'::regclass::oid::integer, 1);
    SELECT p.current_slot INTO STRICT v_slot FROM @schema@.period p WHERE p.table_name = '@table@';
    PERFORM @schema@.@table@_unpack(p_queue, p_tokens);
    FOR i IN 1 .. cardinality(p_hashes) LOOP
        SELECT e.ctid, e.* INTO r FROM @schema@.@table@ e
        WHERE e.queue = p_queue AND e.status = 'P' AND e.keyhash = p_hashes[i] AND e.token = p_tokens[i] FOR UPDATE;
        IF NOT FOUND THEN
            v_outcomes := v_outcomes || 'lost'::text;
            CONTINUE;
        END IF;
        -- a lease that expired was counted already
        v_timeouts := CASE WHEN r.lease_until = 0 THEN r.timeouts ELSE r.timeouts + 1 END;
        v_at := v_now + p_delays[i];
        IF r.expires_at <= v_now THEN
            DELETE FROM @schema@.@table@ e WHERE e.slot = r.slot AND e.ctid = r.ctid;
            v_outcomes := v_outcomes || 'expired'::text;
            CONTINUE;
        END IF;
        IF v_timeouts > p_max THEN
            INSERT INTO @schema@.dead (queue, raised_at, inserted_at, expires_at, format, priority, timeouts, kind,
                keyhash, key, reason, data)
            VALUES (p_queue, v_now, r.inserted_at, r.expires_at, r.format, r.priority, v_timeouts, r.kind, r.keyhash,
                r.key, p_reasons[i], r.data);
            DELETE FROM @schema@.@table@ e WHERE e.slot = r.slot AND e.ctid = r.ctid;
            v_outcomes := v_outcomes || 'dead'::text;
            CONTINUE;
        END IF;
        BEGIN
            v_outcome := 'waiting';
            DELETE FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'W' AND e.keyhash = r.keyhash AND e.expires_at <= v_now;
            SELECT e.slot, e.ctid INTO w FROM @schema@.@table@ e
                WHERE e.queue = p_queue AND e.status = 'W' AND e.keyhash = r.keyhash FOR UPDATE NOWAIT;
            IF FOUND THEN
                UPDATE @schema@.@table@ e SET id = r.id, inserted_at = r.inserted_at, timeouts = v_timeouts,
                    expires_at = greatest(e.expires_at, r.expires_at), priority = least(e.priority, r.priority),
                    process_at = greatest(e.process_at, v_at)
                WHERE e.slot = w.slot AND e.ctid = w.ctid;
                DELETE FROM @schema@.@table@ e WHERE e.slot = r.slot AND e.ctid = r.ctid;
                v_outcome := 'merged';
            ELSE
                UPDATE @schema@.@table@ e SET slot = v_slot, status = 'W', token = NULL, started_at = NULL,
                    lease_until = NULL, serial = NULL, timeouts = v_timeouts, process_at = v_at
                WHERE e.slot = r.slot AND e.ctid = r.ctid;
            END IF;
        EXCEPTION WHEN unique_violation OR lock_not_available THEN
            UPDATE @schema@.@table@ e SET token = NULL, lease_until = v_at, timeouts = v_timeouts - 1
                WHERE e.slot = r.slot AND e.ctid = r.ctid;
        END;
        v_outcomes := v_outcomes || v_outcome;
        PERFORM @schema@.notify_sleepers(p_queue, v_at, v_now);
    END LOOP;
    RETURN v_outcomes;
END $fail$;
