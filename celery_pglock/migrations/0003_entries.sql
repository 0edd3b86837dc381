-- Entries that are kept in the database: which edit of its definition a row has, and when that
-- was made; by which edit it was added; and the edit that a leader has stored its schedule of.
ALTER TABLE {schema}.beat_entries
    ADD COLUMN revision bigint NOT NULL DEFAULT 0,
    ADD COLUMN edited_at timestamptz,
    ADD COLUMN added bigint,
    ADD COLUMN registered bigint;
