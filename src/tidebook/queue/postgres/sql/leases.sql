-- A bundle is one row with all the entries without a key of one claim, so that finishing them deletes one row.
-- To handle only some of its entries, or to expire its lease, unpack it first into one row for each entry.
CREATE OR REPLACE FUNCTION @schema@.@table@_unpack(p_queue integer, p_tokens uuid[]) RETURNS void
LANGUAGE sql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $unpack$
    WITH bundle AS (
        DELETE FROM @schema@.@table@ e
        WHERE e.queue = p_queue AND e.status = 'P' AND e.keyhash = ANY (p_tokens) AND e.together IS NOT NULL
        RETURNING e.slot, e.token, e.started_at, e.lease_until, e.parts
    )
    INSERT INTO @schema@.@table@ (id, process_at, expires_at, inserted_at, started_at, lease_until, queue, format, slot,
        priority, timeouts, kind, status, keyhash, token, data, trace)
    SELECT p.id, p.process_at, p.expires_at, p.inserted_at, b.started_at, b.lease_until, p_queue, p.format, b.slot,
        p.priority, p.timeouts, p.kind, 'P', p.keyhash, b.token, p.data, p.trace
    FROM bundle b, unnest(b.parts) AS p
$unpack$;

-- Finish entries, or extend their leases. A hash and its token have the same position in the two arrays; both must
-- match. IS TRUE makes a hashed subplan of the pairs: a join would be planned by outdated statistics. Bundles of which
-- only some entries are given are in p_bundles.
CREATE OR REPLACE FUNCTION @schema@.@table@_finish(p_queue integer, p_bundles uuid[], p_hashes uuid[], p_tokens uuid[])
RETURNS SETOF uuid
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $finish$
BEGIN
    IF p_bundles <> '{}' THEN PERFORM @schema@.@table@_unpack(p_queue, p_bundles); END IF;
    RETURN QUERY DELETE FROM @schema@.@table@ e
    WHERE e.queue = p_queue AND e.status = 'P' AND e.keyhash = ANY (p_hashes)
        AND ((e.keyhash, e.token) IN (SELECT h, t FROM unnest(p_hashes, p_tokens) AS pair (h, t))) IS TRUE
    RETURNING e.keyhash;
END $finish$;

CREATE OR REPLACE FUNCTION @schema@.@table@_heartbeat(
    p_lease bigint, p_queue integer, p_bundles uuid[], p_hashes uuid[], p_tokens uuid[]
) RETURNS TABLE (keyhash uuid, lease_until bigint)
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $heartbeat$
BEGIN
    IF p_bundles <> '{}' THEN PERFORM @schema@.@table@_unpack(p_queue, p_bundles); END IF;
    RETURN QUERY UPDATE @schema@.@table@ e SET lease_until = @now@ + p_lease
    WHERE e.queue = p_queue AND e.status = 'P' AND e.keyhash = ANY (p_hashes)
        AND ((e.keyhash, e.token) IN (SELECT h, t FROM unnest(p_hashes, p_tokens) AS pair (h, t))) IS TRUE
    RETURNING e.keyhash, e.lease_until;
END $heartbeat$;

-- Delete an entry that has expired, or that timed out or failed too often and becomes a dead letter; return which of
-- the two, or null if neither applies.
CREATE OR REPLACE FUNCTION @schema@.@table@_retire(
    p_now bigint, p_timeouts integer, p_max smallint, p_reason text, p_slot smallint, p_ctid tid
) RETURNS text LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $retire$
DECLARE
    v_outcome text;
BEGIN
    SELECT CASE WHEN e.expires_at <= p_now THEN 'expired' WHEN p_timeouts > p_max THEN 'dead' END INTO v_outcome
        FROM @schema@.@table@ e WHERE e.slot = p_slot AND e.ctid = p_ctid;
    IF v_outcome = 'dead' THEN
        INSERT INTO @schema@.dead (queue, raised_at, inserted_at, expires_at, format, priority, timeouts, kind, keyhash,
            key, reason, data, trace)
        SELECT e.queue, p_now, e.inserted_at, e.expires_at, e.format, e.priority, p_timeouts, e.kind, e.keyhash, e.key,
            p_reason, e.data, e.trace FROM @schema@.@table@ e WHERE e.slot = p_slot AND e.ctid = p_ctid;
    END IF;
    IF v_outcome IS NOT NULL THEN
        DELETE FROM @schema@.@table@ e WHERE e.slot = p_slot AND e.ctid = p_ctid;
    END IF;
    RETURN v_outcome;
END $retire$;

-- Merge an entry into the waiting entry of its key, if that one is committed and not locked; p_at is its process date.
CREATE OR REPLACE FUNCTION @schema@.@table@_merge_into_waiting(
    p_now bigint, p_timeouts integer, p_at bigint, p_slot smallint, p_ctid tid
) RETURNS boolean LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $merge$
DECLARE
    r record; w record;
BEGIN
    SELECT e.* INTO r FROM @schema@.@table@ e WHERE e.slot = p_slot AND e.ctid = p_ctid;
    SELECT e.slot, e.ctid INTO w FROM @schema@.@table@ e
        WHERE e.queue = r.queue AND e.status = 'W' AND e.keyhash = r.keyhash AND e.expires_at > p_now
        FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE @schema@.@table@ e SET id = r.id, inserted_at = r.inserted_at, timeouts = p_timeouts,
        expires_at = greatest(e.expires_at, r.expires_at), priority = least(e.priority, r.priority),
        process_at = greatest(e.process_at, p_at)
    WHERE e.slot = w.slot AND e.ctid = w.ctid;
    DELETE FROM @schema@.@table@ e WHERE e.slot = p_slot AND e.ctid = p_ctid;
    RETURN true;
END $merge$;

-- Expire leases. The entry keeps its row and status P, since changing the status to W could wait for an open
-- transaction that has put the same key.
CREATE OR REPLACE FUNCTION @schema@.@table@_expire_leases(
    p_queue integer, p_max smallint, p_now bigint, OUT leases integer, OUT dead integer, OUT expired integer
) LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $expire_leases$
DECLARE
    r record; v_outcome text;
BEGIN
    leases := 0; dead := 0; expired := 0;
    PERFORM @schema@.@table@_unpack(p_queue, ARRAY (
        SELECT e.keyhash FROM @schema@.@table@ e
        WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until BETWEEN 1 AND p_now AND e.together IS NOT NULL
        ORDER BY e.lease_until LIMIT 100 FOR UPDATE SKIP LOCKED));
    FOR r IN
        SELECT e.slot, e.ctid, e.key, e.timeouts + 1 AS timeouts, e.process_at FROM @schema@.@table@ e
        WHERE e.queue = p_queue AND e.status = 'P' AND e.lease_until BETWEEN 1 AND p_now AND e.together IS NULL
        ORDER BY e.lease_until LIMIT 1000 FOR UPDATE SKIP LOCKED
    LOOP
        leases := leases + 1;
        v_outcome := @schema@.@table@_retire(p_now, r.timeouts, p_max, 'its lease ran out', r.slot, r.ctid);
        dead := dead + (v_outcome IS NOT DISTINCT FROM 'dead')::integer;
        expired := expired + (v_outcome IS NOT DISTINCT FROM 'expired')::integer;
        CONTINUE WHEN v_outcome IS NOT NULL OR r.key IS NOT NULL
            AND @schema@.@table@_merge_into_waiting(p_now, r.timeouts, r.process_at, r.slot, r.ctid);
        UPDATE @schema@.@table@ e SET lease_until = 0, timeouts = r.timeouts WHERE e.slot = r.slot AND e.ctid = r.ctid;
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
    PERFORM @schema@.@table@_merge_into_waiting(now_ms, o.timeouts, o.process_at, o.slot, o.place) FROM (
        SELECT e.timeouts, e.process_at, e.slot, e.ctid AS place FROM @schema@.@table@ e
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

-- Return entries to the queue, in the current partition. If an open transaction has put the same key, the entry stays
-- in its row without a token until its delay is over: then a claim finds its lease expired.
CREATE OR REPLACE FUNCTION @schema@.@table@_fail(
    p_queue integer, p_max smallint, p_hashes uuid[], p_tokens uuid[], p_delays bigint[], p_reasons text[]
) RETURNS text[]
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET lock_timeout = '50ms' AS $fail$
DECLARE
    v_now bigint := @now@; v_slot smallint; v_at bigint; v_outcome text; v_outcomes text[] := '{}'; r record;
BEGIN
    PERFORM pg_advisory_xact_lock_shared('@schema@.@table@'::regclass::oid::integer, 1);
    SELECT p.current_slot INTO STRICT v_slot FROM @schema@.period p WHERE p.table_name = '@table@';
    PERFORM @schema@.@table@_unpack(p_queue, p_tokens);
    FOR i IN 1 .. cardinality(p_hashes) LOOP
        -- a lease that expired was counted already
        SELECT e.slot, e.ctid, e.keyhash, e.timeouts + (e.lease_until > 0)::integer AS timeouts INTO r
        FROM @schema@.@table@ e
        WHERE e.queue = p_queue AND e.status = 'P' AND e.keyhash = p_hashes[i] AND e.token = p_tokens[i] FOR UPDATE;
        v_outcome := CASE WHEN FOUND
            THEN @schema@.@table@_retire(v_now, r.timeouts, p_max, p_reasons[i], r.slot, r.ctid) ELSE 'lost' END;
        IF v_outcome IS NULL THEN
            v_at := v_now + p_delays[i];
            BEGIN  -- the waiting entry of its key may be in an older partition, where no index prevents a second one
                PERFORM FROM @schema@.@table@ e
                    WHERE e.queue = p_queue AND e.status = 'W' AND e.keyhash = r.keyhash FOR UPDATE NOWAIT;
                DELETE FROM @schema@.@table@ e
                    WHERE e.queue = p_queue AND e.status = 'W' AND e.keyhash = r.keyhash AND e.expires_at <= v_now;
                v_outcome := 'merged';
                IF NOT @schema@.@table@_merge_into_waiting(v_now, r.timeouts, v_at, r.slot, r.ctid) THEN
                    v_outcome := 'waiting';
                    UPDATE @schema@.@table@ e SET slot = v_slot, status = 'W', token = NULL, started_at = NULL,
                        lease_until = NULL, serial = NULL, timeouts = r.timeouts, process_at = v_at
                    WHERE e.slot = r.slot AND e.ctid = r.ctid;
                END IF;
            EXCEPTION WHEN unique_violation OR lock_not_available THEN
                v_outcome := 'waiting';
                UPDATE @schema@.@table@ e SET token = NULL, lease_until = v_at, timeouts = r.timeouts - 1
                    WHERE e.slot = r.slot AND e.ctid = r.ctid;
            END;
            PERFORM @schema@.notify_sleepers(p_queue, v_at, v_now);
        END IF;
        v_outcomes := v_outcomes || v_outcome;
    END LOOP;
    RETURN v_outcomes;
END $fail$;
