-- From where on a claim need look, priority by priority: see decision 0079. One snapshot for all, hence STABLE; what
-- the clock said before it was taken; the transactions that had ended, and those that had not begun: all from our own
-- number on. (A snapshot's own upper end is behind the last that has ended: one above it may be running.)
CREATE OR REPLACE FUNCTION @schema@.@table@_floor(
    p_queue integer, OUT began_ms bigint, OUT ended bigint, OUT begun bigint, OUT priorities smallint[],
    OUT firsts bigint[]
) LANGUAGE plpgsql STABLE SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $floor$
DECLARE
    v_from smallint := 0; v_priority smallint; v_first bigint;
BEGIN
    began_ms := @earlier@;
    ended := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
    begun := pg_current_xact_id()::text::bigint;
    priorities := '{}';
    firsts := '{}';
    LOOP
        SELECT e.priority, e.process_at INTO v_priority, v_first FROM @schema@.@table@ e
            WHERE e.queue = p_queue AND e.status = 'W' AND e.priority >= v_from
            ORDER BY e.priority, e.process_at, e.id LIMIT 1;
        EXIT WHEN NOT FOUND;
        priorities := priorities || v_priority;
        firsts := firsts || v_first;
        EXIT WHEN v_priority = 255;
        v_from := v_priority + 1;
    END LOOP;
END $floor$;
