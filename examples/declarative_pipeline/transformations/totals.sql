CREATE MATERIALIZED VIEW totals AS
SELECT count(*) AS journals, sum(events) AS events FROM journals
