-- Read what the claim watermarks are computed from (decision 0079): the first waiting date of each priority, the time
-- before the snapshot was taken, the oldest transaction that had not ended, and the first that had not begun. STABLE,
-- so that one snapshot serves all queries. The first id that had not begun is this transaction's own: xmax of the
-- snapshot only follows the last transaction that has ended, and a later one may be running.
CREATE OR REPLACE FUNCTION @schema@.@table@_watermarks(
    p_queue integer, OUT began_ms bigint, OUT ended bigint, OUT begun bigint, OUT priorities smallint[],
    OUT firsts bigint[]
) LANGUAGE plpgsql STABLE SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $watermarks$
DECLARE
    v_min_priority smallint := 0; v_priority smallint; v_first_date bigint;
BEGIN
    began_ms := @earlier@;
    ended := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
    begun := pg_current_xact_id()::text::bigint;
    priorities := '{}';
    firsts := '{}';
    LOOP
        SELECT e.priority, e.process_at INTO v_priority, v_first_date FROM @schema@.@table@ e
            WHERE e.queue = p_queue AND e.status = 'W' AND e.priority >= v_min_priority
            ORDER BY e.priority, e.process_at, e.id LIMIT 1;
        EXIT WHEN NOT FOUND;
        priorities := priorities || v_priority;
        firsts := firsts || v_first_date;
        EXIT WHEN v_priority = 255;
        v_min_priority := v_priority + 1;
    END LOOP;
END $watermarks$;
